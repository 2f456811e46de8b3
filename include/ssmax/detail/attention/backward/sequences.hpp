// Runs the backward pass of a call whose sequences have their own lengths.
#pragma once

#include <atomic>

#include "../../../workspace.hpp"
#include "../terms/any_executor.hpp"
#include "../work/explain.hpp"
#include "../work/queue.hpp"
#include "grid.hpp"
#include "query_sums.hpp"

SSMAX_BEGIN_DETAIL

/// The backward pass of sequences with their own lengths. Tasks are kv heads, those of the longest sequence first.
/// Exception: a sequence whose kv heads are too long for one task runs before the others and is split like a call of
/// its own. Sums are passed on in the order of the sequences.
template <class Operand, class Compute>
class BackwardSequences {
 public:
  BackwardSequences(const BackwardProblem<Compute>& problem, const GradientVariant<Compute>& variant,
                    index_t threads)
      : problem_(problem),
        variant_(variant),
        threads_(threads),
        kv_heads_(problem.forward.kv_heads()),
        sharing_(variant.sharing(longest_shape(problem.forward))),
        sums_memory_(problem, variant) {
    for_each([&](const BackwardSequence& sequence) {
      all_costs_ += cost(sequence) * static_cast<double>(kv_heads_);
    });
    count();
  }

  const Explanation& explanation() const { return explanation_; }

  /// Runs the pass in memory of explanation().workspace_bytes.
  void run(std::byte* memory, const AnyExecutor& executor) const {
    const CallSums sums = sums_memory_.in(memory + sums_at_);
    SequenceQueue queue(reinterpret_cast<QueuedSequence*>(memory + queue_at_));
    for_each([&](const BackwardSequence& sequence) {
      if (is_long(sequence)) {
        run_of(sequence).run(memory, sums, executor);
      } else {
        queue.add(sequence.batch, kv_heads_, cost(sequence));
      }
    });
    queue.sort();
    run_queue(queue, memory, sums, executor);
    if (sums_memory_.is_needed()) hand_over(problem_, variant_, sums);
  }

 private:
  using Run = BackwardRun<Operand, Compute>;

  /// Calls f(sequence) for every sequence with queries or keys.
  template <class F>
  void for_each(const F& f) const {
    for (index_t batch = 0; batch < problem_.forward.sequences(); ++batch) {
      const BackwardSequence sequence = sequence_of(problem_, batch);
      if (kv_heads_ > 0 && !is_empty(sequence)) f(sequence);
    }
  }
  static double cost(const BackwardSequence& sequence) {
    return static_cast<double>(sequence.rows + query_block) *
           static_cast<double>(sequence.keys + backward_key_block);
  }
  /// Returns whether a sequence is split into smaller tasks than kv heads.
  bool is_long(const BackwardSequence& sequence) const {
    const bool is_balanced = 10 * cost(sequence) * static_cast<double>(threads_) <= all_costs_;
    return sharing_ != Sharing::one_head || (threads_ > 1 && !is_balanced);
  }
  Run run_of(const BackwardSequence& sequence) const {
    return Run(problem_, variant_, sequence, 1, sharing_, threads_);
  }

  /// Counts the memory for the largest long sequence and for the threads that share the other sequences.
  void count() {
    std::size_t run_bytes = 0;
    index_t tasks = 0;
    for_each([&](const BackwardSequence& sequence) {
      const Run run = run_of(sequence);
      const bool runs_alone = is_long(sequence);
      if (runs_alone) {
        run_bytes = std::max(run_bytes, run.bytes());
      } else {
        lane_bytes_ = run.lane_bytes();
        head_bytes_ = std::max(head_bytes_, run.head_bytes());
        shared_tasks_ += kv_heads_;
      }
      tasks += runs_alone ? run.tasks() : kv_heads_;
      explanation_ = explanation_of(run, tasks, std::max(explanation_.threads, run.lanes()), 0);
    });
    lanes_ = std::min(threads_, shared_tasks_);
    const std::size_t shared_bytes =
        multiply_bytes(static_cast<std::size_t>(lanes_), add_bytes(lane_bytes_, head_bytes_));
    Arena queue_arena;
    queue_arena.take<QueuedSequence>(problem_.forward.sequences());
    queue_at_ = std::max(run_bytes, shared_bytes);
    sums_at_ = add_bytes(queue_at_, queue_arena.used());
    explanation_.workspace_bytes = add_bytes(sums_at_, sums_memory_.bytes());
    explanation_.threads = std::max(explanation_.threads, lanes_);
  }

  void run_queue(const SequenceQueue& queue, std::byte* memory, const CallSums& sums,
                 const AnyExecutor& executor) const {
    std::atomic<index_t> next{0};
    executor.run(lanes_, [&](index_t lane) {
      std::byte* own = memory + static_cast<std::size_t>(lane) * (lane_bytes_ + head_bytes_);
      Arena arena(own);
      const auto scratch = take_scratch<Operand>(arena, problem_.forward, variant_);
      BackwardTask<Compute, Operand> task(problem_, variant_, scratch, sums);
      for (index_t i = next++; i < shared_tasks_; i = next++) {
        const SequenceQueue::Place at = queue[i];
        const BackwardSequence sequence = sequence_of(problem_, at.sequence);
        Arena head_arena(own + lane_bytes_);
        task.enter(at.sequence, at.task, HeadSums<Compute, Operand>(head_arena, problem_, sequence, scratch));
        Run::compute_head(task, query_blocks(sequence), key_blocks(sequence));
      }
    });
  }

  const BackwardProblem<Compute>& problem_;
  const GradientVariant<Compute>& variant_;
  const index_t threads_, kv_heads_;
  const Sharing sharing_;
  const SumsMemory<Compute> sums_memory_;
  double all_costs_ = 0;
  index_t shared_tasks_ = 0, lanes_ = 0;
  std::size_t lane_bytes_ = 0, head_bytes_ = 0;  // of a thread that takes tasks from the queue
  std::size_t queue_at_ = 0, sums_at_ = 0;       // in the memory of the pass
  Explanation explanation_;
};

/// Writes and prints the explanation of a backward pass. `e` has the sizes of its tasks.
template <class Compute>
SSMAX_COLD void publish(const BackwardProblem<Compute>& problem, const Route& route, Explanation e) {
  const Problem<Compute>& forward = problem.forward;
  const Route taken = e.tasks > 0 ? route : Route{};
  const Explanation named =
      explanation_of<Compute>(forward.caller, taken, forward.q.extent(2) * forward.heads_per_kv_head());
  e.function = named.function;
  e.target = named.target;
  e.path = named.path;
  e.operands = named.operands;
  e.rows = named.rows;
  e.reason = named.reason;
  if (forward.caller.explanation != nullptr) *forward.caller.explanation = e;
  if (traces_calls()) print(e);
}

template <class Operand, class Compute>
void run_backward_sequences(const BackwardProblem<Compute>& problem, const GradientVariant<Compute>& variant,
                            Workspace& workspace, const AnyExecutor& executor, const Route& route) {
  const BackwardSequences<Operand, Compute> sequences(problem, variant, executor.concurrency());
  if (is_explained(problem.forward.caller)) publish(problem, route, sequences.explanation());
  sequences.run(workspace.reserve(sequences.explanation().workspace_bytes), executor);
}

SSMAX_END
