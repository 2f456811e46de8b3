/// @defgroup plan Plans (plan.hpp)
/// @ingroup attention
/// A plan for calls of attention that differ only in tensors, scaling, score and sinks, such as the layers of a model.
///
///     const Plan plan({.q = layers[0].q, .keys = layers[0].cache, .rope = &rope}, pool.concurrency(), Causal{});
///     Workspace workspace;
///     const std::span memory(workspace.reserve(plan.bytes()), plan.bytes());  // or memory of your own
///     for (Layer& layer : layers) {
///       plan.run({.q = layer.q, .keys = layer.cache, .out = layer.out}, memory, layer.scaling, pool);
///     }
///
/// | step | checks | cost |
/// |---|---|---|
/// | plan | shapes, mask, lengths, stored keys, positions of the rope | O(queries + keys + sequences) |
/// | bind, keys in views | tensors against the plan's, scaling, score, sinks | O(1); with lengths O(sequences) |
/// | bind, a source | also lengths, stored and shared keys against the plan's | O(sequences + shared pages) |
/// | run | size of the memory | no allocation |
///
/// Results are bit-identical to those of `attention`, with any executor and any number of threads. Over a source, make
/// a new plan for each step, because the lengths of the sequences change. BackwardPlan plans the backward.

/// @defgroup plan_backward Plans of the backward (plan.hpp)
/// @ingroup plan
/// A plan for calls of attention_backward that differ only in tensors and parameters, such as the layers of a model.
///
///     const auto scaling = [](Layer& layer) { return SSMax{layer.s, layer.b}.gradient(layer.ds, layer.db); };
///     const BackwardPlan plan({.q = q, .k = k, .v = v, .out = out, .lse = lse, .rope = &rope},
///                             {.dout = dout, .dq = dq, .dk = dk, .dv = dv}, pool.concurrency(), Causal{},
///                             scaling(layers[0]));
///     Workspace workspace;
///     const std::span memory(workspace.reserve(plan.bytes()), plan.bytes());  // or memory of your own
///     for (Layer& layer : layers) {
///       plan.bind({.q = layer.q, .k = layer.k, .v = layer.v, .out = layer.out, .lse = layer.lse},
///                 {.dout = layer.dout, .dq = layer.dq, .dk = layer.dk, .dv = layer.dv}, scaling(layer))
///           .run(memory, pool);
///     }
///
/// | step | checks | cost |
/// |---|---|---|
/// | plan | shapes, mask, scaling, score, lengths of the sequences, rope positions | O(queries + keys + sequences) |
/// | bind | the checks of attention_backward, extents against the plan's, memory against the plan's | as its checks |
/// | run | size of the memory | no allocation |
///
/// Results are bit-identical to those of `attention_backward`, with any executor and any number of threads.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "attention.hpp"
#include "attention_backward.hpp"
#include "detail/attention/desk/plan.hpp"
#include "detail/attention/desk/planned_mask.hpp"

/// @addtogroup plan
/// @{
SSMAX_BEGIN_CODE

/// @cond
namespace mistake {
template <class... P>
struct bind_takes_a_scaling_and_a_score_the_plan_has_the_mask;
template <class... P>
struct run_takes_a_scaling_a_score_and_an_executor_the_plan_has_the_mask;
}  // namespace mistake
/// @endcond

/// A planned call with its tensors, scaling and score. `bind` of a plan returns it. The plan and the tensors must
/// outlive it, and so must a source to which its Keys refers. It keeps scaling and score.
template <class A, class S, class C>
class BoundCall {
 public:
  /// Not copied.
  BoundCall(const BoundCall&) = delete;
  /// Not copied.
  BoundCall& operator=(const BoundCall&) = delete;

  /// Computes the call. May be called any number of times. `memory` must begin at a multiple of 64 bytes and have
  /// at least `bytes()` bytes of the plan. The executor may have any number of threads: the call uses at most the
  /// planned number. Throws std::invalid_argument before the first write if the memory does not fit, or if the active
  /// target is another one than when the plan was made.
  template <class E = Serial>
  requires Executor<E>
  void run(std::span<std::byte> memory, E&& executor = E{}) const {
    plan_.run(call_, variant_, memory, detail::AnyExecutor(executor));
  }

  /// @cond
  BoundCall(const detail::ForwardPlan<A>& plan, const detail::PlannedMask<A>& mask,
            const AttentionArguments<A>& a, const S& scaling, const C& score)
      : plan_(plan), keys_(a.keys), scaling_(scaling), score_(score), variant_(scaling_, mask, score_) {
    plan_.bind(a, keys_, variant_, call_);
  }
  /// @endcond

