// Computes the tasks of a path: each lane takes pieces until all are taken.
#pragma once

#include <algorithm>
#include <limits>

#include "cut.hpp"
#include "path_run.hpp"

SSMAX_BEGIN_DETAIL

/// Returns the keys of a range that lie in a chunk. The size of the result is 0 or negative if no key does.
inline KeyRange part_of(KeyRange keys, index_t chunk) {
  return {std::max(keys.begin, chunk * key_chunk), std::min(keys.end, (chunk + 1) * key_chunk)};
}

/// A lane that computes tasks of a path.
template <class Task, class Compute>
class TaskLane {
 public:
  TaskLane(PathRun<Compute>& run, std::byte* scratch)
      : run_(run),
        arena_(scratch),
        memory_(arena_, run.works.queries, run.phase.problem),
        totals_(arena_.take<Compute>((run.works.together.at_once - 1) * run.works.sizes.states)),
        task_(run.phase.problem, run.phase.variant, memory_) {
    task_.take_heads(run.split.heads);
  }

  /// Computes a piece. The query blocks with the highest cost come first. All passes share this function, so that its
  /// body, which holds the task, is compiled once.
  void compute(index_t piece) {
    const TaskPass pass = run_.pass;
    const Result<Compute>& result = run_.phase.result;
    const index_t parts = parts_of(run_), together = together_of(run_),
                  group = parts == 1 ? piece : piece / parts;
    if (pass == TaskPass::whole && together == 1 && !result.continues()) {
      prepare(group);
      if (task_.store_at_once(result)) return;
    }
    if (group != entered_) enter(group, together);
    // A task over all keys computes the states of its first chunk directly in its totals.
    const auto begin_totals = [&](Head& head) {
      if (!head.has_totals) task_.begin(head.total, result);
      head.has_totals = true;
    };
    const auto for_each_head = [&](const auto& f) {
      for (index_t h = 0; h < together; ++h) f(heads_[h]);
    };
    if (result.continues() && pass != TaskPass::chunks) {
      for_each_head([&](Head& head) {
        prepare(head.task);
        begin_totals(head);
      });
    }
    const KeyRange keys = pass == TaskPass::chunks
                              ? part_of(all_seen_, run_.works.first_chunk + piece - group * parts)
                              : all_seen_;
    for (index_t chunk = keys.begin / key_chunk; chunk * key_chunk < keys.end; ++chunk) {
      for_each_head([&](Head& head) {
        const KeyRange range = part_of(head.seen, chunk);
        if (range.size() <= 0) return;
        prepare(head.task);
        if (!task_.sees_chunk(range)) return;
        Compute* states = pass != TaskPass::whole ? waiting_states(head.task, chunk)
                          : head.has_totals       ? memory_.chunk
                                                  : head.total;
        if (pass != TaskPass::merge) task_.attend_chunk(range, states);
        if (pass == TaskPass::chunks) return;
        if (states == head.total) {
          head.has_totals = true;
        } else {
          begin_totals(head);
          task_.merge(head.total, states);
        }
      });
    }
    if (pass == TaskPass::chunks) return;
    for_each_head([&](Head& head) {
      prepare(head.task);
      begin_totals(head);
      task_.store(head.total, result);
    });
  }

  /// Returns the pieces of a group of tasks, and the tasks of a group, in the pass of a run.
  static index_t parts_of(const PathRun<Compute>& run) {
    return run.pass == TaskPass::chunks ? run.split.chunks : 1;
  }
  static index_t together_of(const PathRun<Compute>& run) {
    return run.pass == TaskPass::merge ? 1 : run.split.at_once;
  }

 private:
  /// The task of a kv head in a group.
  struct Head {
    index_t task = 0;
    KeyRange seen{};
    Compute* total = nullptr;
    bool has_totals = false;
  };

