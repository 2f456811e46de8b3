// Builds BackwardProblem: no other file names its members to fill them. BackwardCall checks the arguments first.
#pragma once

#include "backward_problem.hpp"
#include "build.hpp"
#include "check_backward.hpp"

SSMAX_BEGIN_DETAIL

/// Returns the problem of a backward. `forward` is the problem of the queries that `a` and `g` have rows of.
template <class T>
BackwardProblem<T> make_backward_problem(const Problem<T, T>& forward, const BackwardArguments<T>& a,
                                         const AttentionGradients<T>& g, const AttentionOptions<T>& options) {
  return {.forward = forward,
          .out = addressable(a.out),
          .dout = addressable(g.dout),
          .lse = a.lse,
          .dlse = g.dlse,
          .dq = addressable(g.dq),
          .dk = addressable(g.dk),
          .dv = addressable(g.dv),
          .sinks = options.sinks,
          .dsinks = g.dsinks,
          .scaled_sinks = options.scaled_sinks};
}

/// A call of attention_backward. The constructor throws where an argument does not fit.
template <class T>
class BackwardCall {
  const KeyShare<T> keys_;  // that `problem` refers to

 public:
  const BackwardProblem<T> problem;

  template <class V>
  BackwardCall(const char* function, const BackwardArguments<T>& a, const AttentionGradients<T>& g,
               const AttentionOptions<T>& options, const V& variant)
      : keys_((check_arguments(function, a, g, options), keys_of(a))),
        problem(make_backward_problem(make_problem<T>(a, keys_, options), a, g, options)) {
    check_policies(function, problem.forward, options.rope, variant);
  }
  BackwardCall(const BackwardCall&) = delete;
  BackwardCall& operator=(const BackwardCall&) = delete;
};

SSMAX_END
