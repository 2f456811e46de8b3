/// @defgroup plan Plans (plan.hpp)
/// @ingroup attention
/// A plan for calls of attention that differ only in tensors, scaling and score, such as the layers of a model.
///
///     const AttentionPlan<float, Causal> plan({.heads = 8, .kv_heads = 2, .queries = n, .keys = n, .width = 64}, Causal{},
///                                             {.rope = &rope}, pool.concurrency());
///     Workspace workspace;
///     const std::span memory(workspace.reserve(plan.bytes()), plan.bytes());  // or memory of your own
///     for (Layer& layer : layers) {
///       plan.bind({.q = layer.q, .k = layer.k, .v = layer.v, .out = layer.out}, layer.scaling).run(memory, pool);
///     }
///
/// | step | checks | cost |
/// |---|---|---|
/// | plan | shapes, mask, lengths of the sequences, positions of the rope | O(queries + keys + sequences) |
/// | bind | tensors against the shapes, scaling, score, sinks | O(1) |
/// | run | size of the memory | no allocation |
///
/// Results are bit-identical to those of `attention`, with any executor and any number of threads.
/// plan_source.hpp has plans of calls over a source of keys.
#pragma once

#include <cstddef>
#include <span>

#include "attention.hpp"
#include "detail/attention/desk/plan.hpp"

/// @addtogroup plan
/// @{
SSMAX_BEGIN_DATA

/// The extents of q, k and v in the calls of a plan.
struct AttentionShape {
  index_t batch = 1,        ///< Batch entries.
      heads = 1,            ///< Heads of q.
      kv_heads = 1,         ///< Heads of k and v.
      queries = 0,          ///< Rows of q.
      keys = 0;             ///< Rows of k and v.
  index_t width = 0;        ///< Channels of q and k.
  index_t value_width = 0;  ///< Channels of v; 0: as width.
};

SSMAX_END

SSMAX_BEGIN_CODE

template <class T, class M>
class AttentionPlan;

/// A planned call with its tensors. AttentionPlan::bind returns it. The plan, the scaling, the score and the
/// tensors must outlive it.
template <class T, class S, class M, class C>
class BoundAttention {
 public:
  /// Not copied.
  BoundAttention(const BoundAttention&) = delete;
  /// Not copied.
  BoundAttention& operator=(const BoundAttention&) = delete;

  /// Computes the call. May be called any number of times. `memory` must begin at a multiple of 64 bytes and have
  /// at least `AttentionPlan::bytes()` bytes. The executor may have fewer threads than planned. If it has more,
  /// the call uses the planned number. Throws std::invalid_argument before the first write if the memory does not
  /// fit.
  template <class E = Serial>
  requires Executor<E>
  void run(std::span<std::byte> memory, E&& executor = E{}) const {
    Workspace workspace(memory);
    compiled::run_attention<detail::OperandsOf<T>>(problem_, variant_, result_, &workspace,
                                                   detail::AnyExecutor(executor, plan_.max_threads));
  }

 private:
  friend class AttentionPlan<T, M>;
  using Compute = detail::ComputeType<T>;

  BoundAttention(const detail::PlanState<T, M>& plan, const AttentionArguments<T>& a, const S& scaling,
                 const C& score)
      : plan_(plan),
        variant_(scaling, plan.mask, score),
        keys_(detail::keys_of(a, plan.options)),
        problem_(detail::called_by("AttentionPlan", plan.options,
                                   detail::for_forward<T>(detail::make_problem<T>(a, keys_, plan.options)))),
        result_(detail::make_result(a, plan.options)) {}

  const detail::PlanState<T, M>& plan_;
  const detail::UserVariant<Compute, S, M, C> variant_;
  const detail::KeyShareOf<T> keys_;  // that problem_ refers to
  const detail::Problem<Compute> problem_;
  const detail::Result<Compute> result_;
};

