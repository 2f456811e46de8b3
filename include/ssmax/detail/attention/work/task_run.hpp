// Splits a call of attention into tasks: kv heads × query blocks and, if threads would idle, × key chunks.
//
// Each chunk's sums are computed separately and added in the order of the keys. So results are bit-identical for
// every split and every executor.
//
// Few queries read each key once. If the keys of several kv heads lie near each other, a lane computes a group of kv
// heads chunk by chunk, in the order of memory. It prepares the task of a kv head again for each chunk.
//
// The sequences of a call may take several paths. All these paths share the runs of the executor: decode is bound by
// memory and prefill by arithmetic, so threads that compute different paths at the same time end earlier.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>

#include "../../memory/slot.hpp"
#include "../operands/gather.hpp"
#include "explain.hpp"
#include "phase.hpp"

SSMAX_BEGIN_DETAIL

/// The split of the sequences of a path into tasks.
struct Partition {
  index_t queries = 0;  // largest number of queries of a task
  index_t tasks = 0;
  index_t chunks = 1;      // key chunks that are separate tasks; 1: a task computes all keys
  index_t max_chunks = 1;  // chunks that have memory: a plan may run with keys of another layout
  index_t heads = 1;       // kv heads that a lane computes together, chunk by chunk
};

/// The limit on the memory of states that wait for a merge. Above this limit, keys are not split.
inline constexpr index_t max_waiting_bytes = index_t{32} << 20;

/// The largest number of kv heads that a lane computes together.
inline constexpr index_t max_heads_together = 16;

/// Returns the largest divisor of `kv_heads` that is at most max_heads_together and `limit`. Returns at least 1.
inline index_t divisor_up_to(index_t kv_heads, double limit) {
  index_t heads = std::min(kv_heads, max_heads_together);
  while (heads > 1 && (kv_heads % heads != 0 || static_cast<double>(heads) > limit)) --heads;
  return std::max<index_t>(heads, 1);
}

/// Chooses the kv heads that a lane computes together, and whether their key chunks are separate tasks. Measured:
/// docs/measured.md.
///
/// A task of a group is prepared again for each chunk. So kv heads are not grouped if the mask has runs or a predicate,
/// or if the first query sees less than half of its keys.
template <class Compute>
void group_heads(const PathCall<Compute>& call, index_t chunks, Partition& cut) {
  const Problem<Compute>& problem = call.phase.problem;
  const Variant<Compute>& variant = call.phase.variant;
  if (chunks < 2 || variant.has_runs || variant.has_predicate) return;
  if (problem.caller.only_explains && !problem.in_cache) return;  // a plan over views has no keys
  double all = 0, most = 0;                                       // stored keys
  bool groups = false;
  call.for_each([&](const Sequence& sequence) {
    const KeyRange stored = sequence.stored;
    if (stored.size() <= 0) return;
    if (all == 0) {
      const KeyRange seen = variant.row(*QueryCursor(problem, sequence, 0, 0), stored).keys;
      groups = 2 * seen.size() >= stored.size() &&
               interleaves_heads(problem.keys, sequence.batch, stored.begin, key_chunk);
    }
    all += static_cast<double>(stored.size());
    most = std::max(most, static_cast<double>(stored.size()));
  });
  if (!groups) return;
  // A thread takes four groups or more.
  const index_t kv_heads = problem.kv_heads();
  const auto parts = static_cast<double>(4 * call.threads);
  if (call.threads == 1) {
    cut.heads = divisor_up_to(kv_heads, max_heads_together);
  } else if (cut.max_chunks > 1) {
    cut.heads = divisor_up_to(kv_heads, static_cast<double>(cut.tasks) * static_cast<double>(chunks) / parts);
    if (cut.heads > 1) cut.chunks = cut.max_chunks;
  } else {
    cut.heads = divisor_up_to(kv_heads, static_cast<double>(kv_heads) * all / (most * parts));
  }
}

/// Splits a call on one path. The tasks of other paths do not count: their costs differ too much.
template <class Task, class Compute>
Partition partition_tasks(const PathCall<Compute>& call, index_t chunks) {
  const Problem<Compute>& problem = call.phase.problem;
  const index_t unit = Task::min_queries(), rows = call.rows(), threads = call.threads;
  Partition cut{.queries = std::min(Task::max_queries(), (rows + unit - 1) / unit * unit)};
  const auto count = [&] { cut.tasks = call.blocks(cut.queries) * problem.kv_heads(); };
  count();
  // Under a causal mask the last query blocks cost the most. Four tasks per thread balance the load.
  while (threads > 1 && cut.tasks < 4 * threads && cut.queries > unit) {
    cut.queries = (cut.queries / unit + 1) / 2 * unit;
    count();
  }
  const bool few_queries = Task::has_few_queries(rows), idle = cut.tasks < 2 * threads;
  // Groups of kv heads are split if they are few and long: the merge takes another run of the executor.
  const bool splits_groups = few_queries && chunks >= 4 && cut.tasks < 4 * threads * problem.kv_heads();
  if (threads > 1 && (idle || splits_groups)) {
    const index_t state = cut.queries * (problem.value_width() + 8) * static_cast<index_t>(sizeof(Compute));
    if (chunks > 1 && chunks <= max_waiting_bytes / state / cut.tasks) cut.max_chunks = chunks;
    if (idle) cut.chunks = cut.max_chunks;
  }
  if (few_queries) group_heads(call, chunks, cut);
  return cut;
}

