// Defines PlanState, the common part of plans of the forward and of the backward, and ForwardPlan.
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

/// A plan: the work list of its calls. Owns the lengths of the sequences. Arguments is the type of the example that a
/// plan is made of.
template <class A, class M, class Arguments>
class PlanState {
 public:
  const M mask;

  PlanState(const char* function, const M& a_mask, const Arguments& example, index_t threads)
      : mask(a_mask), options_(example), threads_(std::min(threads, max_concurrency)) {
    if (threads < 1) fail_value(function, "max_threads", "is", threads, "must be at least", 1);
    options_.workspace = nullptr;
    options_.explanation = nullptr;
    const SequenceLengths& lengths = options_.lengths;
    for (const index_t number : lengths.queries()) queries_.push_back(number);
    for (const index_t number : lengths.keys()) keys_.push_back(number);
    options_.lengths = lengths.in(queries_, keys_);
    // Checks of an example read no element, so its tensors may be null.
    options_.q.point_to_any();
    options_.k.point_to_any();
    options_.v.point_to_any();
  }
  PlanState(const PlanState&) = delete;
  PlanState& operator=(const PlanState&) = delete;

  const WorkList<A>& list() const { return list_; }
  const Explanation& explanation() const { return explanation_; }

 protected:
  /// Makes the list of a checked call.
  void plan(const ForwardFunctions<A>& functions, Problem<A> problem, const Variant<A>& variant) {
    problem.caller.explanation = &explanation_;
    functions.make_list(problem, variant, Result<A>{}, threads_, memory_, list_);
    explanation_.workspace_bytes = list_.run_bytes;
  }
  /// Makes the list of a checked backward pass.
  void plan(const BackwardFunctions<A>& functions, BackwardProblem<A> problem,
            const GradientVariant<A>& variant) {
    problem.forward.caller.explanation = &explanation_;
    functions.make_list(problem, variant, threads_, memory_, list_);
    explanation_.workspace_bytes = list_.run_bytes;
  }

  /// Returns the memory of a run. Throws unless the memory fits and the target is that of the plan.
  std::byte* checked(std::span<std::byte> memory) const {
    if (target_in_use() != explanation_.target) {
      fail_format("ssmax::%s: the plan was made for the target %s, the active target is %s",
                  explanation_.function, target_name(explanation_.target), target_name(target_in_use()));
    }
    return Workspace(memory).reserve(list_.run_bytes);
  }

  /// Throws unless a tensor of a bound call has extents and storage type of the plan's.
  static void check_planned(const char* function, const char* name, const Rows& rows, const Rows& planned) {
    for (int i = 0; i < 4; ++i) {
      if (rows.extent(i) != planned.extent(i))
        fail_extent(function, name, i, rows.extent(i), "the plan", planned.extent(i));
    }
    if (rows.kind() != planned.kind() || rows.element_bytes() != planned.element_bytes())
      fail_format("ssmax::%s: %s is stored in another type than the plan's", function, name);
  }

  /// Returns the arguments of a bound call with the options of the plan. Throws if the call has options of its own
  /// other than sinks, which replace the plan's.
  Arguments with_options(const char* function, const Arguments& a) const {
    const auto leave_out = [&](const char* name, bool is_given) {
      if (is_given) fail_format("ssmax::%s: %s is given, the plan has its own: leave it out", function, name);
    };
    leave_out("scale", a.scale.has_value());
    leave_out("rope", a.rope != nullptr);
    leave_out("key_position", a.key_position != 0);
    leave_out("workspace", a.workspace != nullptr);
    leave_out("float_products", a.float_products);
    leave_out("rounded_rotation", a.rounded_rotation);
    leave_out("batch_invariant", a.batch_invariant);
    leave_out("scaled_sinks", a.scaled_sinks);
    leave_out("lengths", a.lengths.is_given());
    leave_out("explanation", a.explanation != nullptr);
    Arguments all = options_;
    all.q = a.q;
    all.k = a.k;
    all.v = a.v;
    all.out = a.out;
    all.lse = a.lse;
    if (!a.sinks.empty()) all.sinks = a.sinks;
    return all;
  }