 private:
  const detail::ForwardPlan<A>& plan_;
  const Keys<A> keys_;  // that call_ refers to
  const S scaling_;
  const C score_;
  const detail::UserVariant<A, S, detail::PlannedMask<A>, C> variant_;
  shared::ForwardCall<A> call_{};
};

/// A plan of calls with tensors like those of an example. It keeps the options of the example and the lengths of the
/// sequences. Other spans and the rope must outlive it. A plan is not copied.
///
/// If sequences of the example's source have shared keys (KeySource::shares_keys), the calls compute them once. Then
/// each source must have the keys in the same memory for the same sequences. `bind` compares the memory page by page.
/// Exception: a source with the layout number of the example (KeySource::layout) is not compared.
template <class A = float>
class Plan {
 public:
  /// Plans calls on at most `max_threads` threads. The plan reads extents and storage types of the example's tensors.
  /// The tensors may be null. `out`, `lse`, `workspace` and `explanation` are not used. `mask` is a mask, of which the
  /// plan owns a copy, or left out: Full. Throws std::invalid_argument if tensors, source, mask, lengths or the
  /// positions of the rope do not fit, or if max_threads is below 1.
  template <class... P>
  explicit(sizeof...(P) == 0) Plan(const std::type_identity_t<AttentionArguments<A>>& example,
                                   index_t max_threads = 1, const P&... mask)
      : mask_(detail::pick<detail::IsMask>(detail::default_mask, mask...)),
        plan_(example, max_threads, mask_.variant(), sizeof...(P) > 0) {
    static_assert(sizeof...(P) <= 1 && (detail::MaskOfCall<P> && ...),
                  "ssmax::Plan: pass a mask; bind and run take the other policies");
  }

  /// Returns the bytes that a call needs.
  [[nodiscard]] std::size_t bytes() const { return plan_.list().run_bytes; }
  /// Returns how the calls are computed on max_threads threads.
  [[nodiscard]] const Explanation& explanation() const { return plan_.explanation(); }

  /// Returns a call of the plan. `a` has the tensors and, over a source, the source. `policies` are a scaling and a
  /// score. `a` takes these options, and bind throws std::invalid_argument for others:
  ///
  /// | option of `a` | effect |
  /// |---|---|
  /// | sinks | replace those of the plan |
  /// | dropout with another p than 0 | replaces that of the plan; throws if the plan has no dropout |
  /// | statistics | replace the views of the plan; throws if the plan has no statistics. Left out: not written |
  ///
  /// Also throws if an extent or the storage type of q, k or v differs from the plan's, if an output overlaps an input,
  /// or if scaling, score or sinks do not fit. Over a source, also if a length or a range of stored keys differs from
  /// the plan's, or if planned shared keys are not shared.
  template <class... P>
  requires(detail::are_policies<const P...>() && !detail::has_mask_or_executor<const P...>())
      [[nodiscard]] auto bind(const AttentionArguments<A>& a, const P&... policies) const {
    using Given = detail::Policies<const P...>;
    const Given given(policies...);
    return BoundCall<A, typename Given::S, typename Given::C>(plan_, mask_, a, given.scaling, given.score);
  }
  /// @cond
  template <class... P, class Mistake = mistake::bind_takes_a_scaling_and_a_score_the_plan_has_the_mask<P...>>
  requires(!detail::are_policies<const P...>() ||
           detail::has_mask_or_executor<const P...>()) void bind(const AttentionArguments<A>&,
                                                                 const P&...) const
      SSMAX_REFUSE(
          "ssmax::Plan::bind: pass a scaling and a score; the plan has the mask, and run takes the executor");
  /// @endcond
  /// Binds and runs a call. `policies` are a scaling, a score and an executor.
  template <class... P>
  requires(detail::are_policies<P...>() && detail::count_of<detail::IsMask, P...>() == 0) void run(
      const AttentionArguments<A>& a, std::span<std::byte> memory, P&&... policies) const {
    const detail::Policies<P...> given(policies...);
    const BoundCall<A, typename detail::Policies<P...>::S, typename detail::Policies<P...>::C> call(
        plan_, mask_, a, given.scaling, given.score);
    call.run(memory, given.executor);
  }
  /// @cond
  template <class... P,
            class Mistake = mistake::run_takes_a_scaling_a_score_and_an_executor_the_plan_has_the_mask<P...>>
  requires(!detail::are_policies<P...>() ||
           detail::count_of<detail::IsMask, P...>() > 0) void run(const AttentionArguments<A>&,
                                                                  std::span<std::byte>, P&&...) const
      SSMAX_REFUSE("ssmax::Plan::run: pass a scaling, a score and an executor; the plan has the mask");
  /// @endcond

