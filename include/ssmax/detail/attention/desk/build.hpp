// Fills ForwardCall and BackwardCall from the arguments of public functions, without a check.
#pragma once

#include <algorithm>
#include <cmath>

#include "../../../attention_arguments.hpp"
#include "driver.hpp"

SSMAX_BEGIN_DETAIL

template <class Options>
double logit_scale(const Options& options, index_t d) {
  return options.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<index_t>(d, 1))));
}

/// Fills the problem of all queries of a call, but not its keys.
template <class A, class Options>
void build_problem(const char* function, const InputRows<A>& q, const Options& options, Problem<A>& problem) {
  problem.q = q;
  problem.scale = logit_scale(options, q.extent(3));
  problem.key_position = options.key_position;
  problem.float_products = options.float_products;
  problem.rounded_rotation = options.rounded_rotation;
  problem.batch_invariant = options.batch_invariant;
  problem.lengths = options.lengths;
  problem.dropout = options.dropout;
  problem.caller = {function, options.explanation};
  if (options.rope == nullptr) return;
  problem.rope = options.rope->tables();
  problem.rotation = Rotation::in_call;
}

/// Fills the problem of a backward pass, but not its forward problem. `a` and `g` have the rows, of the heads from
/// `first_head` on. sinks and dsinks cover all heads of the call.
template <class A, class Options>
void build_backward_problem(const BackwardArguments<A>& a, const AttentionGradients<A>& g,
                            const Options& options, index_t first_head, BackwardProblem<A>& problem) {
  problem.out = a.out;
  problem.dout = g.dout;
  problem.lse = {a.lse, first_head};
  problem.dlse = {g.dlse, first_head};
  problem.dq = g.dq;
  problem.dk = g.dk;
  problem.dv = g.dv;
  problem.accumulates = g.accumulate;
  problem.sinks = options.sinks;
  problem.dsinks = g.dsinks;
  problem.scaled_sinks = options.scaled_sinks;
}

/// Calls f(name, value) for the options that are true or false.
template <class Arguments, class F>
void for_each_flag(const Arguments& a, const F& f) {
  f("float_products", a.float_products);
  f("rounded_rotation", a.rounded_rotation);
  f("batch_invariant", a.batch_invariant);
  f("scaled_sinks", a.scaled_sinks);
  if constexpr (requires { a.rotate_source_keys; }) {
    f("rotate_source_keys", a.rotate_source_keys);
    f("more_queries_than_keys", a.more_queries_than_keys);
  }
}

template <class Arguments>
CallFacts facts_of(const Arguments& a) {
  CallFacts facts{.first_key = a.first_key,
                  .all_keys = a.all_keys,
                  .first_query = a.first_query,
                  .all_queries = a.all_queries};
  if constexpr (requires { a.rotate_source_keys; }) {
    facts.rotate_source_keys = a.rotate_source_keys;
    facts.more_queries_than_keys = a.more_queries_than_keys;
    facts.continues = a.continues;
  }
  return facts;
}

template <class A>
ViewKeys<A> views_of(const StoredTensor<A>& k, const StoredTensor<A>& v) {
  return {.k = k, .v = v, .k_type = k.functions(), .v_type = v.functions()};
}

/// Fills a call of attention. `keys` are those of the call or of the plan that it is bound to.
template <class A>
void build_call(const char* function, const AttentionArguments<A>& a, const Keys<A>& keys,
                ForwardCall<A>& call) {
  build_problem<A>(function, a.q, a, call.problem);
  if (keys.is_given()) {
    call.problem.keys = keys.refer();
    call.problem.in_cache = true;
    call.open_source = keys.open();
  }
  call.views = views_of<A>(a.k, a.v);
  call.result = {.out = a.out,
                 .lse = a.lse,
                 .sinks = a.sinks,
                 .scaled_sinks = a.scaled_sinks,
                 .state = a.state.views(),
                 .statistics = a.statistics.views()};
  call.problem.statistics =
      a.statistics.functions() != nullptr ? a.statistics.functions() : a.state.functions();
  call.facts = facts_of(a);
}

/// Fills a call of attention_backward.
template <class A>
void build_call(const char* function, const BackwardArguments<A>& a, const AttentionGradients<A>& g,
                BackwardCall<A>& call) {
  build_problem<A>(function, a.q, a, call.problem.forward);
  build_backward_problem(a, g, a, 0, call.problem);
  call.views = views_of<A>(a.k, a.v);
  call.facts = facts_of(a);
}

SSMAX_END