  Arguments options_;  // the example
  index_t threads_;
  std::vector<index_t> queries_, keys_;  // that options_.lengths refer to
  Workspace memory_;                     // of the list
  WorkList<A> list_;
  Explanation explanation_{};
};

/// Throws unless the planned shared keys of sequences lie in the same memory in the source of a call.
template <class A>
void check_shared_keys(const char* function, const WorkList<A>& list, const Problem<A>& problem) {
  const index_t sequence = find_unshared(list, problem);
  if (sequence < 0) return;
  fail_format(
      "ssmax::%s: sequence %td of the source does not have the keys in common with others that the plan "
      "found. Make a plan with this source",
      function, sequence);
}

/// Checks a scaling and a score of a bound call.
template <class A, class V>
void check_bound(const char* function, const Problem<A>& problem, const V& variant) {
  for_each_shape(problem, [&](const QueryShape& shape) {
    check_score(variant.score, shape);
    check_scaling(function, variant.scaling, shape);
  });
}

/// The properties of a source that a plan depends on.
template <class A>
class PlannedSource {
 public:
  PlannedSource() = default;
  explicit PlannedSource(const AnyKeys<A>& source)
      : shape_(source.shape()), layout_(source.layout()), k_(&source.k_type()), v_(&source.v_type()) {
    for (index_t b = 0; b < shape_.batch; ++b) sequences_.push_back(sequence_of(source, b));
  }

  /// Returns whether a source has the number of the plan's layout.
  bool has_layout(const AnyKeys<A>& source) const { return layout_ != 0 && source.layout() == layout_; }

  /// Throws unless a source of a bound call has the shape, the lengths and the stored keys of the plan's.
  void check(const char* function, const AnyKeys<A>& source) const {
    const KeySourceShape& shape = source.shape();
    const auto same_extent = [&](const char* name, int i, index_t extent, index_t planned) {
      if (extent != planned) fail_extent(function, name, i, extent, "the plan", planned);
    };
    same_extent("k", 0, shape.batch, shape_.batch);
    same_extent("k", 1, shape.kv_heads, shape_.kv_heads);
    same_extent("k", 3, shape.width, shape_.width);
    same_extent("v", 3, shape.value_width, shape_.value_width);
    const auto differs = [](const StoredType<A>& type, const StoredType<A>& planned) {
      return type.kind != planned.kind || type.size != planned.size;
    };
    if (differs(source.k_type(), *k_) || differs(source.v_type(), *v_))
      fail_format("ssmax::%s: the source stores another type than the plan's", function);
    for (index_t b = 0; b < shape.batch && !has_layout(source); ++b) {
      const Sequence own = sequence_of(source, b), of_plan = sequences_[static_cast<std::size_t>(b)];
      const auto same = [&](const char* what, index_t number, index_t of_plan_number) {
        if (number == of_plan_number) return;
        fail_format("ssmax::%s: sequence %td of the source has %s %td, the plan has %td", function, b, what,
                    number, of_plan_number);
      };
      same("length", own.length, of_plan.length);
      same("stored keys from", own.stored.begin, of_plan.stored.begin);
      same("stored keys up to", own.stored.end, of_plan.stored.end);
      same("forgotten keys from", own.forgotten.begin, of_plan.forgotten.begin);
      same("forgotten keys up to", own.forgotten.end, of_plan.forgotten.end);
    }
  }

 private:
  struct Sequence {
    index_t length;
    KeyRange stored, forgotten;
  };
  static Sequence sequence_of(const AnyKeys<A>& source, index_t b) {
    return {source.length(b), source.stored(b), source.forgotten(b)};
  }

  KeySourceShape shape_{};
  std::uint64_t layout_ = 0;
  const StoredType<A>*k_ = nullptr, *v_ = nullptr;
  std::vector<Sequence> sequences_;
};

