// Defines PathRun, the works of one path while the lanes of an executor compute them.
#pragma once

#include <algorithm>
#include <atomic>
#include <utility>

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

/// Pieces [first, end) of a run.
struct Pieces {
  index_t first, end;
};

template <class Compute>
struct PathRun {
  const PhaseRun<Compute>& phase;
  const PathWorks<Compute>& works;
  const Split split;
  Compute* const waiting;  // the states of key chunks
  TaskPass pass;
  index_t taken = 0;             // pieces of the only lane
  std::atomic<index_t> next{0};  // the next piece of several lanes

  /// Takes one of `all` pieces or, if there is only one lane, all of them. Returns no piece if all are taken.
  SSMAX_INLINE Pieces take(index_t all) {
    if (phase.works.lanes == 1) return {std::exchange(taken, all), all};
    const index_t first = next.fetch_add(1, std::memory_order_relaxed);
    return {first, std::min(first + 1, all)};
  }
  /// Begins the next pass. Returns false if the last pass has ended. Requires that all lanes have ended.
  SSMAX_INLINE bool next_pass() {
    if (pass != TaskPass::chunks) return false;
    pass = TaskPass::merge;
    next = taken = 0;
    return true;
  }
};

SSMAX_END
