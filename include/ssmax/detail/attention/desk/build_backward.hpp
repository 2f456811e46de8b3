// Checks the arguments of attention_backward, before anything is written, and builds BackwardProblem. No other file
// fills its members.
#pragma once

#include "../terms/backward_problem.hpp"
#include "build.hpp"

SSMAX_BEGIN_DETAIL

template <class T>
void check_arguments(const char* function, const BackwardArguments<T>& a, const AttentionGradients<T>& g,
                     const AttentionOptions<T>& options) {
  using Compute = ComputeType<T>;
  check_inputs(function, a.q, a.k, a.v);
  check_options(function, CallKind::backward, options, a.q.extent(1));
  check_last_part(function, "first_key", a.first_key, a.k.extent(2), "leaves no room for k in keys,", "keys",
                  a.keys);
  check_query_part(function, a);
  check_lengths(function, options.lengths, a.q, a.k);
  if (options.lengths.is_given()) {
    if (a.first_key != 0 || a.keys != 0) check_no_lengths(function, options.lengths, "of a part of the keys");
    if (a.first_query != 0 || a.queries != 0) {
      check_no_lengths(function, options.lengths, "of a part of the queries");
    }
  }
  const auto check_rows = [&](const char* name, const auto& view) {
    check_view(function, name, view);
    for (int i = 0; i < 3; ++i) check_extent(function, name, view, i, "q", a.q, i);
  };
  check_rows("out", a.out);
  check_extent(function, "out", a.out, 3, "v", a.v, 3);
  check_rows("lse", a.lse);
  check_view(function, "dout", g.dout);
  check_same_extents(function, "dout", g.dout, "out", a.out);
  const bool has_dlse = is_given(g.dlse);
  if (has_dlse) check_rows("dlse", g.dlse);
  const View<const Compute, 1> sinks(options.sinks), dsinks(g.dsinks);
  if (!sinks.empty())
    check_equal(function, "sinks", "has extent", sinks.extent(0), "heads are", a.q.extent(1));
  const auto check_no_overlap_with_inputs = [&](const char* name, const auto& output) {
    const auto no_overlap = [&](const char* other_name, const auto& other) {
      check_no_overlap(function, name, output, other_name, other);
    };
    no_overlap("q", a.q);
    no_overlap("k", a.k);
    no_overlap("v", a.v);
    no_overlap("out", a.out);
    no_overlap("lse", a.lse);
    no_overlap("dout", g.dout);
    if (has_dlse) no_overlap("dlse", g.dlse);
  };
  if (!dsinks.empty()) {
    check_equal(function, "dsinks", "has extent", dsinks.extent(0), "heads are", a.q.extent(1));
    if (sinks.empty()) fail_value(function, "dsinks", "has extent", dsinks.extent(0), "sinks are", 0);
    const View<Compute, 1> output(g.dsinks);
    check_no_overlap(function, "dsinks", output, "sinks", sinks);
    check_no_overlap_with_inputs("dsinks", output);
  }
  const auto check_gradient = [&](const char* name, const auto& gradient, const char* of, const auto& input) {
    check_output(function, name, gradient);
    check_same_extents(function, name, gradient, of, input);
    check_no_overlap_with_inputs(name, gradient);
    check_no_overlap(function, name, gradient, "sinks", sinks);
    check_no_overlap(function, name, gradient, "dsinks", dsinks);
  };
  check_gradient("dq", g.dq, "q", a.q);
  check_gradient("dk", g.dk, "k", a.k);
  check_gradient("dv", g.dv, "v", a.v);
  check_no_overlap(function, "dk", g.dk, "dq", g.dq);
  check_no_overlap(function, "dv", g.dv, "dq", g.dq);
  check_no_overlap(function, "dv", g.dv, "dk", g.dk);
}

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
