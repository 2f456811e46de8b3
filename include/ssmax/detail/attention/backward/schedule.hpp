// A call of attention's backward as tasks: no two of them add to one sum at the same time, and no
// addition is atomic.
//
// A kv head is a grid: query blocks × key blocks. Pairs in one row of the grid add to the same dq, pairs in one
// column to the same dk and dv. Each sum takes its pairs in rising order, whichever thread computes them: the same
// bits for every executor. Where there are enough kv heads, each is one task. Else the pairs of an antidiagonal,
// which share neither row nor column, are computed at once, one antidiagonal after the other, for as many kv heads
// at a time as it takes to fill the threads.
#pragma once

#include <atomic>
#include <optional>

#include "../call/explain.hpp"
#include "../call/sequences.hpp"
#include "driver.hpp"
#include "task.hpp"

SSMAX_BEGIN_DETAIL

/// How a call is cut.
struct BackwardCut {
  index_t threads;   // that get memory of their own
  index_t at_once;   // kv heads whose sums are gathered at the same time
  bool whole_heads;  // each is one task

  BackwardCut(index_t heads, index_t query_blocks, index_t key_blocks, Sharing sharing, index_t most_threads)
      : threads(sharing == Sharing::any ? 1 : most_threads) {
    const index_t rounds = (heads + threads - 1) / threads;
    const bool balanced = heads >= 9 * (rounds * threads - heads);  // at most a tenth of them idle
    whole_heads = threads == 1 || (balanced && sharing == Sharing::one_head);
    const index_t diagonals = std::max<index_t>(1, query_blocks + key_blocks - 1);
    // Pairs of an antidiagonal of average length. As many kv heads are taken at once as make 8 pairs a
    // thread: under a causal mask, half of these have nothing to do.
    const double all_pairs = static_cast<double>(query_blocks) * static_cast<double>(key_blocks);
    const auto pairs = std::max<index_t>(1, static_cast<index_t>(all_pairs / static_cast<double>(diagonals)));
    at_once = whole_heads                 ? std::min(threads, heads)
              : sharing == Sharing::heads ? 1
                                          : std::min(heads, (8 * threads + pairs - 1) / pairs);
  }
};

/// Hands the sums of all queries, in their order, to scaling, score and sinks.
template <class A>
void hand_over(const BackwardProblem<A>& problem, const GradientVariant<A>& variant, const CallSums& sums) {
  const Problem<A>& forward = problem.forward;
  const index_t sums_of_row = 1 + variant.parameters(), first = forward.first_query;
  const index_t first_entry = forward.first_entry(), end_entry = first_entry + forward.entries();
  const InputRows<A>& q = forward.q;
  Query query{0, 0, 0, forward.shape(first_entry)};
  const double* row = sums.sums;
  const QueryReport* report = sums.reports;
  for (query.batch = first_entry; query.batch < end_entry; ++query.batch) {
    for (query.head = q.first_head(); query.head < q.end_head(); ++query.head) {
      double dsink = 0;
      const index_t end = first + q.extent(2);
      for (query.index = first; query.index < end; ++query.index, row += sums_of_row, ++report) {
        variant.accumulate(query, {query.head, report->position, report->n}, row);
        dsink += report->dsink;
      }
      if (!problem.dsinks.empty()) {
        problem.dsinks[static_cast<std::size_t>(query.head)] += static_cast<A>(dsink);
      }
    }
  }
}

template <class A>
bool is_empty(const BackwardProblem<A>& problem) {
  return problem.heads() == 0 || query_blocks(problem) + key_blocks(problem) == 0;
}

/// Takes one thread's memory.
template <class E, class A>
BackwardScratch<A, E> take_scratch(Arena& arena, const Problem<A>& forward,
                                   const GradientVariant<A>& variant) {
  const index_t unit = kernels<PrefillKernels<A, E>>().depth, dv = forward.value_width();
  return BackwardScratch<A, E>(arena, forward.width(), dv, product_depth<E>(forward, unit),
                               (dv + unit - 1) / unit * unit, 1 + variant.parameters(),
                               Multipliers(forward.scale, variant).has_score());
}