 private:
  const detail::PlannedMask<A> mask_;
  const detail::ForwardPlan<A> plan_;
};

/// @cond
template <class A, class... P>
Plan(const AttentionArguments<A>&, index_t, const P&...) -> Plan<A>;
/// @endcond

SSMAX_END
/// @}

SSMAX_BEGIN_DETAIL

/// A plan of the backward.
template <class A>
class GradientPlan : public PlanState<A, BackwardArguments<A>> {
  using Base = PlanState<A, BackwardArguments<A>>;
  using Base::options_;

 public:
  /// `variant` has the mask of the plan, and examples of a scaling and a score.
  GradientPlan(const BackwardArguments<A>& example, const AttentionGradients<A>& gradients, index_t threads,
               const GradientVariant<A>& variant)
      : Base("BackwardPlan", example, threads),
        functions_(*gradients.dout.functions()),
        accumulates_(gradients.accumulate),
        has_score_(variant.has_score),
        keeps_sums_(variant.wants_gradients() || !example.sinks.empty()),
        parameters_(variant.parameters()) {
    A dsink{};
    AttentionGradients<A> of_plan = gradients;
    of_plan.dsinks = example.sinks.empty() ? std::span<A>() : std::span<A>(&dsink, 1);
    BackwardCall<A> call{};
    build_call("BackwardPlan", options_, of_plan, call);
    call.facts.is_example = true;
    compiled::open_call(call, variant);
    this->plan(functions_, call.problem, variant);
    sharing_ = variant.sharing(longest_shape(call.problem.forward));
  }

  void run(const BackwardCall<A>& call, const GradientVariant<A>& variant, std::span<std::byte> memory,
           const AnyExecutor& executor) const {
    functions_.run_list(this->list(), call.problem, variant, this->checked(memory), executor);
  }

  /// Opens a call of the plan.
  void bind(const BackwardArguments<A>& a, const AttentionGradients<A>& g, const GradientVariant<A>& variant,
            BackwardCall<A>& call) const {
    const char* const function = "BackwardPlan::bind";
    check_is_whole(function, facts_of(a), "the plan has its own: it must be");
    Base::check_planned(function, "q", a.q, options_.q);
    Base::check_planned(function, "k", a.k, options_.k);
    Base::check_planned(function, "v", a.v, options_.v);
    if (g.dout.functions() != &functions_ && is_given(g.dout))
      fail_format("ssmax::%s: dout is stored in another type than the plan's", function);
    if (g.accumulate && !accumulates_)
      fail_format("ssmax::%s: accumulate is true, the plan has no memory for it", function);
    if (!g.dsinks.empty() && !keeps_sums_)
      fail_format("ssmax::%s: dsinks are given, the plan has no memory for them", function);
    if (variant.has_score && !has_score_)
      fail_format("ssmax::%s: a score is given, the plan was made without one", function);
    if (variant.wants_gradients() && !keeps_sums_) {
      fail_format("ssmax::%s: the scaling or the score has a gradient, the plan has no memory for it",
                  function);
    }
    if (variant.parameters() > parameters_) {
      fail_value(function, "the score", "has parameters with gradients", variant.parameters(),
                 "the plan's has", parameters_);
    }
    build_call(function, this->with_options(function, a), g, call);
    compiled::open_call(call, variant);
    if (variant.sharing(longest_shape(call.problem.forward)) > sharing_) {
      fail_format("ssmax::%s: gradients of the score are shared by more heads than those of the plan's score",
                  function);
    }
  }

 private:
  const BackwardFunctions<A>& functions_;
  bool accumulates_, has_score_, keeps_sums_;
  index_t parameters_;  // of the score, per query
  Sharing sharing_{};
};

SSMAX_END

/// @addtogroup plan_backward
/// @{
SSMAX_BEGIN_CODE

/// A planned backward pass with its tensors, scaling and score. `bind` of a plan returns it. The plan and the tensors
/// must outlive it. It keeps scaling and score.
template <class A, class S, class C>
class BoundBackward {
 public:
  /// Not copied.
  BoundBackward(const BoundBackward&) = delete;
  /// Not copied.
  BoundBackward& operator=(const BoundBackward&) = delete;