/// A plan of the forward.
template <class A, class M>
class ForwardPlan : public PlanState<A, M, AttentionArguments<A>> {
  using Base = PlanState<A, M, AttentionArguments<A>>;
  using Base::options_;

 public:
  ForwardPlan(const AttentionArguments<A>& example, index_t threads, const M& a_mask, bool has_mask)
      : Base("Plan", a_mask, example, threads), is_over_source_(example.keys.is_given()) {
    const char* const function = "Plan";
    const Softmax softmax;
    const Identity identity;
    const UserVariant<A, Softmax, M, Identity> variant(softmax, this->mask, identity);
    check_takes_no_state(function, example);
    ViewKeys<A> views{};
    Problem<A> problem{};
    if (is_over_source_) {
      check_has_no_views(function, example);
      const AnyKeys<A> source = example.keys.refer();
      source_ = PlannedSource<A>(source);
      check_queries(function, options_.q, source.shape(), options_.lengths.is_packed());
      check_source_lengths(function, options_.lengths, options_.q, source.shape().batch);
      problem = make_source_problem<M, A>(function, options_.q, source, options_);
    } else {
      check_inputs(function, options_.q, options_.k, options_.v);
      check_lengths(function, options_.lengths, options_.q, options_.k);
      views = keys_of(options_);
      problem = make_views_problem(function, options_, views);
    }
    options_.keys = {};
    check_options(function, is_over_source_ ? CallKind::source : CallKind::views, options_,
                  options_.q.extent(1));
    check_is_whole(function, options_);
    check_policies(function, problem, options_.rope, variant);
    if (is_over_source_) {
      check_new_queries(function, problem, options_.more_queries_than_keys, has_mask);
      check_stored_keys(function, problem, this->mask);
    }
    this->plan(*options_.q.functions(), problem, variant);
  }

  void run(const Problem<A>& problem, const Variant<A>& variant, const Result<A>& result,
           std::span<std::byte> memory, const AnyExecutor& executor) const {
    compiled::run_list(this->list(), problem, variant, result, this->checked(memory), executor);
  }

  /// Checks the tensors of a call, and returns its arguments without the source.
  AttentionArguments<A> arguments(const char* function, const AttentionArguments<A>& a) const {
    if (a.keys.is_given() != is_over_source_) {
      fail_format("ssmax::%s: the plan was made for %s", function,
                  is_over_source_ ? "a source of keys" : "keys in views");
    }
    AttentionArguments<A> all = this->with_options(function, a);
    check_takes_no_state(function, a);
    check_is_whole(function, a);
    if (a.rotate_source_keys || a.more_queries_than_keys)
      fail_format("ssmax::%s: rotate_source_keys and more_queries_than_keys are the plan's: leave them out",
                  function);
    Base::check_planned(function, "q", a.q, options_.q);
    if (is_over_source_) {
      check_has_no_views(function, a);
      const AnyKeys<A> source = a.keys.refer();
      source_.check(function, source);
      check_source_tensors(function, all, source);
    } else {
      Base::check_planned(function, "k", a.k, options_.k);
      Base::check_planned(function, "v", a.v, options_.v);
      check_tensors(function, all);
    }
    return all;
  }
  /// Returns the problem of a call. `keys` is its source, or `views` its keys. They must outlive the result.
  Problem<A> problem(const char* function, const AttentionArguments<A>& all, const Keys<A>& keys,
                     const ViewKeys<A>& views) const {
    if (!is_over_source_) {
      return make_views_problem("Plan", all, views);
    }
    const AnyKeys<A> source = keys.refer();
    const Problem<A> problem = make_source_problem<M, A>("Plan", all.q, source, all);
    if (!source_.has_layout(source)) check_shared_keys(function, this->list(), problem);
    return problem;
  }

 private:
  static void check_takes_no_state(const char* function, const AttentionArguments<A>& a) {
    if (has_state(a)) fail_format("ssmax::%s: state is given, a plan takes out", function);
  }

  bool is_over_source_;
  PlannedSource<A> source_;
};

SSMAX_END