/// The backward of a call, or of one of its sequences: how it is cut, and the memory that it needs. Operands of the
/// products are E: see BackwardTask.
template <class E, class A>
class BackwardRun {
 public:
  using Task = BackwardTask<A, E>;

  BackwardRun(const BackwardProblem<A>& problem, const GradientVariant<A>& variant, Sharing sharing,
              index_t threads)
      : problem_(problem),
        variant_(variant),
        queries_(query_blocks(problem)),
        keys_(key_blocks(problem)),
        cut_(problem.heads(), queries_, keys_, sharing, threads),
        lanes_(std::min(cut_.threads, cut_.whole_heads
                                          ? problem.heads()
                                          : cut_.at_once * std::min(queries_ + keys_, cut_.threads))),
        counted_(take_scratch<E>(count_, problem.forward, variant)) {
    Arena count_sums;
    HeadSums<A, E>(count_sums, problem, counted_);
    head_bytes_ = count_sums.used();
  }
  BackwardRun(const BackwardRun&) = delete;
  BackwardRun& operator=(const BackwardRun&) = delete;

  index_t lanes() const { return lanes_; }
  index_t tasks() const { return cut_.whole_heads ? problem_.heads() : problem_.heads() * queries_ * keys_; }
  index_t tile_lanes() const { return counted_.tile_lanes; }
  std::size_t lane_bytes() const { return count_.used(); }
  std::size_t head_bytes() const { return head_bytes_; }
  std::size_t bytes() const {
    return add_bytes(multiply_bytes(static_cast<std::size_t>(lanes_), lane_bytes()),
                     multiply_bytes(static_cast<std::size_t>(cut_.at_once), head_bytes_));
  }

  /// Requires memory of `bytes`.
  void run(std::byte* memory, const CallSums& sums, const AnyExecutor& executor) const {
    std::byte* const head_memory = memory + static_cast<std::size_t>(lanes_) * lane_bytes();
    const index_t heads = problem_.heads(), first_head = problem_.first_head();
    // Calls f(task, memory of some kv head's sums, i) for i below n, each thread with memory of its own.
    const auto run = [&](index_t n, const auto& f) {
      std::atomic<index_t> next{0};
      executor.run(std::min(lanes_, n), [&](index_t lane) {
        Arena arena(memory + static_cast<std::size_t>(lane) * lane_bytes());
        const BackwardScratch<A, E> lane_memory = take_scratch<E>(arena, problem_.forward, variant_);
        Task task(problem_, variant_, lane_memory, sums);
        for (index_t i = next++; i < n; i = next++) f(task, lane, i);
      });
    };
    const auto head_sums = [&](index_t slot) {
      Arena arena(head_memory + static_cast<std::size_t>(slot) * head_bytes_);
      return HeadSums<A, E>(arena, problem_, counted_);
    };

    if (cut_.whole_heads) {
      run(heads, [&](Task& task, index_t lane, index_t head) {
        task.enter(first_head + head, head_sums(lane));
        compute_head(task, queries_, keys_);
      });
      return;
    }
    for (index_t first = 0; first < heads; first += cut_.at_once) {
      const index_t slots = std::min(cut_.at_once, heads - first);
      const auto run_slots = [&](index_t pairs, const auto& f) {
        run(slots * pairs, [&](Task& task, index_t, index_t i) {
          task.enter(first_head + first + i % slots, head_sums(i % slots));
          f(task, i / slots);
        });
      };
      run_slots(queries_ + keys_, [&](Task& task, index_t i) {
        if (i < queries_) {
          task.survey(i);
        } else {
          task.prepare_keys(i - queries_);
        }
      });
      for (index_t diagonal = 0; diagonal < queries_ + keys_ - 1; ++diagonal) {
        const index_t lowest = std::max<index_t>(0, diagonal - queries_ + 1);
        run_slots(std::min(diagonal + 1, keys_) - lowest,
                  [&](Task& task, index_t i) { task.attend(diagonal - (lowest + i), lowest + i); });
      }
      run_slots(queries_ + keys_, [&](Task& task, index_t i) {
        if (i < queries_) {
          task.finish_queries(i);
        } else {
          task.finish_keys(i - queries_);
        }
      });
    }
  }