  /// Computes the gradients. May be called any number of times. `memory` must begin at a multiple of 64 bytes and have
  /// at least `bytes()` bytes of the plan. The executor may have any number of threads: the call uses at most the
  /// planned number. Throws std::invalid_argument before the first write if the memory does not fit, or if the active
  /// target is another one than when the plan was made.
  template <class E = Serial>
  requires Executor<E>
  void run(std::span<std::byte> memory, E&& executor = E{}) const {
    plan_.run(call_, variant_, memory, detail::AnyExecutor(executor));
  }

  /// @cond
  BoundBackward(const detail::GradientPlan<A>& plan, const detail::PlannedMask<A>& mask,
                const BackwardArguments<A>& a, const AttentionGradients<A>& g, const S& scaling,
                const C& score)
      : plan_(plan), scaling_(scaling), score_(score), variant_(scaling_, mask, score_) {
    plan_.bind(a, g, variant_, call_);
  }
  /// @endcond

 private:
  const detail::GradientPlan<A>& plan_;
  const S scaling_;
  const C score_;
  const detail::UserGradientVariant<A, S, detail::PlannedMask<A>, C> variant_;
  shared::BackwardCall<A> call_{};
};

/// A plan of backward passes with tensors and policies like those of an example. It keeps the options of the example
/// and the lengths of the sequences. Other spans and the rope must outlive it. A plan is not copied.
template <class A = float>
class BackwardPlan {
 public:
  /// Plans calls on at most `max_threads` threads. The plan reads extents and storage types of the example's tensors.
  /// The tensors may be null. `policies` are a mask, of which the plan owns a copy, and examples of a scaling and a
  /// score: the gradients that they take determine memory and tasks. With sinks, calls may take dsinks. If
  /// `gradients.accumulate` is true, calls may accumulate, and need more memory. Throws std::invalid_argument if
  /// shapes, policies, lengths or the positions of the rope do not fit, or if max_threads is below 1.
  template <class... P>
  BackwardPlan(const std::type_identity_t<BackwardArguments<A>>& example,
               const std::type_identity_t<AttentionGradients<A>>& gradients, index_t max_threads,
               const P&... policies)
      : BackwardPlan(example, gradients, max_threads, detail::Policies<const P...>(policies...)) {
    static_assert(
        detail::is_call<A, const P...>() && detail::count_of<detail::IsExecutor, const P...>() == 0,
        "ssmax::BackwardPlan: a policy is a scaling, a mask with `keys` or a score with `derivative`, each "
        "kind at most once; join masks with &, scores with |");
  }

  /// Returns the bytes that a call needs.
  [[nodiscard]] std::size_t bytes() const { return plan_.list().run_bytes; }
  /// Returns how the calls are computed on max_threads threads.
  [[nodiscard]] const Explanation& explanation() const { return plan_.explanation(); }

  /// Returns a call of the plan. `policies` are a scaling and a score, which may have other types than the examples.
  /// Sinks and dropout of `a` replace those of the plan as in Plan::bind. Throws std::invalid_argument for every error
  /// of attention_backward, and for other options. Also throws if an extent or the storage type of q, k, v or dout
  /// differs from the plan's. A call that needs more memory than planned throws, too: with dsinks, with `accumulate`,
  /// or with a score or a gradient that the examples lack. A score whose gradients are shared by more heads than those
  /// of the example throws as well.
  template <class... P>
  [[nodiscard]] auto bind(const BackwardArguments<A>& a, const AttentionGradients<A>& g,
                          const P&... policies) const {
    static_assert(
        detail::are_policies<const P...>() && !detail::has_mask_or_executor<const P...>(),
        "ssmax::BackwardPlan::bind: pass a scaling and a score; the plan has the mask, and run takes the "
        "executor");
    using Given = detail::Policies<const P...>;
    const Given given(policies...);
    return BoundBackward<A, typename Given::S, typename Given::C>(plan_, mask_, a, g, given.scaling,
                                                                  given.score);
  }

 private:
  template <class... P>
  BackwardPlan(const BackwardArguments<A>& example, const AttentionGradients<A>& gradients,
               index_t max_threads, const detail::Policies<P...>& given)
      : mask_(given.mask),
        plan_(example, gradients, max_threads,
              detail::UserGradientVariant<A, typename detail::Policies<P...>::S, detail::PlannedMask<A>,
                                          typename detail::Policies<P...>::C>(given.scaling, mask_,
                                                                              given.score)) {}

  const detail::PlannedMask<A> mask_;
  const detail::GradientPlan<A> plan_;
};

/// @cond
template <class A, class... P>
BackwardPlan(const BackwardArguments<A>&, const std::type_identity_t<AttentionGradients<A>>&, index_t,
             const P&...) -> BackwardPlan<A>;
/// @endcond

SSMAX_END
/// @}