/// Returns the keys of a range that lie in a chunk. The size of the result is 0 or negative if no key does.
inline KeyRange part_of(KeyRange keys, index_t chunk) {
  return {std::max(keys.begin, chunk * key_chunk), std::min(keys.end, (chunk + 1) * key_chunk)};
}

template <class F>
void for_each_chunk(KeyRange keys, const F& f) {
  for (index_t chunk = keys.begin / key_chunk; chunk * key_chunk < keys.end; ++chunk) {
    f(chunk, part_of(keys, chunk));
  }
}

/// The work of a task in one pass over all tasks.
enum class TaskPass {
  whole,   // computes all keys and stores results
  chunks,  // computes the states of one key chunk
  merge    // merges the chunks' states and stores results
};

/// The tasks of the sequences of one path, for the lanes of an executor.
///
///     bind(memory);
///     do {
///       // any number of lanes: run(scratch of the lane)
///     } while (next_pass());
template <class Task, class Compute>
class TaskRun {
 public:
  /// Splits the call into tasks and counts their memory.
  explicit TaskRun(const PathCall<Compute>& call) : call_(call) {
    const Problem<Compute>& problem = call_.phase.problem;
    KeyRange chunks{std::numeric_limits<index_t>::max(), 0};  // chunks with stored keys of any sequence
    call_.phase.for_each([&](const Sequence& sequence) {
      const KeyRange stored = sequence.stored;
      if (stored.size() <= 0) return;
      chunks = {std::min(chunks.begin, stored.begin / key_chunk),
                std::max(chunks.end, (stored.end - 1) / key_chunk + 1)};
    });
    first_chunk_ = chunks.begin;
    if (Task::has_few_queries(call_.rows()) && chunks.size() > 1)
      more_totals_ = std::clamp<index_t>(problem.kv_heads() - 1, 0, max_heads_together - 1);
    cut_ = partition_tasks<Task>(call_, chunks.size());
    if (cut_.chunks > 1) pass_ = TaskPass::chunks;
    Arena count;
    const Memory counted(count, cut_.queries, problem);
    block_keys_ = counted.block_keys;
    tile_lanes_ = counted.tile_lanes;
    states_size_ = counted.layout.size();
    count.take<Compute>(more_totals_ * states_size_);
    lane_bytes_ = count.used();
    Arena waiting;
    if (cut_.max_chunks > 1) waiting.take<Compute>(cut_.tasks * cut_.max_chunks * states_size_);
    waiting_bytes_ = waiting.used();
  }

  const PathCall<Compute>& call() const { return call_; }
  /// Returns the number of tasks, key chunks counted separately. More lanes would be idle.
  index_t pieces() const { return cut_.tasks * cut_.max_chunks; }
  /// Returns the bytes of the scratch memory of a lane.
  std::size_t lane_bytes() const { return lane_bytes_; }
  /// Returns the bytes of the memory that all lanes share.
  std::size_t common_bytes() const { return add_bytes(waiting_bytes_, call_.queue_bytes()); }

  /// Writes the sizes of the tasks.
  void explain(Explanation& e) const {
    e.query_block = cut_.queries;
    e.key_block = block_keys_;
    e.tile_lanes = tile_lanes_;
    e.tasks = cut_.tasks;
    e.key_chunks = cut_.chunks;
    e.heads_together = cut_.heads;
    e.shared_sequences = call_.phase.shared_sequences;
  }

  /// Takes memory of common_bytes(), and lists the tasks of sequences.
  void bind(std::byte* common) {
    waiting_ = reinterpret_cast<Compute*>(common);
    queue_ = call_.queue(common + waiting_bytes_, cut_.queries);
  }

