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
/// plan_source.hpp has plans of calls over a source of keys, plan_backward.hpp plans of the backward.
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

/// A planned call with its tensors, scaling and score. `bind` of a plan returns it. The plan, the tensors and a source
/// that is an lvalue must outlive it. It keeps scaling, score and a temporary source.
template <class T, class Keys, class S, class M, class C>
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
    plan_.run(problem_, variant_, result_, memory, detail::AnyExecutor(executor));
  }

  /// @cond
  template <class MakeProblem, class Arguments>
  BoundCall(const detail::PlanState<T, M>& plan, Keys&& keys, const S& scaling, const C& score,
            const MakeProblem& make_problem, const Arguments& a, const AttentionOptions<T>& options)
      : plan_(plan),
        keys_(std::forward<Keys>(keys)),
        scaling_(scaling),
        score_(score),
        variant_(scaling_, plan.mask, score_),
        problem_(make_problem(keys_)),
        result_(detail::make_result(a, options)) {}
  /// @endcond

 private:
  using Compute = detail::ComputeType<T>;

  const detail::PlanState<T, M>& plan_;
  const Keys keys_;  // that problem_ refers to
  const S scaling_;
  const C score_;
  const detail::UserVariant<Compute, S, M, C> variant_;
  const detail::Problem<Compute> problem_;
  const detail::Result<Compute> result_;
};

/// A plan of calls with shapes, mask and options in common. It keeps the lengths of the sequences. The other spans and
/// the rope in mask and options must outlive it.
template <class T, class M = Full>
class AttentionPlan {
  static_assert(detail::CallElements<T>,
                "ssmax::AttentionPlan: T is float, double, half, bfloat16, or Elements of types that one "
                "type computes");
  static_assert(Mask<M>);
  using Sinks = std::span<const detail::ComputeType<T>>;

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
    const detail::KeyShareOf<T> keys = detail::keys_of(extents, state_.options);
    state_.template plan<detail::OperandsOf<T>>(
        function, detail::for_forward<T>(detail::make_problem<T>(extents, keys, state_.options)),
        [](const auto&, const auto&) {});
  }

  /// Returns the bytes that a call needs.
  [[nodiscard]] std::size_t bytes() const { return state_.list().run_bytes; }
  /// Returns how the calls are computed on max_threads threads.
  [[nodiscard]] const Explanation& explanation() const { return state_.explanation(); }

  /// Returns a call of the plan with tensors, a scaling and a score. Throws std::invalid_argument if an extent
  /// differs from the plan's, if an output overlaps an input, or if scaling, score or sinks do not fit. `sinks` replace
  /// those of the options, unless they are empty.
  template <class S = Softmax, class C = Identity>
  requires Scaling<S> && Score<C>
  [[nodiscard]] auto bind(const AttentionArguments<T>& arguments, const S& scaling, const C& score,
                          Sinks sinks = {}) const {
    const AttentionOptions<T> options = detail::with_sinks(state_.options, sinks);
    check(arguments, options);
    const auto make_problem = [&](const detail::KeyShareOf<T>& keys) {
      const auto problem =
          detail::called_by("AttentionPlan", options,
                            detail::for_forward<T>(detail::make_problem<T>(arguments, keys, options)));
      detail::check_bound("AttentionPlan::bind", problem, scaling, score);
      return problem;
    };
    return BoundCall<T, detail::KeyShareOf<T>, S, M, C>(state_, detail::keys_of(arguments, options), scaling,
                                                        score, make_problem, arguments, options);
  }
  /// The same without a score.
  template <class S>
  requires Scaling<S>
  [[nodiscard]] auto bind(const AttentionArguments<T>& arguments, const S& scaling, Sinks sinks = {}) const {
    return bind(arguments, scaling, Identity{}, sinks);
  }

 private:
  void check(const AttentionArguments<T>& a, const AttentionOptions<T>& options) const {
    const char* const function = "AttentionPlan::bind";
    const auto same = [&](const char* name, const auto& view, index_t heads, index_t rows, index_t width) {
      const index_t planned[] = {shape_.batch, heads, rows, width};
      for (int i = 0; i < 4; ++i) detail::check_planned(function, name, i, view.extent(i), planned[i]);
    };
    same("q", a.q, shape_.heads, shape_.queries, shape_.width);
    same("k", a.k, shape_.kv_heads, shape_.keys, shape_.width);
    same("v", a.v, shape_.kv_heads, shape_.keys, shape_.value_width);
    detail::check_tensors(function, a, options);
  }

  AttentionShape shape_;
  detail::PlanState<T, M> state_;
};

SSMAX_END
/// @}
