// Defines PathDriver, the row of a path in the table of paths (paths.hpp).
#pragma once

#include <cstddef>

#include "../terms/problem.hpp"

SSMAX_BEGIN_SHARED

template <class Compute>
struct PathRun;

/// The sizes of query blocks of a path.
struct QueryBlocks {
  index_t unit, most;  // rows of the smallest and of the largest task
  bool are_few;        // whether the call has so few rows that each key is read once
};

/// The sizes of a task with some number of rows.
struct TaskSizes {
  std::size_t lane_bytes;  // the scratch memory of a lane
  index_t states;          // numbers of the task's states
  index_t block_keys, tile_lanes;
};

/// A path: its name, its units, and the function that computes its tasks.
template <class Compute>
struct PathDriver {
  Path path;
  /// True if tasks stay in the order of memory, and a lane takes runs of them. For tasks of microseconds it is true:
  /// the processor prefetches neighbouring rows. In the order of their costs they take more time. Measured:
  /// docs/measured.md.
  bool keeps_order;
  QueryBlocks (*blocks)(index_t rows);
  TaskSizes (*sizes)(const Problem<Compute>& problem, index_t queries);
  /// Computes pieces of the run until all are taken. `scratch` is memory of a lane.
  void (*run)(PathRun<Compute>& run, std::byte* scratch);
};

SSMAX_END
