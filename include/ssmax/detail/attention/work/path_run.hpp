// Defines PathRun, the works of one path while the lanes of an executor compute them.
#pragma once

#include <atomic>

#include "../terms/variant.hpp"
#include "list.hpp"

SSMAX_BEGIN_SHARED

/// The work of a task in one pass over all tasks.
enum class TaskPass {
  whole,   // computes all keys and stores results
  chunks,  // computes the states of one key chunk
  merge    // merges the chunks' states and stores results
};

/// A phase of a list while it runs. The references must outlive it.
template <class Compute>
struct PhaseRun {
  const Problem<Compute>& problem;
  const Variant<Compute>& variant;
  const Result<Compute>& result;
  const WorkList<Compute>& list;
  const PhaseWorks& works;
};

/// The run of one path.
template <class Compute>
struct PathRun {
  const PhaseRun<Compute>& phase;
  const PathWorks<Compute>& works;
  const Split split;
  Compute* const waiting;  // the states of key chunks
  TaskPass pass;
  std::atomic<index_t> next{0};  // the next piece

  /// Begins the next pass. Returns false if the last pass has ended. Requires that all lanes have ended.
  SSMAX_INLINE bool next_pass() {
    if (pass != TaskPass::chunks) return false;
    pass = TaskPass::merge;
    next = 0;
    return true;
  }
};

SSMAX_END
