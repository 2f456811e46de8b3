// Defines WorkList, what a call has to compute, as data: which rows of which sequences, on which path, in which phase.
// plan.hpp makes the list, run.hpp computes it, explain.hpp prints it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "../../memory/arena.hpp"
#include "../operands/gather.hpp"
#include "../operands/prefetch.hpp"
#include "../terms/problem.hpp"

SSMAX_BEGIN_SHARED

template <class Compute>
struct PathRun;

/// The sizes of query blocks of a path.
struct QueryBlocks {
  index_t unit, most;  // rows of the smallest and of the largest task
  bool are_few;        // whether the call has so few rows that each key is read once
  /// True if a task takes rows of several kv heads, `most` in all.
  bool takes_heads = false;
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

/// Tasks that differ in sequence, kv head and query block alone. The sequences have the same numbers of queries and
/// keys. They are places [first, first + count) of the list. A task computes rows of one of them or, in a phase of
/// shared keys, of all of them.
struct Works {
  index_t first, count;
  index_t rows;    // rows of a kv head that a task may compute together
  index_t blocks;  // query blocks of these rows; of a grid of the backward pass: kv heads at once
  index_t begin;   // the number of the first task, counted over the works of the path
  double cost;     // of a sequence
};

/// How the tasks of a path are divided among lanes.
struct Split {
  index_t chunks;   // key chunks that are separate pieces; 1: a task computes all keys
  index_t at_once;  // tasks that a lane takes at once: tiles, or kv heads that it computes chunk by chunk
  index_t heads;    // kv heads of a task
};

/// The works of one path in one phase.
template <class Compute>
struct PathWorks {
  const PathDriver<Compute>* driver;
  const char* reason;  // why no faster path takes the sequence with the most rows
  index_t rows;        // the largest number of rows of works
  index_t queries;     // the largest number of rows of a task
  index_t tasks;
  Split split;     // if no kv heads lie near each other in memory
  Split together;  // if the keys of kv heads lie near each other at `probe`, in the memory of the call
  index_t heads;   // kv heads of a task, if a key of one lies next to that of another
  struct {
    index_t batch, key;
  } probe;
  index_t first_chunk;  // of all tasks
  TaskSizes sizes;
  std::size_t lane_bytes, waiting_bytes;
  index_t works, works_count;  // the place in WorkList::works
  Works only;                  // the works, if works_count is 1

  SSMAX_INLINE bool waits() const { return split.chunks > 1 || together.chunks > 1; }
  SSMAX_INLINE index_t pieces(const Split& by) const {
    return (tasks / by.heads + by.at_once - 1) / by.at_once * by.chunks;
  }
};

/// Works that one run of the executor computes, or two runs if the keys of a path are split.
struct PhaseWorks {
  index_t first, count;  // PathWorks of the list
  index_t lanes;         // parts of the executor's run, with memory of their own
  std::size_t lane_bytes, bytes;
  /// True if a task computes rows of all sequences of its works: their keys lie in the same memory.
  bool are_together;
};

/// Sequences [first, first + count) of WorkList::members, whose first keys lie in the same memory.
struct SharingGroup {
  index_t first, count;
};

/// The list of a call. Without sequences, the sequences are the batch entries of q, and one entry has them all.
template <class Compute>
struct WorkList {
  static constexpr index_t most_paths = 5, most_phases = 2;

  index_t listed;       // sequences in the list
  Sequence* sequences;  // [listed]
  Sequence* members;    // [listed]: sequences of groups, narrowed to their shared keys
  SharingGroup* groups;
  Works* works;
  index_t group_count, works_count, path_count, phase_count;
  /// The sequences of all groups, and the largest number of queries of one of them.
  index_t shared_sequences, shared_queries;
  PathWorks<Compute> paths[most_phases * most_paths];
  PhaseWorks phases[most_phases];
  std::size_t making_bytes;  // memory to make the list
  std::size_t list_bytes;    // memory of the arrays
  std::size_t state_bytes;   // memory of the states after shared keys, or of the sums of a backward pass
  std::size_t run_bytes;     // memory of states, lanes and split keys

  SSMAX_INLINE bool has_groups() const { return group_count > 0; }
};

SSMAX_END

SSMAX_BEGIN_DETAIL

template <class Compute>
std::span<const PathWorks<Compute>> paths_of(const WorkList<Compute>& list, const PhaseWorks& phase) {
  return {list.paths + phase.first, static_cast<std::size_t>(phase.count)};
}

template <class Compute>
void clear(WorkList<Compute>& list) {
  list.listed = list.group_count = list.works_count = list.path_count = list.phase_count = 0;
  list.shared_sequences = list.shared_queries = 0;
  list.making_bytes = list.list_bytes = list.state_bytes = list.run_bytes = 0;
}

template <class Compute>
std::span<const Works> works_of(const WorkList<Compute>& list, const PathWorks<Compute>& path) {
  if (path.works_count == 1) return {&path.only, 1};
  return {list.works + path.works, static_cast<std::size_t>(path.works_count)};
}

template <class Compute>
const Works& works_of(const WorkList<Compute>& list, const PathWorks<Compute>& path, index_t task) {
  if (path.works_count == 1) return path.only;
  const Works* const first = list.works + path.works;
  return *(std::upper_bound(first, first + path.works_count, task,
                            [](index_t i, const Works& works) { return i < works.begin; }) -
           1);
}

/// Returns how the tasks of a path are divided, for the layout of the keys of a call.
template <class Compute>
Split split_of(const PathWorks<Compute>& path, const Problem<Compute>& problem) {
  const auto are_near = [&](index_t keys) {
    return interleaves_heads(problem.keys, path.probe.batch, path.probe.key, keys);
  };
  if (path.heads > 1 && are_near(1) && may_cut_runs(problem.keys, path.probe.batch, path.probe.key))
    return {path.together.chunks, std::max<index_t>(path.together.at_once / path.heads, 1), path.heads};
  return path.together.at_once > path.split.at_once && are_near(key_chunk) ? path.together : path.split;
}

/// Takes memory for the arrays of a list.
template <class Compute>
void take_arrays(WorkList<Compute>& list, Arena& arena, index_t sequences) {
  list.sequences = arena.take<Sequence>(sequences);
  list.members = arena.take<Sequence>(sequences);
  list.groups = arena.take<SharingGroup>(sequences / 2);
  list.works = arena.take<Works>(sequences + sequences / 2);
}

/// Returns the memory that a call needs for its list and its run.
template <class Compute>
std::size_t bytes_of(const WorkList<Compute>& list) {
  return std::max(list.making_bytes, add_bytes(list.list_bytes, list.run_bytes));
}

/// Puts the works with the highest cost first, so that all lanes end at nearly the same time. Works of equal cost keep
/// their order.
inline void sort_by_cost(std::span<Works> works) {
  const auto is_before = [](const Works& a, const Works& b) {
    return a.cost != b.cost ? a.cost > b.cost : a.first < b.first;
  };
  if (!std::is_sorted(works.begin(), works.end(), is_before))
    std::sort(works.begin(), works.end(), is_before);
}

/// Calls f(sequence) for the sequences of works whose keys are read: one of those that a task computes together.
template <class Compute, class F>
void for_each_sequence(const WorkList<Compute>& list, const Problem<Compute>& problem,
                       const PhaseWorks& phase, const Works& works, const F& f) {
  if (phase.are_together) return f(list.members[works.first]);
  for (index_t i = works.first; i < works.first + works.count; ++i) {
    if (list.listed > 0) {
      f(list.sequences[i]);
    } else {
      f(sequence_of(problem, i));
    }
  }
}

SSMAX_END
