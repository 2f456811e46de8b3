// Opens calls: checks their arguments and policies, and completes their problems and results.
#pragma once

#include "check_backward.hpp"
#include "complete.hpp"

SSMAX_BEGIN_COMPILED

template <class Compute>
void open_call(shared::ForwardCall<Compute>& call, const shared::Variant<Compute>& variant) {
  if (call.open_source != nullptr) return call.open_source(call, variant);
  const char* const function = call.problem.caller.function;
  detail::check_arguments(function, call);
  detail::complete(call, variant);
  detail::check_policies(function, call.problem, variant);
}

template <class Compute>
void open_source_call(shared::ForwardCall<Compute>& call, const shared::Variant<Compute>& variant) {
  const shared::Problem<Compute>& problem = call.problem;
  const char* const function = problem.caller.function;
  detail::check_source_arguments(function, call);
  detail::complete(call, variant);
  detail::check_policies(function, problem, variant);
  detail::check_new_queries(function, problem, call.facts.more_queries_than_keys, call.facts.has_mask);
  detail::check_stored_keys(function, problem, variant);
}

template <class Compute>
void open_call(shared::BackwardCall<Compute>& call, const shared::GradientVariant<Compute>& variant) {
  const char* const function = call.problem.forward.caller.function;
  detail::check_arguments(function, call);
  detail::complete(call);
  detail::check_policies<Compute>(function, call.problem.forward, variant);
}

SSMAX_END
