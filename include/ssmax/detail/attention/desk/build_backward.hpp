// Checks the arguments of attention_backward, before anything is written, and builds BackwardProblem. No other file
// fills its members.
#pragma once

#include "../terms/backward_problem.hpp"
#include "build.hpp"

SSMAX_BEGIN_DETAIL

template <class A>
void check_arguments(const char* function, const BackwardArguments<A>& a, const AttentionGradients<A>& g) {
  check_inputs(function, a.q, a.k, a.v);
  check_options(function, CallKind::backward, a, a.q.extent(1));
  check_last_part(function, "first_key", a.first_key, a.k.extent(2), "leaves no room for k in all_keys,",
                  "all_keys", a.all_keys);
  check_query_part(function, a);
  check_lengths(function, a.lengths, a.q, a.k);
  if (a.lengths.is_given()) {
    if (a.first_key != 0 || a.all_keys != 0) check_no_lengths(function, a.lengths, "of a part of the keys");
    if (a.first_query != 0 || a.all_queries != 0) {
      check_no_lengths(function, a.lengths, "of a part of the queries");
    }
  }
  const auto check_rows = [&](const char* name, const AnyView& view) {
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
  const View<const A, 1> sinks(a.sinks), dsinks(g.dsinks);
  if (!sinks.empty())
    check_equal(function, "sinks", "has extent", sinks.extent(0), "heads are", a.q.extent(1));
  const auto check_no_overlap_with_inputs = [&](const char* name, const AnyView& output) {
    const auto no_overlap = [&](const char* other_name, const AnyView& other) {
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
    const View<A, 1> output(g.dsinks);
    check_no_overlap(function, "dsinks", output, "sinks", sinks);
    check_no_overlap_with_inputs("dsinks", output);
  }
  const auto check_gradient = [&](const char* name, const AnyView& gradient, const char* of,
                                  const AnyView& input) {
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
template <class A, class Options>
BackwardProblem<A> make_backward_problem(const Problem<A>& forward, const BackwardArguments<A>& a,
                                         const AttentionGradients<A>& g, const Options& options,
                                         const BackwardStage& stage = {}, const StageSums<A>& sums = {}) {
  const index_t first = forward.first_head();
  const auto of_heads = [&]<class R>(const R& rows) { return from_head(addressable(rows), first); };
  BackwardProblem<A> problem{.forward = forward,
                             .out = of_heads(InputRows<A>(a.out)),
                             .dout = of_heads(InputRows<A>(g.dout)),
                             .lse = {a.lse, first},
                             .dlse = {g.dlse, first},
                             .dq = of_heads(OutputRows<A>(g.dq)),
                             .dk = addressable(OutputRows<A>(g.dk)),
                             .dv = addressable(OutputRows<A>(g.dv)),
                             .accumulates = g.accumulate,
                             .sinks = options.sinks,
                             .dsinks = g.dsinks,
                             .scaled_sinks = options.scaled_sinks,
                             .stage = stage,
                             .sums = sums};
  return problem;
}

/// A call of attention_backward. The constructor throws std::invalid_argument for invalid arguments.
template <class A>
class BackwardCall {
  const ViewKeys<A> keys_;  // `problem` refers to this source

 public:
  const BackwardProblem<A> problem;

  template <class V>
  BackwardCall(const char* function, const BackwardArguments<A>& a, const AttentionGradients<A>& g,
               const V& variant)
      : keys_((check_arguments(function, a, g), keys_of(a))),
        problem(make_backward_problem<A>(make_views_problem<A>(function, a, keys_), a, g, a)) {
    check_policies(function, problem.forward, a.rope, variant);
  }
  BackwardCall(const BackwardCall&) = delete;
  BackwardCall& operator=(const BackwardCall&) = delete;
};

SSMAX_END
