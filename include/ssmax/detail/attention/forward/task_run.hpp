// Splits a call of attention into tasks: kv heads × query blocks and, if threads would idle, × key chunks.
//
// Each chunk's sums are computed separately and added in the order of the keys. So results are bit-identical for
// every split and every executor.
//
// The sequences of a call may take several paths. All these paths share the runs of the executor: decode is bound by
// memory and prefill by arithmetic, so threads that compute different paths at the same time end earlier.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>

#include "../../memory/slot.hpp"
#include "../call/explain.hpp"
#include "path_sequences.hpp"

SSMAX_BEGIN_DETAIL

/// The split of a call into tasks.
struct Partition {
  index_t queries = 0;  // largest number of queries of a task
  index_t blocks = 0;   // largest number of query blocks per kv head
  index_t tasks = 0;
  index_t chunks = 1;  // key chunks that are separate tasks; 1: a task computes all keys
};

/// The limit on the memory of states that wait for a merge. Above this limit, keys are not split.
inline constexpr index_t max_waiting_bytes = index_t{32} << 20;

/// Splits a call on one path. The tasks of other paths do not count: their costs differ too much.
template <class Task, class Compute>
Partition partition_tasks(const PathCall<Compute>& call, index_t chunks) {
  const Problem<Compute>& problem = call.problem;
  const PathSequences<Compute>& sequences = call.sequences;
  const index_t unit = Task::min_queries(), rows = call.rows(), threads = call.threads;
  Partition cut{.queries = std::min(Task::max_queries(), (rows + unit - 1) / unit * unit)};
  const auto count = [&] {
    cut.blocks = (rows + cut.queries - 1) / cut.queries;
    cut.tasks = sequences ? sequences.blocks(cut.queries) * problem.kv_heads()
                          : problem.entries() * problem.kv_heads() * cut.blocks;
  };
  count();
  // Under a causal mask the last query blocks cost the most. Four tasks per thread balance the load.
  while (threads > 1 && cut.tasks < 4 * threads && cut.queries > unit) {
    cut.queries = (cut.queries / unit + 1) / 2 * unit;
    count();
  }
  if (threads > 1 && cut.tasks < 2 * threads) {
    const index_t state = cut.queries * (problem.value_width() + 8) * static_cast<index_t>(sizeof(Compute));
    if (chunks > 1 && chunks <= max_waiting_bytes / state / cut.tasks) cut.chunks = chunks;
  }
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
enum class Pass {
  whole,   // computes all keys and stores results
  chunks,  // computes the states of one key chunk
  merge    // merges the chunks' states and stores results
};

/// The tasks of a call on one path, for the lanes of an executor. The call must outlive it.
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
    const Problem<Compute>& problem = call_.problem;
    KeyRange chunks{std::numeric_limits<index_t>::max(), 0};  // chunks with stored keys of any batch entry
    const index_t first_entry = problem.first_entry();
    for (index_t batch = first_entry; batch < first_entry + problem.entries(); ++batch) {
      const KeyRange stored = problem.stored(batch);
      if (stored.size() <= 0) continue;
      chunks = {std::min(chunks.begin, stored.begin / key_chunk),
                std::max(chunks.end, (stored.end - 1) / key_chunk + 1)};
    }
    first_chunk_ = chunks.begin;
    cut_ = partition_tasks<Task>(call_, chunks.size());
    if (cut_.chunks > 1) pass_ = Pass::chunks;
    Arena count;
    const Memory counted(count, cut_.queries, problem);
    lane_bytes_ = count.used();
    block_keys_ = counted.block_keys;
    tile_lanes_ = counted.tile_lanes;
    states_size_ = counted.states_size();
    Arena waiting;
    if (cut_.chunks > 1) waiting.take<Compute>(pieces() * states_size_);
    waiting_bytes_ = waiting.used();
  }

  const PathCall<Compute>& call() const { return call_; }
  /// Returns the number of tasks, key chunks counted separately. More lanes would be idle.
  index_t pieces() const { return cut_.tasks * cut_.chunks; }
  /// Returns the bytes of the scratch memory of a lane.
  std::size_t lane_bytes() const { return lane_bytes_; }
  /// Returns the bytes of the memory that all lanes share.
  std::size_t common_bytes() const { return add_bytes(waiting_bytes_, call_.sequences.queue_bytes()); }

  /// Writes the sizes of the tasks.
  void explain(Explanation& e) const {
    e.query_block = cut_.queries;
    e.key_block = block_keys_;
    e.tile_lanes = tile_lanes_;
    e.tasks = cut_.tasks;
    e.key_chunks = cut_.chunks;
    e.shared_sequences = call_.problem.shared.sequences;
  }

  /// Takes memory of common_bytes(), and lists the tasks of sequences.
  void bind(std::byte* common) {
    waiting_ = reinterpret_cast<Compute*>(common);
    queue_ = call_.sequences.queue(common + waiting_bytes_, cut_.queries, call_.problem.kv_heads());
  }

  /// Computes tasks of the pass until all are taken. `scratch` is memory of lane_bytes().
  void run(std::byte* scratch) {
    const Problem<Compute>& problem = call_.problem;
    const index_t parts = pass_ == Pass::chunks ? cut_.chunks : 1;  // per task
    index_t i = next_++;
    if (i >= cut_.tasks * parts) return;
    Arena arena(scratch);
    const Memory own(arena, cut_.queries, problem);
    Slot<SequenceCall<Compute>> sequence;
    Slot<Task> task;
    const Result<Compute>* to = &call_.result;
    KeyRange seen{};
    index_t prepared = -1;
    // The query blocks with the highest cost come first. All passes share one loop, so that its body, which holds the
    // task, is compiled once.
    for (; i < cut_.tasks * parts; i = next_++) {
      const index_t index = i / parts;
      if (index != prepared) {
        index_t heads = problem.entries() * problem.kv_heads(), blocks = cut_.blocks, place = index;
        const Problem<Compute>* from = &problem;
        if (call_.sequences) {
          const SequenceQueue::Place at = queue_[index];
          sequence.emplace(problem, call_.result, at.sequence);
          from = &sequence->problem;
          to = &sequence->result;
          heads = problem.kv_heads();
          blocks = (from->rows() + cut_.queries - 1) / cut_.queries;
          place = at.task;
        }
        const index_t head = place % heads, first = (blocks - 1 - place / heads) * cut_.queries;
        task.emplace(*from, call_.variant, own);
        seen = task->prepare(from->first_entry() + head / from->kv_heads(), head % from->kv_heads(), first,
                             std::min(cut_.queries, from->rows() - first));
        prepared = index;
      }
      // A task over all keys computes the states of its first chunk directly in its totals.
      bool has_totals = false;
      const auto begin_totals = [&] {
        if (!has_totals) task->begin(own.total, *to);
        has_totals = true;
      };
      if (call_.result.continues() && pass_ != Pass::chunks) begin_totals();
      const KeyRange keys = pass_ == Pass::chunks ? part_of(seen, first_chunk_ + i % parts) : seen;
      for_each_chunk(keys, [&](index_t chunk, KeyRange range) {
        if (!task->sees_chunk(range)) return;
        Compute* states = pass_ != Pass::whole ? waiting_states(index, chunk)
                          : has_totals         ? own.chunk
                                               : own.total;
        if (pass_ != Pass::merge) task->attend_chunk(range, states);
        if (pass_ == Pass::chunks) return;
        if (states == own.total) {
          has_totals = true;
        } else {
          begin_totals();
          task->merge(own.total, states);
        }
      });
      if (pass_ == Pass::chunks) continue;
      begin_totals();
      task->store(own.total, *to);
    }
  }

  /// Begins the next pass. Returns false if the last pass has ended. Requires that all lanes have ended.
  bool next_pass() {
    if (pass_ != Pass::chunks) return false;
    pass_ = Pass::merge;
    next_ = 0;
    return true;
  }

 private:
  using Memory = typename Task::Memory;

  Compute* waiting_states(index_t task, index_t chunk) const {
    return waiting_ + (task * cut_.chunks + chunk - first_chunk_) * states_size_;
  }

  const PathCall<Compute>& call_;
  Partition cut_;
  index_t first_chunk_ = 0;
  std::size_t lane_bytes_ = 0, waiting_bytes_ = 0;
  index_t block_keys_ = 0, tile_lanes_ = 0, states_size_ = 0;
  Compute* waiting_ = nullptr;  // the states of key chunks
  SequenceQueue queue_;
  Pass pass_ = Pass::whole;
  std::atomic<index_t> next_{0};
};

SSMAX_END