  /// Computes all of the kv head that the task has entered.
  static void compute_head(Task& task, index_t queries, index_t keys) {
    for (index_t j = 0; j < keys; ++j) task.prepare_keys(j);
    for (index_t i = 0; i < queries; ++i) {
      task.survey(i);
      for (index_t j = 0; j < keys; ++j) task.attend(i, j);
      task.finish_queries(i);
    }
    for (index_t j = 0; j < keys; ++j) task.finish_keys(j);
  }

 private:
  const BackwardProblem<A>& problem_;
  const GradientVariant<A>& variant_;
  const index_t queries_, keys_;
  const BackwardCut cut_;
  const index_t lanes_;  // threads that get memory of their own
  Arena count_;
  const BackwardScratch<A, E> counted_;
  std::size_t head_bytes_ = 0;
};

/// The sums of all queries of a call: their memory, and where those of a sequence lie.
template <class A>
class SumsMemory {
 public:
  SumsMemory(const BackwardProblem<A>& problem, const GradientVariant<A>& variant)
      : q_(problem.forward.q),
        kept_(problem.stage.kept),
        sums_of_row_(1 + variant.parameters()),
        is_needed_(!kept_ && (variant.learns() || !problem.dsinks.empty())) {}

  bool is_needed() const { return is_needed_; }
  std::size_t bytes() const {
    const auto row_bytes = static_cast<std::size_t>(sums_of_row_) * sizeof(double) + sizeof(QueryReport);
    return is_needed_ ? multiply_bytes(static_cast<std::size_t>(rows()), row_bytes) : 0;
  }
  CallSums in(std::byte* memory) const {
    if (!is_needed_) return kept_;
    auto* sums = reinterpret_cast<double*>(memory);
    return {sums, reinterpret_cast<QueryReport*>(sums + rows() * sums_of_row_)};
  }
  CallSums of_rows(const CallSums& all, const SequenceRows& rows) const {
    if (!all) return all;
    const index_t before = (rows.entry * q_.extent(2) + rows.first) * q_.extent(1);
    return {all.sums + before * sums_of_row_, all.reports + before};
  }

 private:
  index_t rows() const { return q_.extent(0) * q_.extent(1) * q_.extent(2); }

  const InputRows<A>& q_;
  const CallSums kept_;
  const index_t sums_of_row_;
  const bool is_needed_;
};

template <class E, class A>
Explanation explanation_of(const BackwardRun<E, A>& run, index_t tasks, index_t lanes, std::size_t bytes) {
  Explanation e;
  e.query_block = query_block;
  e.key_block = backward_key_block;
  e.tile_lanes = run.tile_lanes();
  e.tasks = tasks;
  e.threads = lanes;
  e.workspace_bytes = bytes;
  return e;
}

template <class E, class A>
void run_backward_with(const BackwardProblem<A>& problem, const GradientVariant<A>& variant,
                       Workspace& workspace, const AnyExecutor& executor, const Explainer& explainer) {
  if (is_empty(problem)) {
    if (explainer.explains) explainer.publish(Explanation());
    return;
  }
  const BackwardRun<E, A> run(problem, variant, variant.sharing(problem.forward.shape(0)),
                              executor.concurrency());
  const SumsMemory<A> sums_memory(problem, variant);
  const std::size_t all_bytes = add_bytes(run.bytes(), sums_memory.bytes());
  if (explainer.explains) {
    explainer.publish(explanation_of(run, run.tasks(), run.lanes(), all_bytes));
  }
  std::byte* memory = workspace.reserve(all_bytes);
  const CallSums sums = sums_memory.in(memory + run.bytes());
  run.run(memory, sums, executor);
  if (sums_memory.is_needed()) hand_over(problem, variant, sums);
}

