/// @defgroup plan_backward Plans of the backward (plan_backward.hpp)
/// @ingroup plan
/// A plan for calls of attention_backward that differ only in tensors and parameters, such as the layers of a model.
///
///     const auto scaling = [](Layer& layer) { return SSMax<float>{layer.s, layer.b}.gradient(layer.ds, layer.db); };
///     const BackwardPlan<float, decltype(scaling(layers[0])), Causal> plan(
///         {.heads = 8, .kv_heads = 2, .queries = n, .keys = n, .width = 64}, scaling(layers[0]), Causal{}, Identity{},
///         {.rope = &rope}, pool.concurrency());
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
/// | plan | shapes, mask, scaling, score, lengths of the sequences, positions of the rope | O(queries + keys + sequences) |
/// | bind | the checks of attention_backward, extents against the plan's, memory against the plan's | as its checks |
/// | run | size of the memory | no allocation |
///
/// Results are bit-identical to those of `attention_backward`, with any executor and any number of threads.
#pragma once

#include <cstddef>
#include <span>

#include "attention_backward.hpp"
#include "plan.hpp"

/// @addtogroup plan_backward
/// @{
SSMAX_BEGIN_CODE

/// A planned backward pass with its tensors, scaling and score. `bind` of a plan returns it. The plan and the tensors
/// must outlive it. It keeps scaling and score.
template <class T, class S, class M, class C>
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
    plan_.template run<detail::OperandsOf<T>>(call_.problem, variant_, memory, detail::AnyExecutor(executor));
  }

  /// @cond
  template <class Check>
  BoundBackward(const detail::PlanState<T, M>& plan, const BackwardArguments<T>& a,
                const AttentionGradients<T>& g, const S& scaling, const C& score,
                const AttentionOptions<T>& options, const Check& check)
      : plan_(plan),
        scaling_(scaling),
        score_(score),
        variant_(scaling_, plan.mask, score_),
        call_("BackwardPlan::bind", a, g, options, variant_) {
    check(call_.problem, variant_);
  }
  /// @endcond

 private:
  const detail::PlanState<T, M>& plan_;
  const S scaling_;
  const C score_;
  const detail::UserGradientVariant<detail::ComputeType<T>, S, M, C> variant_;
  const detail::BackwardCall<T> call_;
};

/// A plan of backward passes with shapes, mask, options and types of scaling and score in common. It keeps the lengths
/// of the sequences. The other spans and the rope in mask and options must outlive it.
template <class T, class S = Softmax, class M = Full, class C = Identity>
class BackwardPlan {
  static_assert(detail::CallElements<T>,
                "ssmax::BackwardPlan: T is float, double, half, bfloat16, or Elements of types that one "
                "type computes");
  static_assert(Scaling<S> && Mask<M> && Score<C>);
  using Compute = detail::ComputeType<T>;
  using Sinks = std::span<const Compute>;

