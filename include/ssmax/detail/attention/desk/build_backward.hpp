// Builds BackwardProblem. No other file fills its members. BackwardCall checks the arguments first.
#pragma once

#include "../terms/backward_problem.hpp"
#include "build.hpp"
#include "check_backward.hpp"

SSMAX_BEGIN_DETAIL

/// Returns the problem of a backward pass. `forward` is the problem of the queries and heads in the rows of `a` and
/// `g`. sinks and dsinks cover all heads of the call. A backward pass in one call requires neither `stage` nor
/// `sums`.
template <class T>
BackwardProblem<ComputeType<T>> make_backward_problem(const Problem<ComputeType<T>>& forward,
                                                      const BackwardArguments<T>& a,
                                                      const AttentionGradients<T>& g,
                                                      const AttentionOptions<T>& options,
                                                      const BackwardStage& stage = {},
                                                      const StageSums<ComputeType<T>>& sums = {}) {
  const index_t first_head = forward.first_head();
  const auto old_rows = [&]<class X>(const View<X, 4>& gradient, index_t first) {
    const View<const X, 4> rows = addressable(gradient);
    return g.accumulate ? InputRows<ComputeType<T>>(rows, first) : InputRows<ComputeType<T>>();
  };
  return {.forward = forward,
          .out = {addressable(a.out), first_head},
          .dout = {addressable(g.dout), first_head},
          .lse = {a.lse, first_head},
          .dlse = {g.dlse, first_head},
          .dq = {addressable(g.dq), first_head},
          .dk = addressable(g.dk),
          .dv = addressable(g.dv),
          .old_dq = old_rows(g.dq, first_head),
          .old_dk = old_rows(g.dk, 0),
          .old_dv = old_rows(g.dv, 0),
          .accumulates = g.accumulate,
          .sinks = options.sinks,
          .dsinks = g.dsinks,
          .scaled_sinks = options.scaled_sinks,
          .stage = stage,
          .sums = sums};
}

/// A call of attention_backward. The constructor throws std::invalid_argument for invalid arguments.
template <class T>
class BackwardCall {
  const KeyShareOf<T> keys_;  // `problem` refers to this source

 public:
  const BackwardProblem<ComputeType<T>> problem;

  template <class V>
  BackwardCall(const char* function, const BackwardArguments<T>& a, const AttentionGradients<T>& g,
               const AttentionOptions<T>& options, const V& variant)
      : keys_((check_arguments(function, a, g, options), keys_of(a, options))),
        problem(make_backward_problem(called_by(function, options, make_problem<T>(a, keys_, options)), a, g,
                                      options)) {
    check_policies(function, problem.forward, options.rope, variant);
  }
  BackwardCall(const BackwardCall&) = delete;
  BackwardCall& operator=(const BackwardCall&) = delete;
};

SSMAX_END