  /// Prepares the tasks of a group.
  void enter(index_t group, index_t together) {
    entered_ = group;
    all_seen_ = {std::numeric_limits<index_t>::max(), 0};
    for (index_t h = 0; h < together; ++h) {
      const index_t task = group * together + h;
      Head& head = heads_[h];
      head.task = task;
      head.seen = prepare(task);
      head.total = h == 0 ? memory_.total : totals_ + (h - 1) * run_.works.sizes.states;
      head.has_totals = false;
      if (head.seen.size() <= 0) continue;
      all_seen_ = {std::min(all_seen_.begin, head.seen.begin), std::max(all_seen_.end, head.seen.end)};
    }
  }

  /// Prepares the task with number `index`, unless it is prepared. Returns the hull of its visible keys.
  KeyRange prepare(index_t index) {
    if (index == prepared_) return seen_;
    const index_t heads = run_.split.heads;
    if (index == prepared_ + 1 && kv_head_ + heads < run_.phase.problem.kv_heads()) {  // saves divisions
      kv_head_ += heads;
    } else {
      find(index * heads);
    }
    prepared_ = index;
    return seen_ = task_.prepare(sequences_, kv_head_, first_, count_);
  }

  /// Finds the sequences, the first kv head and the rows of a task. `index` counts tasks of one kv head.
  void find(index_t index) {
    const WorkList<Compute>& list = run_.phase.list;
    const Problem<Compute>& problem = run_.phase.problem;
    const Works& works = works_of(list, run_.works, index);
    const bool are_together = run_.phase.works.are_together;
    const index_t kv_heads = problem.kv_heads(), heads = (are_together ? 1 : works.count) * kv_heads,
                  at = index - works.begin, head = at % heads, place = works.first + head / kv_heads;
    sequences_ = {&entry_, 1};
    if (are_together) {
      sequences_ = {list.members + works.first, static_cast<std::size_t>(works.count)};
    } else if (list.listed > 0) {
      sequences_ = {list.sequences + place, 1};
    } else if (entry_.batch != place) {
      entry_ = sequence_of(problem, place);
    }
    // Query blocks are counted from the last one.
    const index_t queries = run_.works.queries;
    first_ = (works.blocks - 1 - at / heads) * queries;
    count_ = std::min(queries, works.rows - first_);
    kv_head_ = head % kv_heads;
  }

  Compute* waiting_states(index_t task, index_t chunk) const {
    return run_.waiting +
           (task * run_.split.chunks + chunk - run_.works.first_chunk) * run_.works.sizes.states;
  }

  PathRun<Compute>& run_;
  Arena arena_;
  const typename Task::Memory memory_;
  Compute* const totals_;  // of the heads of a group after the first one
  Task task_;
  Sequence entry_{};       // the batch entry, in a list without sequences
  index_t prepared_ = -2;  // the prepared task, with the members that follow. No task follows -2
  index_t kv_head_ = 0, first_ = 0, count_ = 0;  // first_, count_: rows
  std::span<const Sequence> sequences_{};
  KeyRange seen_{};
  Head heads_[max_heads_together];
  KeyRange all_seen_{};   // by the heads of the group
  index_t entered_ = -1;  // group
};

/// PathDriver::run of paths whose tasks keep states.
template <class Task, class Compute>
void run_tasks(PathRun<Compute>& run, std::byte* scratch) {
  using Lane = TaskLane<Task, Compute>;
  const index_t all = run.works.tasks / run.split.heads / Lane::together_of(run) * Lane::parts_of(run);
  auto taken = run.take(all);
  if (taken.first >= all) return;
  for (Lane lane(run, scratch); taken.first < all; taken = run.take(all)) {
    for (index_t i = taken.first; i < taken.end; ++i) lane.compute(i);
  }
}

template <class Task, class Compute>
TaskSizes sizes_of_tasks(const Problem<Compute>& problem, index_t queries) {
  Arena count;
  const typename Task::Memory counted(count, queries, problem);
  return {count.used(), counted.layout.size(), counted.block_keys, counted.tile_lanes};
}

template <class Task>
QueryBlocks blocks_of_tasks(index_t rows) {
  return {Task::min_queries(), Task::max_queries(), Task::has_few_queries(rows), Task::takes_heads};
}

SSMAX_END
