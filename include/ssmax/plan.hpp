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
/// | bind, keys in views | tensors against the plan's, scaling, score, sinks | O(1) |
/// | bind, a source | also lengths, stored and shared keys against the plan's | O(sequences + shared pages) |
/// | run | size of the memory | no allocation |
///
/// Results are bit-identical to those of `attention`, with any executor and any number of threads. Over a source, make
/// a new plan for each step, because the lengths of the sequences change. plan_backward.hpp has plans of the backward.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "attention.hpp"
#include "detail/attention/desk/plan.hpp"

/// @addtogroup plan
/// @{
SSMAX_BEGIN_CODE

/// @cond
namespace mistake {
template <class... P>
struct bind_takes_a_scaling_and_a_score_the_plan_has_the_mask;
}  // namespace mistake
/// @endcond

/// A planned call with its tensors, scaling and score. `bind` of a plan returns it. The plan and the tensors must
/// outlive it, and so must a source that is a variable. It keeps scaling and score.
template <class A, class S, class M, class C>
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
  BoundCall(const detail::ForwardPlan<A>& plan, const M& mask, const AttentionArguments<A>& a,
            const S& scaling, const C& score)
      : plan_(plan), keys_(a.keys), scaling_(scaling), score_(score), variant_(scaling_, mask, score_) {
    plan_.bind(a, keys_, variant_, call_);
  }
  /// @endcond

 private:
  const detail::ForwardPlan<A>& plan_;
  const Keys<A> keys_;  // that call_ refers to
  const S scaling_;
  const C score_;
  const detail::UserVariant<A, S, M, C> variant_;
  shared::ForwardCall<A> call_{};
};

/// A plan of calls with tensors like those of an example. It keeps the options of the example and the lengths of the
/// sequences. Other spans and the rope must outlive it. A plan is not copied.
///
/// If sequences of the example's source have shared keys (KeySource::shares_keys), the calls compute them once. Then
/// each source must have the keys in the same memory for the same sequences. `bind` compares the memory page by page.
/// Exception: a source with the layout number of the example (KeySource::layout) is not compared.
template <class A = float, class M = Full>
class Plan {
 public:
  /// Plans calls on at most `max_threads` threads. The plan reads extents and storage types of the example's tensors.
  /// The tensors may be null. `out`, `lse`, `workspace` and `explanation` are not used. Throws std::invalid_argument if
  /// tensors, source, mask, lengths or the positions of the rope do not fit, or if max_threads is below 1.
  Plan(const std::type_identity_t<AttentionArguments<A>>& example, index_t max_threads, const M& mask)
      : Plan(example, max_threads, mask, true) {}
  /// The same with the mask Full.
  explicit Plan(const std::type_identity_t<AttentionArguments<A>>& example, index_t max_threads = 1)
      : Plan(example, max_threads, M{}, false) {}

  /// Returns the bytes that a call needs.
  [[nodiscard]] std::size_t bytes() const { return plan_.list().run_bytes; }
  /// Returns how the calls are computed on max_threads threads.
  [[nodiscard]] const Explanation& explanation() const { return plan_.explanation(); }

  /// Returns a call of the plan. `a` has the tensors and, over a source, the source. Its sinks replace those of the
  /// plan, and its other options are left out. `policies` are a scaling and a score. Throws std::invalid_argument if an
  /// extent or a storage type differs from the plan's, if an output overlaps an input, or if scaling, score or sinks do
  /// not fit. Over a source, also if a length or a range of stored keys differs from the plan's, or if planned shared
  /// keys are not shared.
  template <class... P>
  requires(detail::are_policies<const P...>() && !detail::has_mask_or_executor<const P...>())
      [[nodiscard]] auto bind(const AttentionArguments<A>& a, const P&... policies) const {
    using Given = detail::Policies<const P...>;
    const Given given(policies...);
    return BoundCall<A, typename Given::S, M, typename Given::C>(plan_, mask_, a, given.scaling, given.score);
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
  requires(detail::are_policies<P...>()) void run(const AttentionArguments<A>& a, std::span<std::byte> memory,
                                                  P&&... policies) const {
    const detail::Policies<P...> given(policies...);
    static_assert(!given.has_mask, "ssmax::Plan::run: the mask is the plan's");
    const BoundCall<A, typename detail::Policies<P...>::S, M, typename detail::Policies<P...>::C> call(
        plan_, mask_, a, given.scaling, given.score);
    call.run(memory, given.executor);
  }

 private:
  Plan(const AttentionArguments<A>& example, index_t max_threads, const M& mask, bool has_mask)
      : mask_(mask),
        plan_(example, max_threads,
              detail::UserVariant<A, Softmax, M, Identity>(detail::default_scaling, mask_,
                                                           detail::default_score),
              has_mask) {}

  const M mask_;
  const detail::ForwardPlan<A> plan_;
};

/// @cond
template <class A>
Plan(const AttentionArguments<A>&, index_t) -> Plan<A, Full>;
template <class A, class M>
Plan(const AttentionArguments<A>&, index_t, const M&) -> Plan<A, M>;
/// @endcond

SSMAX_END
/// @}