  /// Computes tasks of the pass until all are taken. `scratch` is memory of lane_bytes().
  void run(std::byte* scratch) {
    const index_t parts = pass_ == TaskPass::chunks ? cut_.chunks : 1;  // per group
    const index_t together = pass_ == TaskPass::merge ? 1 : cut_.heads,
                  pieces = cut_.tasks / together * parts;
    index_t i = next_++;
    if (i >= pieces) return;
    Arena arena(scratch);
    const Memory own(arena, cut_.queries, call_.phase.problem);
    Compute* const totals = arena.take<Compute>(more_totals_ * states_size_);
    Lane lane(*this, own);
    Head heads[max_heads_together];
    KeyRange all_seen{};
    index_t entered = -1;  // group
    // The query blocks with the highest cost come first. All passes share one loop, so that its body, which holds the
    // task, is compiled once.
    for (; i < pieces; i = next_++) {
      if (const index_t group = i / parts; group != entered) {
        all_seen = {std::numeric_limits<index_t>::max(), 0};
        for (index_t h = 0; h < together; ++h) {
          const index_t task = group * together + h;
          heads[h] = {task, lane.prepare(task), h == 0 ? own.total : totals + (h - 1) * states_size_};
          if (heads[h].seen.size() <= 0) continue;
          all_seen = {std::min(all_seen.begin, heads[h].seen.begin),
                      std::max(all_seen.end, heads[h].seen.end)};
        }
        entered = group;
      }
      // A task over all keys computes the states of its first chunk directly in its totals.
      const auto begin_totals = [&](Head& head) {
        if (!head.has_totals) lane.task.begin(head.total, call_.phase.result);
        head.has_totals = true;
      };
      const auto for_each_head = [&](const auto& f) {
        for (index_t h = 0; h < together; ++h) f(heads[h]);
      };
      if (call_.phase.result.continues() && pass_ != TaskPass::chunks) {
        for_each_head([&](Head& head) {
          lane.prepare(head.task);
          begin_totals(head);
        });
      }
      const KeyRange keys =
          pass_ == TaskPass::chunks ? part_of(all_seen, first_chunk_ + i % parts) : all_seen;
      for_each_chunk(keys, [&](index_t chunk, KeyRange) {
        for_each_head([&](Head& head) {
          const KeyRange range = part_of(head.seen, chunk);
          if (range.size() <= 0) return;
          lane.prepare(head.task);
          if (!lane.task.sees_chunk(range)) return;
          Compute* states = pass_ != TaskPass::whole ? waiting_states(head.task, chunk)
                            : head.has_totals        ? own.chunk
                                                     : head.total;
          if (pass_ != TaskPass::merge) lane.task.attend_chunk(range, states);
          if (pass_ == TaskPass::chunks) return;
          if (states == head.total) {
            head.has_totals = true;
          } else {
            begin_totals(head);
            lane.task.merge(head.total, states);
          }
        });
      });
      if (pass_ == TaskPass::chunks) continue;
      for_each_head([&](Head& head) {
        lane.prepare(head.task);
        begin_totals(head);
        lane.task.store(head.total, call_.phase.result);
      });
    }
  }

  /// Begins the next pass. Returns false if the last pass has ended. Requires that all lanes have ended.
  bool next_pass() {
    if (pass_ != TaskPass::chunks) return false;
    pass_ = TaskPass::merge;
    next_ = 0;
    return true;
  }

 private:
  using Memory = typename Task::Memory;

  /// The task of a kv head in a group.
  struct Head {
    index_t task = 0;
    KeyRange seen{};
    Compute* total = nullptr;
    bool has_totals = false;
  };

  /// The task that a lane computes now.
  struct Lane {
    const TaskRun& run;
    Task task;
    Sequence entry{};  // the batch entry, unless tasks come from a queue
    KeyRange seen{};
    index_t prepared = -1;

    Lane(const TaskRun& a_run, const Memory& memory)
        : run(a_run), task(a_run.call_.phase.problem, a_run.call_.phase.variant, memory) {}

    /// Prepares the task with number `index`, unless it is prepared. Returns the hull of its visible keys.
    KeyRange prepare(index_t index) {
      if (index == prepared) return seen;
      prepared = index;
      const PathCall<Compute>& call = run.call_;
      const Problem<Compute>& problem = call.phase.problem;
      const index_t kv_heads = problem.kv_heads();
      if (call.is_queued()) {
        const SequenceQueue::Place at = run.queue_[index];
        return enter(call.together(at.sequence), at.task % kv_heads, at.task / kv_heads);
      }
      const index_t heads = problem.sequences() * kv_heads, head = index % heads, batch = head / kv_heads;
      if (entry.batch != batch) entry = sequence_of(problem, batch);
      return enter({&entry, 1}, head % kv_heads, index / heads);
    }

    /// Prepares a query block, counted from the last one.
    KeyRange enter(std::span<const Sequence> sequences, index_t kv_head, index_t block) {
      const index_t queries = run.cut_.queries, rows = run.call_.rows_of(sequences.front()),
                    first = (run.call_.blocks_of(sequences.front(), queries) - 1 - block) * queries;
      return seen = task.prepare(sequences, kv_head, first, std::min(queries, rows - first));
    }
  };

  Compute* waiting_states(index_t task, index_t chunk) const {
    return waiting_ + (task * cut_.chunks + chunk - first_chunk_) * states_size_;
  }

  const PathCall<Compute> call_;
  Partition cut_;
  index_t first_chunk_ = 0;
  /// The totals of a lane after the first one. Their number does not depend on the layout of the keys: a plan may run
  /// with other keys.
  index_t more_totals_ = 0;
  std::size_t lane_bytes_ = 0, waiting_bytes_ = 0;
  index_t block_keys_ = 0, tile_lanes_ = 0, states_size_ = 0;
  Compute* waiting_ = nullptr;  // the states of key chunks
  SequenceQueue queue_;
  TaskPass pass_ = TaskPass::whole;
  std::atomic<index_t> next_{0};
};

SSMAX_END
