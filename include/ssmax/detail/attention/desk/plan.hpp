// Defines PlanState, the common part of plans of the forward, over views and over sources, and of the backward.
#pragma once

#include <algorithm>
#include <vector>

#include "../../../scaling.hpp"
#include "../../dispatch/target_in_use.hpp"
#include "../backward/driver.hpp"
#include "../terms/any_executor.hpp"
#include "../work/driver.hpp"
#include "../work/same_memory.hpp"
#include "build.hpp"

SSMAX_BEGIN_DETAIL

/// A plan: the work list of its calls. Owns the lengths of the sequences.
template <class T, class M>
class PlanState {
 public:
  using Compute = ComputeType<T>;

  const M mask;
  AttentionOptions<T> options;

  PlanState(const char* function, const M& a_mask, const AttentionOptions<T>& an_options, index_t threads)
      : mask(a_mask), options(an_options), threads_(std::min(threads, max_concurrency)) {
    if (threads < 1) fail_value(function, "max_threads", "is", threads, "must be at least", 1);
    options.workspace = nullptr;
    options.explanation = nullptr;
    const SequenceLengths& lengths = options.lengths;
    for (const index_t number : lengths.queries()) queries_.push_back(number);
    for (const index_t number : lengths.keys()) keys_.push_back(number);
    options.lengths = lengths.in(queries_, keys_);
  }

  /// Makes the list for calls like that of the problem, whose tensors are not read. Calls check(problem, variant).
  /// Operand is defined as for run_attention.
  template <class Operand, class Check>
  void plan(const char* function, Problem<Compute> problem, const Check& check) {
    const Softmax softmax;
    const Identity identity;
    const UserVariant<Compute, Softmax, M, Identity> variant(softmax, mask, identity);
    check_policies(function, problem, options.rope, variant);
    check(problem, variant);
    problem.caller = {function, &explanation_};
    compiled::make_list<Operand>(problem, variant, Result<Compute>{}, threads_, memory_, list_);
    explanation_.workspace_bytes = list_.run_bytes;
  }
  /// Makes the list of a checked backward pass.
  template <class Operand>
  void plan(const char* function, BackwardProblem<Compute> problem, const GradientVariant<Compute>& variant) {
    problem.forward.caller = {function, &explanation_};
    compiled::make_backward_list<Operand>(problem, variant, threads_, memory_, list_);
    explanation_.workspace_bytes = list_.run_bytes;
  }

  const WorkList<Compute>& list() const { return list_; }
  const Explanation& explanation() const { return explanation_; }

  /// Runs a call in memory of list().run_bytes.
  void run(const Problem<Compute>& problem, const Variant<Compute>& variant, const Result<Compute>& result,
           std::span<std::byte> memory, const AnyExecutor& executor) const {
    compiled::run_list(list_, problem, variant, result, checked(memory), executor);
  }
  /// Runs a backward pass. Operand is that of its list.
  template <class Operand>
  void run(const BackwardProblem<Compute>& problem, const GradientVariant<Compute>& variant,
           std::span<std::byte> memory, const AnyExecutor& executor) const {
    compiled::run_backward_list<Operand>(list_, problem, variant, checked(memory), executor);
  }

 private:
  /// Returns the memory of a run. Throws unless the memory fits and the target is that of the plan.
  std::byte* checked(std::span<std::byte> memory) const {
    if (target_in_use() != explanation_.target) {
      fail_format("ssmax::%s: the plan was made for the target %s, the active target is %s",
                  explanation_.function, target_name(explanation_.target), target_name(target_in_use()));
    }
    return Workspace(memory).reserve(list_.run_bytes);
  }

  index_t threads_;
  std::vector<index_t> queries_, keys_;  // that options.lengths refer to
  Workspace memory_;                     // of the list
  WorkList<Compute> list_;
  Explanation explanation_{};
};

/// Throws unless an extent is the planned one.
inline void check_planned(const char* function, const char* name, int i, index_t extent, index_t planned) {
  if (extent != planned) fail_extent(function, name, i, extent, "the plan", planned);
}

/// Returns the options of a bound call.
template <class T>
AttentionOptions<T> with_sinks(AttentionOptions<T> options, std::span<const ComputeType<T>> sinks) {
  if (!sinks.empty()) options.sinks = sinks;
  return options;
}

/// Throws unless the planned shared keys of sequences lie in the same memory in the source of a call.
template <class Compute>
void check_shared_keys(const char* function, const WorkList<Compute>& list, const Problem<Compute>& problem) {
  const index_t sequence = find_unshared(list, problem);
  if (sequence < 0) return;
  fail_format(
      "ssmax::%s: sequence %td of the source does not have the keys in common with others that the plan "
      "found. Make a plan with this source",
      function, sequence);
}

/// Checks a scaling and a score of a bound call.
template <class Compute, class S, class C>
void check_bound(const char* function, const Problem<Compute>& problem, const S& scaling, const C& score) {
  for_each_shape(problem, [&](const QueryShape& shape) {
    check_score(score, shape);
    check_scaling(function, scaling, shape);
  });
}

SSMAX_END