/// Computes sequences with their own lengths. kv heads are tasks, the longest first. A sequence whose kv heads are too
/// long for that is cut as a call with it alone, before the others. Sums are handed over in the order of the sequences.
template <class E, class A>
void run_backward_sequences(const BackwardProblem<A>& problem, const GradientVariant<A>& variant,
                            Workspace& workspace, const AnyExecutor& executor, const Explainer& explainer) {
  const Problem<A>& forward = problem.forward;
  const SequenceLengths& lengths = forward.lengths;
  const index_t threads = executor.concurrency(), kv_heads = forward.kv_heads();
  const Sharing sharing = variant.sharing(longest_shape(forward));
  // 1. Find the sequences that are cut by themselves.
  const auto cost = [](const BackwardProblem<A>& sequence) {
    return static_cast<double>(sequence.forward.rows() + query_block) *
           static_cast<double>(sequence.keys() + backward_key_block);
  };
  double all_costs = 0;
  for_each_sequence(problem, lengths, [&](index_t, const BackwardProblem<A>& s) {
    all_costs += cost(s) * static_cast<double>(kv_heads);
  });
  const auto is_long = [&](const BackwardProblem<A>& sequence) {
    const bool is_balanced = 10 * cost(sequence) * static_cast<double>(threads) <= all_costs;
    return sharing != Sharing::one_head || (threads > 1 && !is_balanced);
  };
  // 2. Reserve what the largest of them need, and the threads that share the others.
  std::size_t run_bytes = 0, lane_bytes = 0, head_bytes = 0;
  index_t tasks = 0, shared_tasks = 0;
  Explanation e;
  for_each_sequence(problem, lengths, [&](index_t, const BackwardProblem<A>& sequence) {
    if (is_empty(sequence)) return;
    const BackwardRun<E, A> run(sequence, variant, sharing, threads);
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
  const SumsMemory<A> sums_memory(problem, variant);
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
  for_each_sequence(problem, lengths, [&](index_t b, const BackwardProblem<A>& sequence) {
    if (is_empty(sequence)) return;
    if (is_long(sequence)) {
      BackwardRun<E, A>(sequence, variant, sharing, threads).run(memory, sums_of(b), executor);
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
    const BackwardScratch<A, E> lane_memory = take_scratch<E>(arena, forward, variant);
    std::optional<BackwardProblem<A>> sequence;
    std::optional<BackwardTask<A, E>> task;
    for (index_t i = next++; i < shared_tasks; i = next++) {
      const SequenceQueue::Place at = queue[i];
      if (!sequence || sequence->forward.sequence != at.sequence) {
        sequence.emplace(of_sequence(problem, at.sequence));
        task.emplace(*sequence, variant, lane_memory, sums_of(at.sequence));
      }
      Arena head_arena(own + lane_bytes);
      task->enter(sequence->first_head() + at.task, HeadSums<A, E>(head_arena, *sequence, lane_memory));
      BackwardRun<E, A>::compute_head(*task, query_blocks(*sequence), key_blocks(*sequence));
    }
  });
  // 5. Hand the sums over.
  if (!sums_memory.is_needed()) return;
  for_each_sequence(problem, lengths, [&](index_t b, const BackwardProblem<A>& sequence) {
    if (sequence.forward.rows() > 0) hand_over(sequence, variant, sums_of(b));
  });
}

SSMAX_END

SSMAX_BEGIN_COMPILED

template <class E, class A>
void run_backward(const shared::BackwardProblem<A>& problem, const shared::GradientVariant<A>& variant,
                  Workspace* workspace, const shared::AnyExecutor& executor) {
  const detail::Route route = detail::route_backward(problem);
  if constexpr (!std::same_as<E, A>) {
    if (route.path != Path::backward_bf16) {
      run_backward<A>(problem, variant, workspace, executor);
      return;
    }
  }
  detail::Explainer explainer(problem.forward.caller);
  explainer.set<A>(route, problem.forward.rows());
  Workspace own;
  if (workspace == nullptr) workspace = &own;
  if (problem.forward.lengths.is_given()) {
    detail::run_backward_sequences<E>(problem, variant, *workspace, executor, explainer);
  } else {
    detail::run_backward_with<E>(problem, variant, *workspace, executor, explainer);
  }
}

SSMAX_END
