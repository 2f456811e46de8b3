/// @defgroup plan_source Plans over a source of keys (plan_source.hpp)
/// @ingroup plan
/// A plan for calls of attention over sources of keys whose sequences have the same lengths, such as the caches of a
/// model's layers in one step.
///
///     const SourcePlan<float, KvCache<half>, Causal> plan({.heads = 8, .queries = 1}, layers[0].cache, Causal{},
///                                                         {.rope = &rope}, pool.concurrency());
///     Workspace workspace;
///     const std::span memory(workspace.reserve(plan.bytes()), plan.bytes());  // or memory of your own
///     for (Layer& layer : layers) {
///       plan.bind({.q = layer.q, .out = layer.out}, layer.cache, layer.scaling).run(memory, pool);
///     }
///
/// | step | checks | cost |
/// |---|---|---|
/// | plan | shapes, mask, lengths, stored keys, positions of the rope | O(queries + sequences) |
/// | bind | lengths, stored and shared keys against the plan's, tensors, scaling, score, sinks | O(sequences + shared pages) |
/// | run | size of the memory | no allocation |
///
/// Make a new plan for each step, because the lengths of the sequences change. Results are bit-identical to those of
/// `attention` over the source, with any executor and any number of threads. With SequenceLengths::padded_queries or
/// packed_queries in the options, each sequence has its own number of queries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention_source.hpp"
#include "plan.hpp"

/// @addtogroup plan_source
/// @{
SSMAX_BEGIN_DATA

/// The extents of q that do not follow from the source.
struct SourcePlanShape {
  index_t heads = 1,  ///< Heads of q.
      queries = 0;    ///< Rows of q.
};

SSMAX_END

SSMAX_BEGIN_CODE

/// A plan of calls over sources of type K. It keeps the lengths of the sequences. The other spans and the rope in mask
/// and options must outlive it.
///
/// If sequences of the example have shared keys (KeySource::shares_keys), the calls compute them once. Then each source
/// must have the keys in the same memory for the same sequences. `bind` compares the memory page by page. Exception: a
/// source with the layout number of the example (KeySource::layout) is not compared.
template <class T, class K, class M = Causal>
class SourcePlan {
  static_assert(KeySource<K> && Mask<M>);
  static_assert(detail::SourceFits<T, K>,
                "ssmax::SourcePlan: double queries need a source of double and a result of double, other "
                "queries float, half or bfloat16");
  using Sinks = std::span<const detail::ComputeType<T>>;

 public:
  /// Plans calls on at most `max_threads` threads. `source` is an example of the sources of all calls. It need
  /// not outlive the plan. Throws std::invalid_argument if shape, source, mask, lengths or the positions of the
  /// rope do not fit, if the mask shows a key that the source no longer stores, or if max_threads is below 1.
  /// `workspace` and `explanation` in the options are ignored.
  SourcePlan(const SourcePlanShape& shape, const K& source, const M& mask,
             const AttentionOptions<T>& options = {}, index_t max_threads = 1)
      : shape_(shape), state_("SourcePlan", mask, options, max_threads), source_shape_(source.shape()) {
    const char* const function = "SourcePlan";
    const detail::QueryElement<T> query{};  // a view for checks that read no element
    const View<const detail::QueryElement<T>, 4> q(
        &query, {batch(), shape.heads, shape.queries, source_shape_.width});
    detail::check_queries(function, q, source_shape_, options.lengths.is_packed());
    detail::check_source_lengths(function, options.lengths, q, source_shape_.batch);
    detail::check_options(function, detail::CallKind::source, options, shape.heads);
    layout_ = layout_of(source);
    for (index_t b = 0; b < source_shape_.batch; ++b) sequences_.push_back(sequence_of(source, b));
    state_.template plan<detail::SourceOperands<T, K>>(
        function, detail::make_source_problem<M>(q, source, state_.options),
        [&](const auto& problem, const auto& variant) {
          detail::check_stored_keys(function, problem, source, variant.mask);
        });
  }

  /// Returns the bytes that a call needs.
  [[nodiscard]] std::size_t bytes() const { return state_.list().run_bytes; }
  /// Returns how the calls are computed on max_threads threads.
  [[nodiscard]] const Explanation& explanation() const { return state_.explanation(); }

