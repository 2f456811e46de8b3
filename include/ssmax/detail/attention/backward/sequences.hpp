// Runs the backward pass of a call whose sequences have their own lengths.
#pragma once

#include <atomic>
#include <optional>

#include "../../../workspace.hpp"
#include "../../threads/any_executor.hpp"
#include "../work/explain.hpp"
#include "grid.hpp"
#include "query_sums.hpp"

SSMAX_BEGIN_DETAIL

/// Runs the backward pass of sequences with their own lengths. Tasks are kv heads, those of the longest sequence
/// first. Exception: a sequence whose kv heads are too long for one task runs before the others and is split like a
/// call of its own. Sums are passed on in the order of the sequences.
template <class Operand, class Compute>
void run_backward_sequences(const BackwardProblem<Compute>& problem, const GradientVariant<Compute>& variant,
                            Workspace& workspace, const AnyExecutor& executor, const Explainer& explainer) {
  const Problem<Compute>& forward = problem.forward;
  const SequenceLengths& lengths = forward.lengths;
  const index_t threads = executor.concurrency(), kv_heads = forward.kv_heads();
  const Sharing sharing = variant.sharing(longest_shape(forward));
  // 1. Find the long sequences, which are split into smaller tasks.
  const auto cost = [](const BackwardProblem<Compute>& sequence) {
    return static_cast<double>(sequence.forward.rows() + query_block) *
           static_cast<double>(sequence.keys() + backward_key_block);
  };
  double all_costs = 0;
  for_each_sequence(problem, lengths, [&](index_t, const BackwardProblem<Compute>& s) {
    all_costs += cost(s) * static_cast<double>(kv_heads);
  });
  const auto is_long = [&](const BackwardProblem<Compute>& sequence) {
    const bool is_balanced = 10 * cost(sequence) * static_cast<double>(threads) <= all_costs;
    return sharing != Sharing::one_head || (threads > 1 && !is_balanced);
  };
  // 2. Reserve memory for the largest long sequence and for the threads that share the other sequences.
  std::size_t run_bytes = 0, lane_bytes = 0, head_bytes = 0;
  index_t tasks = 0, shared_tasks = 0;
  Explanation e;
  for_each_sequence(problem, lengths, [&](index_t, const BackwardProblem<Compute>& sequence) {
    if (is_empty(sequence)) return;
    const BackwardRun<Operand, Compute> run(sequence, variant, sharing, threads);
    const bool runs_alone = is_long(sequence);
    if (runs_alone) {
      run_bytes = std::max(run_bytes, run.bytes());
    } else {
      lane_bytes = run.lane_bytes();
      head_bytes = std::max(head_bytes, run.head_bytes());
      shared_tasks += kv_heads;
    }
    tasks += runs_alone ? run.tasks() : kv_heads;
    e = explanation_of(run, tasks, std::max(e.threads, run.lanes()), 0);
  });
  const index_t lanes = std::min(threads, shared_tasks);
  const std::size_t shared_bytes =
      multiply_bytes(static_cast<std::size_t>(lanes), add_bytes(lane_bytes, head_bytes));
  const SumsMemory<Compute> sums_memory(problem, variant);
  Arena queue_arena;
  queue_arena.take<QueuedSequence>(lengths.count());
  const std::size_t queue_at = std::max(run_bytes, shared_bytes);
  const std::size_t sums_at = add_bytes(queue_at, queue_arena.used());
  e.workspace_bytes = add_bytes(sums_at, sums_memory.bytes());
  e.threads = std::max(e.threads, lanes);
  if (explainer.explains) explainer.publish(e);
  std::byte* memory = workspace.reserve(e.workspace_bytes);
  const CallSums sums = sums_memory.in(memory + sums_at);
  const auto sums_of = [&](index_t b) { return sums_memory.of_rows(sums, lengths.query_rows(b)); };
  // 3. Run the long sequences, and queue the others.
  SequenceQueue queue(reinterpret_cast<QueuedSequence*>(memory + queue_at));
  for_each_sequence(problem, lengths, [&](index_t b, const BackwardProblem<Compute>& sequence) {
    if (is_empty(sequence)) return;
    if (is_long(sequence)) {
      BackwardRun<Operand, Compute>(sequence, variant, sharing, threads).run(memory, sums_of(b), executor);
    } else {
      queue.add(b, kv_heads, cost(sequence));
    }
  });
  queue.sort();
  // 4. Run the queue.
  std::atomic<index_t> next{0};
  executor.run(lanes, [&](index_t lane) {
    std::byte* own = memory + static_cast<std::size_t>(lane) * (lane_bytes + head_bytes);
    Arena arena(own);
    const BackwardScratch<Compute, Operand> lane_memory = take_scratch<Operand>(arena, forward, variant);
    std::optional<BackwardProblem<Compute>> sequence;
    std::optional<BackwardTask<Compute, Operand>> task;
    for (index_t i = next++; i < shared_tasks; i = next++) {
      const SequenceQueue::Place at = queue[i];
      if (!sequence || sequence->forward.sequence != at.sequence) {
        sequence.emplace(of_sequence(problem, at.sequence));
        task.emplace(*sequence, variant, lane_memory, sums_of(at.sequence));
      }
      Arena head_arena(own + lane_bytes);
      task->enter(sequence->first_head() + at.task,
                  HeadSums<Compute, Operand>(head_arena, *sequence, lane_memory));
      BackwardRun<Operand, Compute>::compute_head(*task, query_blocks(*sequence), key_blocks(*sequence));
    }
  });
  // 5. Pass the sums to scaling, score and sinks.
  if (!sums_memory.is_needed()) return;
  for_each_sequence(problem, lengths, [&](index_t b, const BackwardProblem<Compute>& sequence) {
    if (sequence.forward.rows() > 0) hand_over(sequence, variant, sums_of(b));
  });
}

SSMAX_END