/// A plan of calls with shapes, mask and options in common. The spans and the rope in mask and options must
/// outlive it.
template <class T, class M = Full>
class AttentionPlan {
  static_assert(detail::CallElements<T>,
                "ssmax::AttentionPlan: T is float, double, half, bfloat16, or Elements of types that one "
                "type computes");
  static_assert(Mask<M>);

 public:
  /// Plans calls on at most `max_threads` threads. Throws std::invalid_argument if shapes, mask, lengths or the
  /// positions of the rope do not fit, or if max_threads is below 1. `workspace` and `explanation` in the options
  /// are ignored.
  AttentionPlan(const AttentionShape& shape, const M& mask, const AttentionOptions<T>& options = {},
                index_t max_threads = 1)
      : shape_(shape), state_("AttentionPlan", mask, options, max_threads) {
    const char* const function = "AttentionPlan";
    if (shape_.value_width == 0) shape_.value_width = shape_.width;
    // Views for checks that read no element.
    const detail::QueryElement<T> query{};
    const detail::KeyElement<T> key{};
    const detail::ValueElement<T> value{};
    const AttentionArguments<T> extents{
        .q = {&query, {shape_.batch, shape_.heads, shape_.queries, shape_.width}},
        .k = {&key, {shape_.batch, shape_.kv_heads, shape_.keys, shape_.width}},
        .v = {&value, {shape_.batch, shape_.kv_heads, shape_.keys, shape_.value_width}}};
    detail::check_inputs(function, extents.q, extents.k, extents.v);
    detail::check_options(function, detail::CallKind::views, options, shape_.heads);
    detail::check_lengths(function, options.lengths, extents.q, extents.k);
    const detail::KeyShareOf<T> keys = detail::keys_of(extents, options);
    state_.template plan<detail::OperandsOf<T>>(
        function, detail::for_forward<T>(detail::make_problem<T>(extents, keys, options)),
        [](const auto&, const auto&) {});
  }

  /// Returns the bytes that a call needs.
  [[nodiscard]] std::size_t bytes() const { return state_.explanation.workspace_bytes; }
  /// Returns how the calls are computed on max_threads threads.
  [[nodiscard]] const Explanation& explanation() const { return state_.explanation; }

  /// Returns a call of the plan with tensors, a scaling and a score. Throws std::invalid_argument if an extent
  /// differs from the plan's, if an output overlaps an input, or if scaling, score or sinks do not fit.
  template <class S = Softmax, class C = Identity>
  requires Scaling<S> && Score<C>
  [[nodiscard]] BoundAttention<T, S, M, C> bind(const AttentionArguments<T>& arguments, const S& scaling,
                                                const C& score) const {
    check(arguments, scaling, score);
    return {state_, arguments, scaling, score};
  }
  /// The same without a score.
  template <class S>
  requires Scaling<S>
  [[nodiscard]] BoundAttention<T, S, M, Identity> bind(const AttentionArguments<T>& arguments,
                                                       const S& scaling) const {
    return bind(arguments, scaling, no_score);
  }

 private:
  static constexpr Identity no_score{};

  template <class S, class C>
  void check(const AttentionArguments<T>& a, const S& scaling, const C& score) const {
    const char* const function = "AttentionPlan::bind";
    const auto same = [&](const char* name, const auto& view, index_t heads, index_t rows, index_t width) {
      const index_t planned[] = {shape_.batch, heads, rows, width};
      for (int i = 0; i < 4; ++i) detail::check_planned(function, name, i, view.extent(i), planned[i]);
    };
    same("q", a.q, shape_.heads, shape_.queries, shape_.width);
    same("k", a.k, shape_.kv_heads, shape_.keys, shape_.width);
    same("v", a.v, shape_.kv_heads, shape_.keys, shape_.value_width);
    detail::check_tensors(function, a, state_.options);
    state_.check_bound(function, scaling, score);
  }

  AttentionShape shape_;
  detail::PlanState<T, M> state_;
};

SSMAX_END
/// @}
