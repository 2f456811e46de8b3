// Splits a call of attention into tasks: kv heads × query blocks and, if threads would idle, × key chunks.
//
// Each chunk's sums are computed separately and added in the order of the keys. So results are bit-identical for
// every split and every executor.
#pragma once

#include <atomic>
#include <limits>
#include <optional>

#include "../call/explain.hpp"
#include "decode.hpp"
#include "decode_bf16.hpp"
#include "driver.hpp"
#include "path_sequences.hpp"
#include "prefill.hpp"
#include "shared_keys.hpp"
#include "short.hpp"

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

template <class Task, class Compute>
Partition partition_tasks(const Problem<Compute>& problem, const PathSequences<Compute>& sequences,
                          index_t threads, index_t chunks) {
  const index_t unit = Task::min_queries(), rows = sequences ? sequences.max_rows() : problem.rows();
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

/// Computes a call. Exception: if the sequences of the call have their own lengths, computes the sequences that take
/// one path.
template <class Task, class Compute>
void run_tasks(const Problem<Compute>& problem, const PathSequences<Compute>& sequences,
               const Variant<Compute>& variant, const Result<Compute>& result, Workspace& workspace,
               const AnyExecutor& executor, const Explainer& explainer) {
  using Memory = typename Task::Memory;
  const index_t threads = executor.concurrency();
  KeyRange chunks{std::numeric_limits<index_t>::max(), 0};  // chunks with stored keys of any batch entry
  const index_t first_entry = problem.first_entry();
  for (index_t batch = first_entry; batch < first_entry + problem.entries(); ++batch) {
    const KeyRange stored = problem.stored(batch);
    if (stored.size() <= 0) continue;
    chunks = {std::min(chunks.begin, stored.begin / key_chunk),
              std::max(chunks.end, (stored.end - 1) / key_chunk + 1)};
  }
  const Partition cut = partition_tasks<Task>(problem, sequences, threads, chunks.size());
  const index_t pieces = cut.tasks * cut.chunks, lanes = std::min(threads, pieces);

  Arena count;
  const Memory counted(count, cut.queries, problem);
  const index_t states_size = counted.states_size();
  const std::size_t bytes = count.used();
  const index_t waiting_size = cut.chunks > 1 ? pieces * states_size : 0;
  const std::size_t lane_bytes = multiply_bytes(static_cast<std::size_t>(lanes), bytes);
  const std::size_t queued_bytes = add_bytes(lane_bytes, sequences.queue_bytes());
  const std::size_t all_bytes =
      add_bytes(queued_bytes, static_cast<std::size_t>(waiting_size) * sizeof(Compute));
  if (explainer.explains) {
    Explanation e;
    e.query_block = cut.queries;
    e.key_block = counted.block_keys;
    e.tile_lanes = counted.tile_lanes;
    e.tasks = cut.tasks;
    e.key_chunks = cut.chunks;
    e.threads = lanes;
    e.workspace_bytes = all_bytes;
    e.shared_sequences = problem.shared.sequences;
    explainer.publish(e);
    if (explainer.only_explains) return;
  }
  std::byte* memory = workspace.reserve(all_bytes);
  const SequenceQueue queue = sequences.queue(memory + lane_bytes, cut.queries, problem.kv_heads());
  Compute* waiting = reinterpret_cast<Compute*>(memory + queued_bytes);

  const auto waiting_states = [&](index_t task, index_t chunk) {
    return waiting + (task * cut.chunks + chunk - chunks.begin) * states_size;
  };
  // Each thread has memory of its own. The query blocks with the highest cost come first. All passes share one loop,
  // so that its body, which holds the task, is compiled once.
  const auto run = [&](Pass pass) {
    const index_t parts = pass == Pass::chunks ? cut.chunks : 1;  // per task
    std::atomic<index_t> next{0};
    executor.run(lanes, [&](index_t lane) {
      Arena arena(memory + static_cast<std::size_t>(lane) * bytes);
      const Memory own(arena, cut.queries, problem);
      std::optional<SequenceCall<Compute>> sequence;
      std::optional<Task> task;
      const Result<Compute>* to = &result;
      KeyRange seen{};
      index_t prepared = -1;
      for (index_t i = next++; i < cut.tasks * parts; i = next++) {
        const index_t index = i / parts;
        if (index != prepared) {
          index_t heads = problem.entries() * problem.kv_heads(), blocks = cut.blocks, place = index;
          const Problem<Compute>* from = &problem;
          if (sequences) {
            const SequenceQueue::Place at = queue[index];
            sequence.emplace(problem, result, at.sequence);
            from = &sequence->problem;
            to = &sequence->result;
            heads = problem.kv_heads();
            blocks = (from->rows() + cut.queries - 1) / cut.queries;
            place = at.task;
          }
          const index_t head = place % heads, first = (blocks - 1 - place / heads) * cut.queries;
          task.emplace(*from, variant, own);
          seen = task->prepare(from->first_entry() + head / from->kv_heads(), head % from->kv_heads(), first,
                               std::min(cut.queries, from->rows() - first));
          prepared = index;
        }
        // A task over all keys computes the states of its first chunk directly in its totals.
        bool has_totals = false;
        const auto begin_totals = [&] {
          if (!has_totals) task->begin(own.total, *to);
          has_totals = true;
        };
        if (result.continues() && pass != Pass::chunks) begin_totals();
        const KeyRange keys = pass == Pass::chunks ? part_of(seen, chunks.begin + i % parts) : seen;
        for_each_chunk(keys, [&](index_t chunk, KeyRange range) {
          if (!task->sees_chunk(range)) return;
          Compute* states = pass != Pass::whole ? waiting_states(index, chunk)
                            : has_totals        ? own.chunk
                                                : own.total;
          if (pass != Pass::merge) task->attend_chunk(range, states);
          if (pass == Pass::chunks) return;
          if (states == own.total) {
            has_totals = true;
          } else {
            begin_totals();
            task->merge(own.total, states);
          }
        });
        if (pass == Pass::chunks) continue;
        begin_totals();
        task->store(own.total, *to);
      }
    });
  };
  if (cut.chunks == 1) return run(Pass::whole);
  run(Pass::chunks);
  run(Pass::merge);
}

/// Runs the driver of a path with operands of type Operand.
template <class Operand, class Compute>
void run_path(Path path, const Problem<Compute>& problem, const PathSequences<Compute>& sequences,
              const Variant<Compute>& variant, const Result<Compute>& result, Workspace& workspace,
              const AnyExecutor& executor, const Explainer& explainer) {
  const auto run_all = [&]<class Task>(std::type_identity<Task>) {
    run_tasks<Task>(problem, sequences, variant, result, workspace, executor, explainer);
  };
  if constexpr (std::same_as<Operand, Compute>) {
    if (path == Path::short_keys) {
      run_short(problem, sequences, variant, result, workspace, executor, explainer);
    } else if (path == Path::decode) {
      run_all(std::type_identity<DecodeTask<Compute>>{});
    } else {
      run_all(std::type_identity<PrefillTask<Compute>>{});
    }
  } else if (path == Path::prefill_bf16) {
    run_all(std::type_identity<PrefillTask<Compute, Operand>>{});
  } else {
    run_all(std::type_identity<DecodeBf16Task<Compute, Operand>>{});
  }
}

/// Returns whether the operands of a path are of type Operand, in a call that computes in Compute.
template <class Operand, class Compute>
constexpr bool has_operands(Path path) {
  return (path == Path::prefill_bf16 || path == Path::decode_bf16) != std::same_as<Operand, Compute>;
}

/// Runs the paths with operands of type Operand that sequences take, one after the other. Returns whether some
/// sequences take a path with the other operand type.
template <class Operand, class Compute>
bool run_sequences(const Problem<Compute>& problem, const Variant<Compute>& variant,
                   const Result<Compute>& result, Workspace& workspace, const AnyExecutor& executor,
                   Explainer& explainer) {
  bool has_run = false, has_others = false;
  for (const Path path :
       {Path::short_keys, Path::decode, Path::prefill, Path::decode_bf16, Path::prefill_bf16}) {
    const PathSequences<Compute> sequences(problem, result, path, explainer.explains);
    if (!sequences) continue;
    if (!has_operands<Operand, Compute>(path)) {
      has_others = true;
      continue;
    }
    explainer.set<Compute>({path, sequences.reason()}, sequences.max_rows());
    run_path<Operand>(path, problem, sequences, variant, result, workspace, executor, explainer);
    has_run = true;
  }
  if (!has_run && !has_others && explainer.explains) explainer.publish(Explanation());
  return has_others;
}

/// Returns the bytes of a workspace that a call needs.
template <class Operand, class Compute>
std::size_t workspace_bytes(Problem<Compute> problem, const Variant<Compute>& variant,
                            const Result<Compute>& result, const AnyExecutor& executor) {
  Explanation explanation;
  problem.caller.explanation = &explanation;
  problem.caller.only_explains = true;
  compiled::run_attention<Operand>(problem, variant, result, nullptr, executor);
  return explanation.workspace_bytes;
}

/// Computes a call whose sequences may have shared keys. Returns false, and has no effect, if no sequence has.
template <class Operand, class Compute>
bool run_shared(const Problem<Compute>& problem, const Variant<Compute>& variant,
                const Result<Compute>& result, Workspace& workspace, const AnyExecutor& executor) {
  // 1. Find the groups of sequences.
  using Groups = SharedKeyGroups<Compute>;
  Arena count;
  const Groups counted(count, problem);
  std::byte* memory = workspace.reserve(count.used());
  Arena first(memory);
  Groups groups(first, problem);
  if (groups.is_empty()) return false;
  // 2. Reserve memory for the groups, the states and the largest pass.
  take_states(count, problem, groups.most_queries());
  std::size_t pass_bytes = workspace_bytes<Operand>(groups.of_other_keys(), variant, result, executor);
  for (index_t i = 0; i < groups.size(); ++i)
    pass_bytes =
        std::max(pass_bytes, workspace_bytes<Operand>(groups.of_group(i), variant, result, executor));
  const Caller& caller = problem.caller;
  if (caller.only_explains) {
    // The source of a planned call may have no shared keys.
    Problem<Compute> unshared = problem;
    unshared.shared.is_searched = true;
    pass_bytes = std::max(pass_bytes, workspace_bytes<Operand>(unshared, variant, result, executor));
    compiled::run_attention<Operand>(groups.of_other_keys(), variant, result, nullptr, executor);
    caller.explanation->workspace_bytes = add_bytes(count.used(), pass_bytes);
    return true;
  }
  std::byte* const reserved = workspace.reserve(add_bytes(count.used(), pass_bytes));
  Arena arena(reserved);
  if (reserved != memory) {
    groups = Groups(arena, problem);
  } else {
    arena.take<std::byte>(static_cast<index_t>(first.used()));
  }
  // 3. Compute the states after the shared keys, and continue from them.
  const index_t queries = groups.most_queries();
  const AttentionState<Compute> states = take_states(arena, problem, queries);
  SoftmaxState<Compute>{states.shift.data_handle(), states.sum.data_handle(), states.o.data_handle()}.reset(
      states.shift.size(), problem.value_width());
  Workspace rest(std::span(reserved + count.used(), pass_bytes));
  for (index_t i = 0; i < groups.size(); ++i)
    compiled::run_attention<Operand>(groups.of_group(i), variant, Result<Compute>{.state = states}, &rest,
                                     executor);
  Result<Compute> continued = result;
  continued.start = states;
  compiled::run_attention<Operand>(groups.of_other_keys(), variant, continued, &rest, executor);
  if (caller.explanation != nullptr)
    caller.explanation->workspace_bytes = add_bytes(count.used(), pass_bytes);
  return true;
}

SSMAX_END

SSMAX_BEGIN_COMPILED

template <class Operand, class Compute>
void run_attention(const shared::Problem<Compute>& problem, const shared::Variant<Compute>& variant,
                   const shared::Result<Compute>& result, Workspace* workspace,
                   const shared::AnyExecutor& executor) {
  detail::Explainer explainer(problem.caller);
  if (problem.rows() == 0 || problem.entries() == 0 || problem.kv_heads() == 0) {
    if (explainer.explains) explainer.publish(Explanation());
    return;
  }
  Workspace own;
  if (workspace == nullptr) workspace = &own;
  if (detail::SharedKeyGroups<Compute>::may_share(problem, result) &&
      detail::run_shared<Operand>(problem, variant, result, *workspace, executor))
    return;
  bool is_others = false;  // whether a path needs operands Compute in place of Operand
  if (problem.lengths.is_given()) {
    is_others = detail::run_sequences<Operand>(problem, variant, result, *workspace, executor, explainer);
  } else {
    const detail::Route route = detail::route(problem, result, explainer.explains);
    is_others = !detail::has_operands<Operand, Compute>(route.path);
    if (!is_others) {
      explainer.set<Compute>(route, problem.rows());
      detail::run_path<Operand>(route.path, problem, {}, variant, result, *workspace, executor, explainer);
    }
  }
  if constexpr (!std::same_as<Operand, Compute>) {
    if (!is_others) return;
    shared::Problem<Compute> others = problem;
    others.shared.is_searched = true;
    run_attention<Compute>(others, variant, result, workspace, executor);
  }
}

SSMAX_END