  /// Returns a call of the plan with tensors, a source, a scaling and a score. Throws std::invalid_argument if an
  /// extent, a length or a range of stored keys differs from the plan's, or if planned shared keys are not shared. It
  /// also throws if an output overlaps q or the source's memory, or if scaling, score or sinks do not fit. `sinks`
  /// replace those of the options, unless they are empty.
  template <class Source, class S, class C>
  requires std::same_as<std::remove_cvref_t<Source>, K> && Scaling<S> && Score<C>
  [[nodiscard]] auto bind(const DecodeArguments<T>& arguments, Source&& source, const S& scaling,
                          const C& score, Sinks sinks = {}) const {
    const AttentionOptions<T> options = detail::with_sinks(state_.options, sinks);
    check(arguments, source, options);
    const auto make_problem = [&](const K& keys) {
      const auto problem = detail::called_by("SourcePlan", options,
                                             detail::make_source_problem<M>(arguments.q, keys, options));
      detail::check_bound("SourcePlan::bind", problem, scaling, score);
      if (!has_layout(keys)) detail::check_shared_keys("SourcePlan::bind", state_.list(), problem);
      return problem;
    };
    using Kept = std::conditional_t<std::is_lvalue_reference_v<Source>, const K&, K>;
    return BoundCall<T, Kept, S, M, C>(state_, std::forward<Source>(source), scaling, score, make_problem,
                                       arguments, options);
  }
  /// The same without a score.
  template <class Source, class S>
  requires std::same_as<std::remove_cvref_t<Source>, K> && Scaling<S>
  [[nodiscard]] auto bind(const DecodeArguments<T>& arguments, Source&& source, const S& scaling,
                          Sinks sinks = {}) const {
    return bind(arguments, std::forward<Source>(source), scaling, Identity{}, sinks);
  }

 private:
  /// The properties of a sequence that a plan depends on.
  struct Sequence {
    index_t length;
    KeyRange stored, forgotten;
  };
  static Sequence sequence_of(const K& source, index_t b) {
    Sequence result{static_cast<index_t>(source.length(b)), source.stored(b), {}};
    if constexpr (detail::has_forgotten<K>) result.forgotten = source.forgotten(b);
    return result;
  }

  static std::uint64_t layout_of(const K& source) {
    if constexpr (detail::has_layout<K>) return source.layout();
    return 0;
  }
  /// Returns whether a source has the number of the plan's layout.
  bool has_layout(const K& source) const { return layout_ != 0 && layout_of(source) == layout_; }
  index_t batch() const { return state_.options.lengths.is_packed() ? 1 : source_shape_.batch; }

  void check(const DecodeArguments<T>& a, const K& source, const AttentionOptions<T>& options) const {
    const char* const function = "SourcePlan::bind";
    const index_t planned[] = {batch(), shape_.heads, shape_.queries, source_shape_.width};
    for (int i = 0; i < 4; ++i) detail::check_planned(function, "q", i, a.q.extent(i), planned[i]);
    const KeySourceShape shape = source.shape();
    detail::check_planned(function, "k", 0, shape.batch, source_shape_.batch);
    detail::check_planned(function, "k", 1, shape.kv_heads, source_shape_.kv_heads);
    detail::check_planned(function, "k", 3, shape.width, source_shape_.width);
    detail::check_planned(function, "v", 3, shape.value_width, source_shape_.value_width);
    for (index_t b = 0; b < shape.batch && !has_layout(source); ++b) {
      const Sequence own = sequence_of(source, b), of_plan = sequences_[static_cast<std::size_t>(b)];
      const auto same = [&](const char* what, index_t number, index_t of_plan_number) {
        if (number == of_plan_number) return;
        detail::fail_format("ssmax::%s: sequence %td of the source has %s %td, the plan has %td", function, b,
                            what, number, of_plan_number);
      };
      same("length", own.length, of_plan.length);
      same("stored keys from", own.stored.begin, of_plan.stored.begin);
      same("stored keys up to", own.stored.end, of_plan.stored.end);
      same("forgotten keys from", own.forgotten.begin, of_plan.forgotten.begin);
      same("forgotten keys up to", own.forgotten.end, of_plan.forgotten.end);
    }
    detail::check_source_tensors(function, a, source, options);
  }

  SourcePlanShape shape_;
  detail::PlanState<T, M> state_;
  KeySourceShape source_shape_;
  std::uint64_t layout_ = 0;
  std::vector<Sequence> sequences_;
};

SSMAX_END
/// @}
