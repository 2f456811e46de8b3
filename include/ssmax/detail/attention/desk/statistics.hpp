// Checks the outputs of statistics, and lists the functions of calls with statistics.
#pragma once

#include "../forward/statistics.hpp"
#include "check.hpp"

SSMAX_BEGIN_DETAIL

/// Checks the statistics that are given.
template <class A>
void check_statistics(const char* function, const ForwardCall<A>& call) {
  const Problem<A>& problem = call.problem;
  const Result<A>& result = call.result;
  for_each_statistic(result.statistics, [&](const char* name, const View<A, 3>& view) {
    if (problem.in_cache) {
      check_result(function, name, view, problem.q, problem.value_width());
      check_no_overlap_with_source(function, name, view, problem.keys);
    } else {
      check_result(function, name, view, problem.q, call.views.k, call.views.v);
    }
    check_no_overlap(function, name, view, "q", problem.q);
    check_no_overlap(function, name, view, "out", result.out);
    check_no_overlap(function, name, view, "lse", result.lse.view());
    check_no_overlap(function, name, view, "sinks", View<const A, 1>(result.sinks));
    for_each_statistic(result.statistics, [&](const char* other_name, const View<A, 3>& other) {
      if (name != other_name) check_no_overlap(function, name, view, other_name, other);
    });
  });
}

/// Returns the functions of a compute type.
template <class A>
constexpr StatisticsFunctions<A> make_statistics_functions() {
  StatisticsFunctions<A> functions{.check = check_statistics<A>,
                                   .weights = statistics_weights<A, A>,
                                   .bf16_weights = nullptr,
                                   .bf16_group = nullptr,
                                   .of_row = write_row_statistics<A>,
                                   .store = store_with_statistics<A>};
  if constexpr (std::same_as<A, float>) {
    functions.bf16_weights = statistics_weights<A, bfloat16>;
    functions.bf16_group = statistics_of_group<A>;
  }
  return functions;
}

SSMAX_END

SSMAX_BEGIN_COMPILED

template <class Compute>
const shared::StatisticsFunctions<Compute>& statistics_functions() {
  static constexpr shared::StatisticsFunctions<Compute> functions =
      detail::make_statistics_functions<Compute>();
  return functions;
}

SSMAX_END