 public:
  /// Plans calls on at most `max_threads` threads. `scaling` and `score` are examples: the gradients that they take
  /// determine memory and tasks. They need not outlive the plan. With sinks in the options, calls may take dsinks. If
  /// `accumulates` is true, calls may set AttentionGradients::accumulate, and need more memory. Throws
  /// std::invalid_argument if shapes, policies, lengths or the positions of the rope do not fit, or if max_threads is
  /// below 1. `workspace` and `explanation` in the options are ignored.
  BackwardPlan(const AttentionShape& shape, const S& scaling, const M& mask, const C& score,
               const AttentionOptions<T>& options = {}, index_t max_threads = 1, bool accumulates = false)
      : shape_(shape), accumulates_(accumulates), state_("BackwardPlan", mask, options, max_threads) {
    const char* const function = "BackwardPlan";
    if (shape_.value_width == 0) shape_.value_width = shape_.width;
    const auto [batch, heads, kv_heads, queries, keys, width, value_width] = shape_;
    // Views for checks that read no element.
    const detail::QueryElement<T> query{};
    const detail::KeyElement<T> key{};
    const detail::ValueElement<T> value{};
    const detail::OutElement<T> out{};
    const Compute lse{};
    Compute dsink{};
    const BackwardArguments<T> extents{.q = {&query, {batch, heads, queries, width}},
                                       .k = {&key, {batch, kv_heads, keys, width}},
                                       .v = {&value, {batch, kv_heads, keys, value_width}},
                                       .out = {&out, {batch, heads, queries, value_width}},
                                       .lse = {&lse, {batch, heads, queries}}};
    detail::check_inputs(function, extents.q, extents.k, extents.v);
    detail::check_options(function, detail::CallKind::backward, options, heads);
    detail::check_lengths(function, options.lengths, extents.q, extents.k);
    const AttentionGradients<T> gradients{
        .dout = extents.out,
        .dq = {nullptr, {batch, heads, queries, width}},
        .dk = {nullptr, {batch, kv_heads, keys, width}},
        .dv = {nullptr, {batch, kv_heads, keys, value_width}},
        .dsinks = options.sinks.empty() ? std::span<Compute>() : std::span<Compute>(&dsink, 1),
        .accumulate = accumulates};
    const detail::KeyShareOf<T> share = detail::keys_of(extents, state_.options);
    const auto problem = detail::make_backward_problem<T>(
        detail::make_problem<T>(extents, share, state_.options), extents, gradients, state_.options);
    const detail::UserGradientVariant<Compute, S, M, C> variant(scaling, mask, score);
    detail::check_policies(function, problem.forward, options.rope, variant);
    state_.template plan<detail::OperandsOf<T>>(function, problem, variant);
    keeps_sums_ = variant.wants_gradients() || !options.sinks.empty();
    sharing_ = variant.sharing(detail::longest_shape(problem.forward));
  }

  /// Returns the bytes that a call needs.
  [[nodiscard]] std::size_t bytes() const { return state_.list().run_bytes; }
  /// Returns how the calls are computed on max_threads threads.
  [[nodiscard]] const Explanation& explanation() const { return state_.explanation(); }

  /// Returns a call of the plan with tensors, a scaling and a score. Throws std::invalid_argument for every error of
  /// attention_backward, and if an extent differs from the plan's. It also throws if the call needs more memory than
  /// planned: for dsinks, for `accumulate`, or for a score whose gradients are shared by more heads. `sinks` replace
  /// those of the options, unless they are empty.
  [[nodiscard]] BoundBackward<T, S, M, C> bind(const BackwardArguments<T>& arguments,
                                               const AttentionGradients<T>& gradients, const S& scaling,
                                               const C& score = {}, Sinks sinks = {}) const {
    const char* const function = "BackwardPlan::bind";
    const auto same = [&](const char* name, const auto& view, index_t heads, index_t rows, index_t width) {
      const index_t planned[] = {shape_.batch, heads, rows, width};
      for (int i = 0; i < 4; ++i) detail::check_planned(function, name, i, view.extent(i), planned[i]);
    };
    same("q", arguments.q, shape_.heads, shape_.queries, shape_.width);
    same("k", arguments.k, shape_.kv_heads, shape_.keys, shape_.width);
    same("v", arguments.v, shape_.kv_heads, shape_.keys, shape_.value_width);
    return {
        state_,
        arguments,
        gradients,
        scaling,
        score,
        detail::with_sinks(state_.options, sinks),
        [&](const auto& problem, const auto& variant) {
          if (gradients.accumulate && !accumulates_)
            detail::fail_format("ssmax::%s: accumulate is true, the plan has no memory for it", function);
          if (!gradients.dsinks.empty() && !keeps_sums_)
            detail::fail_format("ssmax::%s: dsinks are given, the plan has no memory for them", function);
          if (variant.sharing(detail::longest_shape(problem.forward)) > sharing_) {
            detail::fail_format(
                "ssmax::%s: gradients of the score are shared by more heads than those of the plan's score",
                function);
          }
        }};
  }

 private:
  AttentionShape shape_;
  bool accumulates_, keeps_sums_ = false;
  Sharing sharing_{};
  detail::PlanState<T, M> state_;
};

SSMAX_END
/// @}
