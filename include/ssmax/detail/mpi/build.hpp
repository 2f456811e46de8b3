// Builds the problems and results of the calls that a rank makes for a checked call.
#pragma once

#include "../attention/desk/build.hpp"
#include "../attention/desk/check_backward.hpp"
#include "../attention/desk/complete.hpp"
#include "../attention/desk/narrow.hpp"

SSMAX_BEGIN_DETAIL

/// Returns the problem of all queries of a checked call. The source of `keys` must outlive the result.
template <class A, class Options>
Problem<A> make_problem(const char* function, const InputRows<A>& q, const AnyKeys<A>& keys,
                        const Options& options) {
  Problem<A> problem{.keys = keys};
  build_problem(function, q, options, problem);
  if constexpr (requires { options.statistics; }) problem.statistics = options.statistics.functions();
  problem.q.make_addressable();
  return problem;
}

/// Returns the keys of a checked call in views, of which k holds keys [first, first + k.extent(2)) of `all`.
template <class A>
ViewKeys<A> keys_in(const StoredTensor<A>& k, const StoredTensor<A>& v, index_t all, index_t first = 0) {
  return {addressable<Rows>(k), addressable<Rows>(v), k.functions(), v.functions(), all, first, {}};
}

/// Returns a result that is normalized. out, lse and the statistics of `options` hold the heads from `first_head` on.
template <class A, class Options>
Result<A> make_result(const OutputRows<A>& out, const View<A, 3>& lse, const Options& options,
                      index_t first_head = 0) {
  return {.out = from_head(addressable(out), first_head),
          .lse = {lse, first_head},
          .sinks = options.sinks,
          .scaled_sinks = options.scaled_sinks,
          .statistics = options.statistics.views()};
}

/// Returns the problem of a checked backward pass. `forward` is the problem of the queries and heads in the rows of `a`
/// and `g`. A backward pass in one call requires neither `stage` nor `sums`.
template <class A, class Options>
BackwardProblem<A> make_backward_problem(const Problem<A>& forward, const BackwardArguments<A>& a,
                                         const AttentionGradients<A>& g, const Options& options,
                                         const BackwardStage& stage = {}, const StageSums<A>& sums = {}) {
  BackwardProblem<A> problem{};
  problem.forward = forward;
  problem.stage = stage;
  problem.sums = sums;
  build_backward_problem(a, g, options, forward.first_head(), problem);
  complete_rows(problem);
  return problem;
}

SSMAX_END
