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

#include "../call/explain.hpp"
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
  const index_t sums_of_row = 1 + variant.parameters(), first = problem.forward.first_query;
  const InputRows<A>& q = problem.forward.q;
  Query query{0, 0, 0, problem.forward.shape(0)};
  const double* row = sums.sums;
  const QueryReport* report = sums.reports;
  for (query.batch = 0; query.batch < query.shape.batch; ++query.batch) {
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

/// Operands of the products are E: see BackwardTask.
template <class E, class A>
void run_backward_with(const BackwardProblem<A>& problem, const GradientVariant<A>& variant,
                       Workspace* workspace, const AnyExecutor& executor, const Explainer& explainer) {
  using Task = BackwardTask<A, E>;
  const index_t heads = problem.heads(), queries = query_blocks(problem), keys = key_blocks(problem);
  if (heads == 0 || queries + keys == 0) {
    if (explainer.explains) explainer.publish(Explanation());
    return;
  }
  const QueryShape shape = problem.forward.shape(0);
  const InputRows<A>& q = problem.forward.q;
  const index_t rows = q.extent(0) * q.extent(1) * q.extent(2);
  const BackwardStage& stage = problem.stage;
  const BackwardCut cut(heads, queries, keys, variant.sharing(shape), executor.concurrency());
  const index_t lanes =
      std::min(cut.threads, cut.whole_heads ? heads : cut.at_once * std::min(queries + keys, cut.threads));
  const index_t sums_of_row = 1 + variant.parameters();
  const bool has_sums = !stage.kept && (variant.learns() || !problem.dsinks.empty());

  Arena count, count_sums;
  const auto scratch = [&](Arena& arena) {
    const index_t unit = kernels<PrefillKernels<A, E>>().depth, dv = problem.forward.value_width();
    return BackwardScratch<A, E>(arena, problem.forward.width(), dv, product_depth<E>(problem.forward, unit),
                                 (dv + unit - 1) / unit * unit, sums_of_row,
                                 Multipliers(problem.forward.scale, variant).has_score());
  };
  const BackwardScratch<A, E> counted = scratch(count);
  const std::size_t bytes = count.used();
  HeadSums<A, E>(count_sums, problem, counted);
  const std::size_t sums_bytes = count_sums.used();
  const auto row_bytes = static_cast<std::size_t>(sums_of_row) * sizeof(double) + sizeof(QueryReport);
  const std::size_t sums_of_rows = multiply_bytes(static_cast<std::size_t>(rows), row_bytes);
  const std::size_t lane_bytes = multiply_bytes(static_cast<std::size_t>(lanes), bytes);
  const std::size_t head_bytes = multiply_bytes(static_cast<std::size_t>(cut.at_once), sums_bytes);
  Workspace own;
  if (workspace == nullptr) workspace = &own;
  const std::size_t all_bytes = add_bytes(add_bytes(lane_bytes, head_bytes), has_sums ? sums_of_rows : 0);
  if (explainer.explains) {
    Explanation e;
    e.query_block = query_block;
    e.key_block = backward_key_block;
    e.tile_lanes = counted.tile_lanes;
    e.tasks = cut.whole_heads ? heads : heads * queries * keys;
    e.threads = lanes;
    e.workspace_bytes = all_bytes;
    explainer.publish(e);
  }
  std::byte* memory = workspace->reserve(all_bytes);
  std::byte* const head_memory = memory + lane_bytes;
  CallSums sums = stage.kept;
  if (has_sums) {
    sums.sums = reinterpret_cast<double*>(head_memory + head_bytes);
    sums.reports = reinterpret_cast<QueryReport*>(sums.sums + rows * sums_of_row);
  }

  // Calls f(task, memory of some kv head's sums, i) for i below n, each thread with memory of its own.
  const auto run = [&](index_t n, const auto& f) {
    std::atomic<index_t> next{0};
    executor.run(std::min(lanes, n), [&](index_t lane) {
      Arena arena(memory + static_cast<std::size_t>(lane) * bytes);
      const BackwardScratch<A, E> lane_memory = scratch(arena);
      Task task(problem, variant, lane_memory, sums);
      for (index_t i = next++; i < n; i = next++) f(task, lane, i);
    });
  };
  const auto head_sums = [&](index_t slot) {
    Arena arena(head_memory + static_cast<std::size_t>(slot) * sums_bytes);
    return HeadSums<A, E>(arena, problem, counted);
  };

  if (cut.whole_heads) {
    run(heads, [&](Task& task, index_t lane, index_t head) {
      task.enter(head, head_sums(lane));
      for (index_t j = 0; j < keys; ++j) task.prepare_keys(j);
      for (index_t i = 0; i < queries; ++i) {
        task.survey(i);
        for (index_t j = 0; j < keys; ++j) task.attend(i, j);
        task.finish_queries(i);
      }
      for (index_t j = 0; j < keys; ++j) task.finish_keys(j);
    });
  } else {
    for (index_t first = 0; first < heads; first += cut.at_once) {
      const index_t slots = std::min(cut.at_once, heads - first);
      const auto run_slots = [&](index_t pairs, const auto& f) {
        run(slots * pairs, [&](Task& task, index_t, index_t i) {
          task.enter(first + i % slots, head_sums(i % slots));
          f(task, i / slots);
        });
      };
      run_slots(queries + keys, [&](Task& task, index_t i) {
        if (i < queries) {
          task.survey(i);
        } else {
          task.prepare_keys(i - queries);
        }
      });
      for (index_t diagonal = 0; diagonal < queries + keys - 1; ++diagonal) {
        const index_t lowest = std::max<index_t>(0, diagonal - queries + 1);
        run_slots(std::min(diagonal + 1, keys) - lowest,
                  [&](Task& task, index_t i) { task.attend(diagonal - (lowest + i), lowest + i); });
      }
      run_slots(queries + keys, [&](Task& task, index_t i) {
        if (i < queries) {
          task.finish_queries(i);
        } else {
          task.finish_keys(i - queries);
        }
      });
    }
  }

  if (has_sums) hand_over(problem, variant, sums);
}

SSMAX_END

SSMAX_BEGIN_COMPILED

template <class E, class A>
void run_backward(const shared::BackwardProblem<A>& problem, const shared::GradientVariant<A>& variant,
                  Workspace* workspace, const shared::AnyExecutor& executor) {
  const detail::Route route = detail::route_backward(problem.forward);
  if constexpr (!std::same_as<E, A>) {
    if (route.path != Path::backward_bf16) {
      run_backward<A>(problem, variant, workspace, executor);
      return;
    }
  }
  detail::Explainer explainer(problem.forward.caller);
  explainer.set<A>(route, problem.forward.rows());
  detail::run_backward_with<E>(problem, variant, workspace, executor, explainer);
}

SSMAX_END
