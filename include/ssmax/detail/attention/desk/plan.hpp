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
#include "complete.hpp"

SSMAX_BEGIN_DETAIL

/// A plan: the work list of its calls. Owns the lengths and the seeds of the sequences. Arguments is the type of the
/// example that a plan is made of.
template <class A, class Arguments>
class PlanState {
 public:
  PlanState(const char* function, const Arguments& example, index_t threads)
      : options_(example), threads_(std::min(threads, max_concurrency)) {
    if (threads < 1) fail_value(function, "max_threads", "is", threads, "must be at least", 1);
    options_.workspace = nullptr;
    options_.explanation = nullptr;
    const SequenceLengths& lengths = options_.lengths;
    for (const index_t number : lengths.queries()) queries_.push_back(number);
    for (const index_t number : lengths.keys()) keys_.push_back(number);
    options_.lengths = lengths.in(queries_, keys_);
    for (const std::uint64_t seed : options_.dropout.seeds) seeds_.push_back(seed);
    options_.dropout.seeds = seeds_;
    // Checks of an example read no element, so its tensors may be null.
    for (Rows* tensor : {static_cast<Rows*>(&options_.q), static_cast<Rows*>(&options_.k),
                         static_cast<Rows*>(&options_.v)}) {
      if (is_given(*tensor)) tensor->point_to_any();
    }
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
    if (!rows.has_type_of(planned))
      fail_format("ssmax::%s: %s is stored in another type than the plan's", function, name);
  }

  /// Returns the arguments of a bound call with the options of the plan. Throws if the call has options of its own
  /// other than sinks, dropout and statistics, which replace the plan's.
  Arguments with_options(const char* function, const Arguments& a) const {
    const auto leave_out = [&](const char* name, bool is_given) {
      if (is_given) fail_format("ssmax::%s: %s is given, the plan has its own: leave it out", function, name);
    };
    leave_out("scale", a.scale.has_value());
    leave_out("rope", a.rope != nullptr);
    leave_out("key_position", a.key_position != 0);
    leave_out("workspace", a.workspace != nullptr);
    for_each_flag(a, leave_out);
    leave_out("lengths", a.lengths.is_given());
    leave_out("explanation", a.explanation != nullptr);
    Arguments all = options_;
    all.q = a.q;
    all.k = a.k;
    all.v = a.v;
    all.out = a.out;
    all.lse = a.lse;
    if (!a.sinks.empty()) all.sinks = a.sinks;
    if (a.dropout.p != 0 && options_.dropout.p <= 0)
      fail_format("ssmax::%s: dropout.p is %g, the plan was made without dropout", function,
                  static_cast<double>(a.dropout.p));
    if (a.dropout.p != 0) all.dropout = a.dropout;
    if constexpr (requires { a.statistics; }) {
      if (a.statistics.functions() != nullptr && options_.statistics.functions() == nullptr)
        fail_format("ssmax::%s: statistics are given, the plan was made without statistics", function);
      all.statistics = a.statistics;
    }
    return all;
  }

  Arguments options_;  // the example
  index_t threads_;
  std::vector<index_t> queries_, keys_;  // that options_.lengths refer to
  std::vector<std::uint64_t> seeds_;     // that options_.dropout refers to
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
template <class A>
class ForwardPlan : public PlanState<A, AttentionArguments<A>> {
  using Base = PlanState<A, AttentionArguments<A>>;
  using Base::options_;

 public:
  /// `variant` has the mask of the plan.
  ForwardPlan(const AttentionArguments<A>& example, index_t threads, const Variant<A>& variant, bool has_mask)
      : Base("Plan", example, threads), is_over_source_(example.keys.is_given()) {
    options_.out = {};
    options_.lse = {};
    ForwardCall<A> call{};
    build_call("Plan", options_, example.keys, call);
    call.facts.has_mask = has_mask;
    call.facts.is_example = true;
    check_takes_no_state("Plan", example);
    if (is_over_source_) source_ = PlannedSource<A>(call.problem.keys);
    compiled::open_call(call, variant);
    options_.keys = {};
    this->plan(*options_.q.functions(), call.problem, variant);
  }

  void run(const ForwardCall<A>& call, const Variant<A>& variant, std::span<std::byte> memory,
           const AnyExecutor& executor) const {
    compiled::run_list(this->list(), call.problem, variant, call.result, this->checked(memory), executor);
  }

  /// Opens a call of the plan. `keys` are those of the arguments, and must outlive the call.
  void bind(const AttentionArguments<A>& a, const Keys<A>& keys, const Variant<A>& variant,
            ForwardCall<A>& call) const {
    const char* const function = "Plan::bind";
    if (a.keys.is_given() != is_over_source_) {
      fail_format("ssmax::%s: the plan was made for %s", function,
                  is_over_source_ ? "a source of keys" : "keys in views");
    }
    build_call("Plan", this->with_options(function, a), keys, call);
    check_takes_no_state(function, a);
    check_is_whole(function, facts_of(a));
    Base::check_planned(function, "q", a.q, options_.q);
    if (is_over_source_) {
      check_has_no_views(function, call);
      source_.check(function, call.problem.keys);
      check_source_tensors(function, call);
    } else {
      Base::check_planned(function, "k", a.k, options_.k);
      Base::check_planned(function, "v", a.v, options_.v);
      check_tensors(function, call);
    }
    check_options(function, call.problem, call.facts, call.result.sinks, call.result.scaled_sinks);
    complete(call, variant);
    if (is_over_source_ && !source_.has_layout(call.problem.keys))
      check_shared_keys(function, this->list(), call.problem);
    for_each_shape(call.problem, [&](const QueryShape& shape) { variant.check_logits(function, shape); });
  }

 private:
  static void check_takes_no_state(const char* function, const AttentionArguments<A>& a) {
    if (has_state(a.state)) fail_format("ssmax::%s: state is given, a plan takes out", function);
  }

  bool is_over_source_;
  PlannedSource<A> source_;
};

SSMAX_END
