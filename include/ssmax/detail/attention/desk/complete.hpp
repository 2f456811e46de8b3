// Completes the problems and results of calls whose arguments are checked.
#pragma once

#include "call.hpp"
#include "check.hpp"

SSMAX_BEGIN_DETAIL

/// Completes the problem of a checked call over a source. Its keys were rotated when they were stored. Exception: with
/// `rotate_source_keys`, the call rotates them.
template <class A>
void complete_source(Problem<A>& problem, const CallFacts& facts, const Variant<A>& variant) {
  problem.q.make_addressable();
  if (problem.has_rope() && !facts.rotate_source_keys)
    problem.rotation = variant.rotated_to_positions ? Rotation::stored_by_mask : Rotation::stored;
}

/// Completes the problem of a checked call over views: its keys and its positions.
template <class A>
void complete_views(Problem<A>& problem, ViewKeys<A>& views, const CallFacts& facts) {
  problem.q.make_addressable();
  views.k.make_addressable();
  views.v.make_addressable();
  views.keys = facts.all_keys == 0 ? facts.first_key + views.k.extent(2) : facts.all_keys;
  views.first = facts.first_key;
  views.lengths = problem.lengths;
  problem.keys = AnyKeys<A>(views);
  problem.first_query = facts.first_query;
  if (facts.all_queries != 0)
    problem.queries_after = facts.all_queries - facts.first_query - problem.q.extent(2);
}

/// Returns a result that is a state, to be merged with other states.
template <class Compute>
Result<Compute> make_state_result(const AttentionState<Compute>& state, bool continues) {
  Result<Compute> result{.state = addressable(state)};
  if (continues) result.start = result.state;
  return result;
}

/// Completes the result of a checked call.
template <class A>
void complete_result(Result<A>& result, bool continues) {
  result.out.make_addressable();
  if (has_state(result.state)) result = make_state_result(result.state, continues);
}

/// Makes the rows of a checked backward pass addressable, as those of its heads.
template <class A>
void complete_rows(BackwardProblem<A>& problem) {
  const auto complete_rows_of_heads = [&](auto& rows) {
    rows.make_addressable();
    rows.set_first_head(problem.forward.first_head());
  };
  complete_rows_of_heads(problem.out);
  complete_rows_of_heads(problem.dout);
  complete_rows_of_heads(problem.dq);
  problem.dk.make_addressable();
  problem.dv.make_addressable();
}

/// Completes a checked call.
template <class A>
void complete(ForwardCall<A>& call, const Variant<A>& variant) {
  if (call.problem.in_cache) {
    complete_source(call.problem, call.facts, variant);
  } else {
    complete_views(call.problem, call.views, call.facts);
  }
  complete_result(call.result, call.facts.continues);
}
template <class A>
void complete(BackwardCall<A>& call) {
  complete_views(call.problem.forward, call.views, call.facts);
  complete_rows(call.problem);
}

SSMAX_END
