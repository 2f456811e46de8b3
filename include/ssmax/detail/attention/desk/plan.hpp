// Defines PlanState, the common part of plans over views and over sources.
#pragma once

#include <algorithm>

#include "../../../scaling.hpp"
#include "../terms/any_executor.hpp"
#include "../work/driver.hpp"
#include "check.hpp"

SSMAX_BEGIN_DETAIL

/// An executor without threads, for calls that are only planned.
struct NoThreads {
  template <class F>
  void run(index_t, const F&) const {}
};

template <class T, class M>
struct PlanState {
  M mask;
  AttentionOptions<T> options;
  index_t max_threads;
  QueryShape largest{};  // extents of the longest sequence
  Explanation explanation{};

  PlanState(const char* function, const M& a_mask, const AttentionOptions<T>& an_options, index_t threads)
      : mask(a_mask), options(an_options), max_threads(std::min(threads, max_concurrency)) {
    if (threads < 1) fail_value(function, "max_threads", "is", threads, "must be at least", 1);
    options.workspace = nullptr;
    options.explanation = nullptr;
  }

  /// Plans a call of the problem without reading its tensors. Calls check(problem, variant). Operand is defined
  /// as for run_attention.
  template <class Operand, class Check>
  void plan(const char* function, Problem<ComputeType<T>> problem, const Check& check) {
    problem.caller = {function, &explanation, true};
    const Softmax softmax;
    const Identity identity;
    const UserVariant<ComputeType<T>, Softmax, M, Identity> variant(softmax, mask, identity);
    check_policies(function, problem, options.rope, variant);
    check(problem, variant);
    const bool differ = problem.lengths.is_given() || problem.in_cache;  // sequences may differ in length
    largest = differ ? longest_shape(problem) : sequence_of(problem, 0).shape;
    const NoThreads threads;
    compiled::run_attention<Operand>(problem, variant, Result<ComputeType<T>>{}, nullptr,
                                     AnyExecutor(threads, max_threads));
  }

  /// Checks a scaling and a score of a bound call.
  template <class S, class C>
  void check_bound(const char* function, const S& scaling, const C& score) const {
    check_score(score, largest);
    check_scaling(function, scaling, largest);
  }
};

/// Throws unless an extent is the planned one.
inline void check_planned(const char* function, const char* name, int i, index_t extent, index_t planned) {
  if (extent != planned) fail_extent(function, name, i, extent, "the plan", planned);
}

SSMAX_END
