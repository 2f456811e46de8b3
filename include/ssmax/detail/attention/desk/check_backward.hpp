// Checks the arguments of attention_backward, before anything is written.
#pragma once

#include "check.hpp"

SSMAX_BEGIN_DETAIL

/// Checks the tensors that gradients are made from, and the options of a call.
template <class A>
void check_backward_inputs(const char* function, const BackwardCall<A>& call) {
  const Problem<A>& forward = call.problem.forward;
  const Rows &q = forward.q, &k = call.views.k;
  const CallFacts& facts = call.facts;
  check_inputs(function, q, k, call.views.v);
  check_options(function, forward, facts, call.problem.sinks, call.problem.scaled_sinks);
  check_last_part(function, "first_key", facts.first_key, k.extent(2), "leaves no room for k in all_keys,",
                  "all_keys", facts.all_keys);
  check_query_part(function, q, facts);
  check_lengths(function, forward.lengths, q, k);
  if (facts.first_key != 0 || facts.all_keys != 0)
    check_no_lengths(function, forward.lengths, "of a part of the keys");
  if (facts.first_query != 0 || facts.all_queries != 0)
    check_no_lengths(function, forward.lengths, "of a part of the queries");
}

/// Checks the arguments of a call, but not its policies.
template <class A>
void check_arguments(const char* function, const BackwardCall<A>& call) {
  check_backward_inputs(function, call);
  if (call.facts.is_example) return;
  const BackwardProblem<A>& problem = call.problem;
  const Rows &q = problem.forward.q, &k = call.views.k, &v = call.views.v;
  const auto check_rows = [&](const char* name, const AnyView& view) {
    check_view(function, name, view);
    for (int i = 0; i < 3; ++i) check_extent(function, name, view, i, "q", q, i);
  };
  const View<const A, 3>&lse = problem.lse.view(), dlse = problem.dlse.view();
  check_rows("out", problem.out);
  check_extent(function, "out", problem.out, 3, "v", v, 3);
  check_rows("lse", lse);
  check_view(function, "dout", problem.dout);
  check_same_extents(function, "dout", problem.dout, "out", problem.out);
  const bool has_dlse = is_given(dlse);
  if (has_dlse) check_rows("dlse", dlse);
  const View<const A, 1> sinks(problem.sinks), dsinks(problem.dsinks);
  if (!sinks.empty()) check_equal(function, "sinks", "has extent", sinks.extent(0), "heads are", q.extent(1));
  const auto check_no_overlap_with_inputs = [&](const char* name, const AnyView& output) {
    const auto no_overlap = [&](const char* other_name, const AnyView& other) {
      check_no_overlap(function, name, output, other_name, other);
    };
    no_overlap("q", q);
    no_overlap("k", k);
    no_overlap("v", v);
    no_overlap("out", problem.out);
    no_overlap("lse", lse);
    no_overlap("dout", problem.dout);
    if (has_dlse) no_overlap("dlse", dlse);
  };
  if (!dsinks.empty()) {
    check_equal(function, "dsinks", "has extent", dsinks.extent(0), "heads are", q.extent(1));
    if (sinks.empty()) fail_value(function, "dsinks", "has extent", dsinks.extent(0), "sinks are", 0);
    const View<A, 1> output(problem.dsinks);
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
  check_gradient("dq", problem.dq, "q", q);
  check_gradient("dk", problem.dk, "k", k);
  check_gradient("dv", problem.dv, "v", v);
  check_no_overlap(function, "dk", problem.dk, "dq", problem.dq);
  check_no_overlap(function, "dv", problem.dv, "dq", problem.dq);
  check_no_overlap(function, "dv", problem.dv, "dk", problem.dk);
}

SSMAX_END
