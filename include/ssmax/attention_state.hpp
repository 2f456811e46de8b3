/// @defgroup attention_state States of attention (attention_state.hpp)
/// @ingroup online_softmax
/// States of attention over some of the keys. You merge them with states over the other keys. A state holds the shift
/// and the sum of the softmax and the output accumulator of every query.
///
/// attention (attention.hpp) with the argument `state` computes a state for a range of the keys. merge joins two
/// states. finish computes out and lse from a state. In FlashAttention's letters, shift, sum and o are m / ln 2, l and
/// o.
///
/// Shifts are integers, so merge rounds each sum once and is exact otherwise. The order of merging changes results by
/// half an ulp of the total per merge: |error| <= merges · ε/2 · Σ p |v|. Exception: the bf16 path has shifts that
/// are not integers, so the bound has 3/2 in place of 1/2. With SSMax, n is that of the whole row: the multiplier c
/// is applied before the state is formed.

/// @defgroup online_softmax Softmax in blocks (attention_state.hpp)
/// The state of a softmax whose logits arrive in blocks. Attention keeps such a state per query in place of a row of
/// N logits.
///
/// After any number of blocks, Σ exp(c·z) = 2^shift · sum over all keys so far. You keep an accumulator of Σ exp(c·z)
/// · v / 2^shift. A block with larger logits raises the shift. update then returns a power of two, by which you
/// multiply the accumulator. Shifts are integers if |c·z| < 7·10^5. Rescaling is then exact, and only the order of
/// additions depends on how you split the keys into blocks.
///
/// AttentionState has the states of whole tensors.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>
#include <span>
#include <type_traits>
#include <utility>

#include "detail/checks/sinks.hpp"
#include "detail/checks/views.hpp"
#include "detail/kernels/rows.hpp"
#include "detail/memory/conversion.hpp"
#include "detail/rows/row.hpp"
#include "detail/rows/state.hpp"
#include "storage.hpp"
#include "view.hpp"

/// @cond
SSMAX_BEGIN_SHARED

template <class Compute>
struct StatisticsOption;
template <class Compute>
struct StateOption;

SSMAX_END
/// @endcond

/// @addtogroup attention_state
/// @{
SSMAX_BEGIN_DATA

/// A state over some keys. For each query, Σ exp(c·z) = 2^shift·sum and Σ exp(c·z)·v = 2^shift·o. If no key is
/// visible to a query, its shift is -inf and its sum and o are 0.
///
/// Statistics are optional: you give all four or leave all out. With w = 2^(c·log2(e)·z - shift), the weight before the
/// division by the sum, distances is Σ w·(c·log2(e)·z - shift) and squares is Σ w². Without a visible key, they are 0,
/// largest is -inf and smallest is +inf. If sum is NaN, they are any numbers, and finish writes NaN.
template <class T>
struct AttentionState {
  View<T, 3> shift{},    ///< [batch, heads, queries].
      sum{};             ///< [batch, heads, queries].
  View<T, 4> o{};        ///< [batch, heads, queries, dv].
  View<T, 3> largest{},  ///< [batch, heads, queries]: max z, for RowStatistics.
      smallest{},        ///< [batch, heads, queries]: min z.
      distances{},       ///< [batch, heads, queries]: for the entropy.
      squares{};         ///< [batch, heads, queries]: for the sum of squares.

  /// Returns whether a statistic is given.
  [[nodiscard]] SSMAX_INLINE constexpr bool has_statistics() const {
    return largest.data_handle() != nullptr || smallest.data_handle() != nullptr ||
           distances.data_handle() != nullptr || squares.data_handle() != nullptr;
  }
  /// @cond
  SSMAX_INLINE constexpr operator shared::StateOption<T>() const {
    return {shift, sum, o, largest, smallest, distances, squares};
  }
  /// @endcond
};

/// Optional outputs of attention: statistics of each query over its visible keys, [batch, heads, queries]. z is a logit
/// before the multiplier c: scale·q·k, rotated, after the score function. p is a weight.
///
/// | member | value | no key is visible | a visible c·z is NaN or above the range |
/// |---|---|---|---|
/// | largest | max z | -inf | NaN |
/// | smallest | min z | +inf | NaN |
/// | sum_of_squares | Σ p²; 1 / Σ p² is an effective number of keys | 0 | NaN |
/// | entropy | -Σ p·ln p, in nats | 0 | NaN |
///
/// A sink is in the denominator of p, but a sink is no key: the sums over keys have no term of the sink. With a sink of
/// NaN, sum_of_squares and entropy are NaN. Dropout does not change the statistics.
///
/// Exception: a key whose c·log2(e)·z is -inf, from a score function or below the range, counts as masked.
///
/// Errors: ε is that of A. The path computes c·log2(e)·z. largest and smallest are exact bounds of these numbers,
/// divided by c·log2(e) and rounded. Without a rope, the difference from an exact z is at most
/// (d + 6)·ε·scale·Σ|q_t k_t|. The relative error of sum_of_squares is twice that of a weight (docs/numerics.md). On
/// the bf16 path weights are rounded to bfloat16.
///
/// QK-clip (Kimi K2, arXiv:2507.20534, section 2.1) reads `largest`.
template <class T>
struct RowStatistics {
  View<T, 3> largest{},  ///< max z.
      smallest{},        ///< min z.
      sum_of_squares{},  ///< Σ p².
      entropy{};         ///< -Σ p·ln p.

  /// Returns whether a statistic is given.
  [[nodiscard]] SSMAX_INLINE constexpr bool is_given() const {
    return largest.data_handle() != nullptr || smallest.data_handle() != nullptr ||
           sum_of_squares.data_handle() != nullptr || entropy.data_handle() != nullptr;
  }
  /// @cond
  SSMAX_INLINE constexpr operator shared::StatisticsOption<T>() const {
    return {largest, smallest, sum_of_squares, entropy};
  }
  /// @endcond
};

/// Optional results of reduce_heads, [heads]: statistics of each head over all its queries and batch entries.
///
/// | member | value | reads |
/// |---|---|---|
/// | largest | the largest `largest` | largest |
/// | entropy | the mean entropy of rows that count | entropy, sum_of_squares |
/// | effective_keys | the mean 1 / Σ p² of rows that count | sum_of_squares |
///
/// A row counts unless its Σ p² is 0: a row without visible keys, or with a sink of +inf, does not count. Without a row
/// that counts, both means are 0, and `largest` is -inf without a visible key. NaN in a row makes its head NaN.
template <class T>
struct HeadStatistics {
  View<T, 1> largest{},  ///< The maximum of max z.
      entropy{},         ///< The mean of -Σ p·ln p.
      effective_keys{};  ///< The mean of 1 / Σ p².
};

/// The gaps and the results of count_within_gaps (attention.hpp), T = float or double.
template <class T>
struct GapCounts {
  KeptSpan<const T> gaps{};  ///< Each at least 0. Infinity counts all visible keys.
  View<T, 3> largest{};      ///< [batch, heads, queries]: max z, as in RowStatistics.
  View<T, 4> counts{};  ///< [gaps, batch, heads, queries]: the number of visible keys with z >= max z - gap.
};

/// The results of attention over some keys, T = float, double, half or bfloat16.
template <class T>
struct AttentionResult {
  /// The type of lse: double for double, otherwise float.
  using Lse = std::conditional_t<std::is_const_v<T>, const ComputeType<T>, ComputeType<T>>;

  View<T, 4> out;    ///< [batch, heads, queries, dv].
  View<Lse, 3> lse;  ///< [batch, heads, queries]: ln Σ exp(c·z), or -inf if no key is visible.
};

SSMAX_END

SSMAX_BEGIN_CODE
namespace detail {

/// The names of the tensors of a state in error messages.
struct StateNames {
  const char *shift, *sum, *o, *largest, *smallest, *distances, *squares;
};
inline constexpr StateNames names_of_state{"state.shift",   "state.sum",      "state.o",
                                           "state.largest", "state.smallest", "state.distances",
                                           "state.squares"};

/// Calls f(name, view) for shift and sum of a state and, if one is given, for its statistics.
template <class T, class F>
void for_each_row_number(const StateNames& names, const AttentionState<T>& state, const F& f) {
  f(names.shift, state.shift);
  f(names.sum, state.sum);
  if (!state.has_statistics()) return;
  f(names.largest, state.largest);
  f(names.smallest, state.smallest);
  f(names.distances, state.distances);
  f(names.squares, state.squares);
}

template <class T>
void check_state(const char* function, const StateNames& names, const AttentionState<T>& state) {
  check_output(function, names.o, state.o);
  for_each_row_number(names, state, [&](const char* name, const View<T, 3>& view) {
    check_output(function, name, view);
    for (int i = 0; i < 3; ++i) check_extent(function, name, view, i, names.o, state.o, i);
  });
}

/// Throws if an output overlaps a tensor of a state. Exception: another tensor with the same name may be the output.
template <class T, int Rank>
void check_no_overlap_with_state(const char* function, const char* name, const View<T, Rank>& out,
                                 const StateNames& names, const AttentionState<T>& state) {
  check_no_overlap(function, name, out, names.o, state.o);
  for_each_row_number(names, state, [&](const char* other_name, const View<T, 3>& other) {
    if (name != other_name) check_no_overlap(function, name, out, other_name, other);
  });
}

/// Throws if the tensors of a state overlap.
template <class T>
void check_no_overlap_of_parts(const char* function, const StateNames& names,
                               const AttentionState<T>& state) {
  for_each_row_number(names, state, [&](const char* name, const View<T, 3>& view) {
    check_no_overlap_with_state(function, name, view, names, state);
  });
}

template <class T>
void check_merge(const AttentionState<T>& into, const AttentionState<T>& other) {
  const char* function = "merge";
  constexpr StateNames names{"into.shift",    "into.sum",       "into.o",      "into.largest",
                             "into.smallest", "into.distances", "into.squares"};
  constexpr StateNames other_names{"other.shift",    "other.sum",       "other.o",      "other.largest",
                                   "other.smallest", "other.distances", "other.squares"};
  check_state(function, names, into);
  check_state(function, other_names, other);
  check_same_extents(function, "other.o", other.o, "into.o", into.o);
  if (into.has_statistics() != other.has_statistics() && into.sum.size() > 0) {
    fail_format("ssmax::%s: %s has statistics, %s has not: give both or neither", function,
                into.has_statistics() ? "into" : "other", into.has_statistics() ? "other" : "into");
  }
  check_no_overlap_of_parts(function, names, into);
  check_no_overlap_with_state(function, names.o, into.o, other_names, other);
  for_each_row_number(names, into, [&](const char* name, const View<T, 3>& view) {
    check_no_overlap_with_state(function, name, view, other_names, other);
  });
}

/// Calls f(name, view) for the statistics that are given.
template <class T, class F>
void for_each_statistic(const RowStatistics<T>& statistics, const F& f) {
  const std::pair<const char*, const View<T, 3>*> all[] = {
      {"statistics.largest", &statistics.largest},
      {"statistics.smallest", &statistics.smallest},
      {"statistics.sum_of_squares", &statistics.sum_of_squares},
      {"statistics.entropy", &statistics.entropy}};
  for (const auto& [name, view] : all) {
    if (is_given(*view)) f(name, *view);
  }
}

template <class T>
AttentionState<T> addressable(AttentionState<T> state) {
  state.o = addressable(state.o);
  return state;
}

/// Returns the state of one query.
template <class T>
SoftmaxState<T> state_of(const AttentionState<T>& state, index_t batch, index_t head, index_t row) {
  return {&state.shift(batch, head, row), &state.sum(batch, head, row), row_of(state.o, batch, head, row)};
}

/// Returns the statistics in the state of one query. Bounds are those of z. Requires a state with statistics.
template <class T>
TileStatistics<T> statistics_of(const AttentionState<T>& state, index_t batch, index_t head, index_t row) {
  return {&state.largest(batch, head, row), &state.smallest(batch, head, row),
          &state.distances(batch, head, row), &state.squares(batch, head, row)};
}

/// Writes the statistics of one query, whose bounds are those of z. With p = g·w and g = Normalizer::factor:
///
///     Σ p² = g²·Σ w²    -Σ p·ln p = -g·ln 2·Σ w·(x - shift) - g·ln g·Σ w
template <class T>
void write_statistics(const RowStatistics<T>& to, const std::array<index_t, 3>& at, double g, T sum,
                      const TileStatistics<T>& of) {
  const auto write = [&](const View<T, 3>& view, double value) {
    if (view.data_handle() != nullptr) view(at[0], at[1], at[2]) = static_cast<T>(value);
  };
  double entropy = 0;
  if (g != 0) entropy = std::max(-g * (std::numbers::ln2 * *of.distances + std::log(g) * sum), 0.0);
  const bool is_nan = std::isnan(sum);
  write(to.largest, is_nan ? sum : *of.largest);
  write(to.smallest, is_nan ? sum : *of.smallest);
  write(to.sum_of_squares, g == 0 ? 0 : g * g * *of.squares);
  write(to.entropy, is_nan ? sum : entropy);
}

/// Merges without checks. Both states are addressable.
template <class T>
void merge_state(const AttentionState<T>& into, const AttentionState<T>& other) {
  const index_t dv = into.o.extent(3);
  for (index_t b = 0; b < into.o.extent(0); ++b) {
    for (index_t h = 0; h < into.o.extent(1); ++h) {
      for (index_t i = 0; i < into.o.extent(2); ++i) {
        if (into.has_statistics()) {
          merge_statistics(statistics_of(into, b, h, i), statistics_of(other, b, h, i), into.shift(b, h, i),
                           into.sum(b, h, i), other.shift(b, h, i), other.sum(b, h, i));
        }
        merge_row(state_of(into, b, h, i), state_of(other, b, h, i), dv);
      }
    }
  }
}

/// Throws unless `result` and one of the results that it is merged from fit.
template <class T>
void check_merged_result(const AttentionResult<T>& result, const char* out_name, const AnyView& out,
                         const char* lse_name, const AnyView& lse) {
  const char* function = "merge";
  check_view(function, out_name, out);
  check_view(function, lse_name, lse);
  check_same_extents(function, out_name, out, "result.out", result.out);
  check_same_extents(function, lse_name, lse, "result.lse", result.lse);
  check_no_overlap(function, "result.out", result.out, lse_name, lse);
  check_no_overlap(function, "result.lse", result.lse, out_name, out);
}

/// Writes factor·first + other_factor·second, computed in A. A factor of 0 makes its term 0. `out` may be `first`.
template <class T, class A>
void merge_results(const T* first, A factor, const T* second, A other_factor, index_t channels, T* out) {
  constexpr index_t block = 128;
  A scratch[block], other_scratch[block];
  const auto term = [](A by, A value) { return by == 0 ? A{0} : by * value; };
  for (index_t from = 0; from < channels; from += block) {
    const index_t count = std::min(block, channels - from);
    const A* in = widened(first + from, count, scratch);
    const A* other = widened(second + from, count, other_scratch);
    A* sums = staging(out + from, scratch);
    for (index_t c = 0; c < count; ++c) sums[c] = term(factor, in[c]) + term(other_factor, other[c]);
    narrow_to(out + from, count, sums);
  }
}

/// Throws unless a result of reduce_heads fits the statistic of rows that it is made of.
template <class T>
void check_reduced(const char* name, const View<T, 1>& heads, const char* rows_name, const View<T, 3>& rows) {
  const char* function = "reduce_heads";
  check_output(function, name, heads);
  check_view(function, rows_name, rows);
  check_extent(function, name, heads, 0, rows_name, rows, 1);
}

/// Returns the mean of f(batch, row) over the rows of a head whose Σ p² is not 0.
template <class T, class F>
T mean_of_rows(const View<T, 3>& sum_of_squares, index_t head, const F& f) {
  double sum = 0, count = 0;
  for (index_t b = 0; b < sum_of_squares.extent(0); ++b) {
    for (index_t i = 0; i < sum_of_squares.extent(2); ++i) {
      if (sum_of_squares(b, head, i) == 0) continue;
      sum += static_cast<double>(f(b, i));
      ++count;
    }
  }
  return static_cast<T>(count == 0 ? 0 : sum / count);
}

}  // namespace detail

/// Writes the statistics of each head that are given in `heads`. The table of HeadStatistics has the formulas. Means
/// are added in double and rounded once. A result must not overlap a view that the call reads, or another result.
/// Throws std::invalid_argument before anything is written. Does not allocate.
template <class T>
void reduce_heads(const RowStatistics<T>& rows, const std::type_identity_t<HeadStatistics<T>>& heads) {
  const char* function = "reduce_heads";
  const View<T, 3>& squares = rows.sum_of_squares;
  const bool has_largest = detail::is_given(heads.largest), has_entropy = detail::is_given(heads.entropy),
             has_keys = detail::is_given(heads.effective_keys);
  if (has_largest) detail::check_reduced("heads.largest", heads.largest, "rows.largest", rows.largest);
  if (has_entropy) {
    detail::check_reduced("heads.entropy", heads.entropy, "rows.entropy", rows.entropy);
    detail::check_reduced("heads.entropy", heads.entropy, "rows.sum_of_squares", squares);
    detail::check_same_extents(function, "rows.sum_of_squares", squares, "rows.entropy", rows.entropy);
  }
  if (has_keys)
    detail::check_reduced("heads.effective_keys", heads.effective_keys, "rows.sum_of_squares", squares);
  const auto check_no_overlap = [&](const char* name, const View<T, 1>& result) {
    if (has_largest) detail::check_no_overlap(function, name, result, "rows.largest", rows.largest);
    if (has_entropy) detail::check_no_overlap(function, name, result, "rows.entropy", rows.entropy);
    if (has_entropy || has_keys)
      detail::check_no_overlap(function, name, result, "rows.sum_of_squares", squares);
  };
  check_no_overlap("heads.largest", heads.largest);
  check_no_overlap("heads.entropy", heads.entropy);
  check_no_overlap("heads.effective_keys", heads.effective_keys);
  detail::check_no_overlap(function, "heads.largest", heads.largest, "heads.entropy", heads.entropy);
  detail::check_no_overlap(function, "heads.largest", heads.largest, "heads.effective_keys",
                           heads.effective_keys);
  detail::check_no_overlap(function, "heads.entropy", heads.entropy, "heads.effective_keys",
                           heads.effective_keys);
  for (index_t h = 0; has_largest && h < heads.largest.extent(0); ++h) {
    T top = -std::numeric_limits<T>::infinity();
    for (index_t b = 0; b < rows.largest.extent(0); ++b) {
      for (index_t i = 0; i < rows.largest.extent(2); ++i) {
        const T z = rows.largest(b, h, i);
        if (!(z <= top) && !std::isnan(top)) top = z;
      }
    }
    heads.largest(h) = top;
  }
  for (index_t h = 0; has_entropy && h < heads.entropy.extent(0); ++h)
    heads.entropy(h) =
        detail::mean_of_rows(squares, h, [&](index_t b, index_t i) { return rows.entropy(b, h, i); });
  for (index_t h = 0; has_keys && h < heads.effective_keys.extent(0); ++h)
    heads.effective_keys(h) = detail::mean_of_rows(
        squares, h, [&](index_t b, index_t i) { return 1 / static_cast<double>(squares(b, h, i)); });
}

/// Merges all of `others` into `into`, in their order. The result does not depend on the thread or the time at which
/// a state was computed. All states have the extents of `into`. A state with statistics merges only with states that
/// have them, too. Exception: states without rows merge in any case. `into` must not overlap the others. Throws
/// std::invalid_argument before anything is written. Does not allocate.
template <class T>
void merge(const AttentionState<T>& into, std::span<const std::type_identity_t<AttentionState<T>>> others) {
  for (const AttentionState<T>& other : others) detail::check_merge(into, other);
  for (const AttentionState<T>& other : others) {
    detail::merge_state(detail::addressable(into), detail::addressable(other));
  }
}

/// Merges `other` into `into`: the state over the keys of both. `into` must not overlap `other`.
template <class T>
void merge(const AttentionState<T>& into, const std::type_identity_t<AttentionState<T>>& other) {
  merge(into, std::span<const AttentionState<T>>(&other, 1));
}

/// Merges (out, lse) of attention over two sets of keys: the result over the keys of both.
///
///     lse = ln(exp(lse_1) + exp(lse_2)),  out = exp(lse_1 - lse)·out_1 + exp(lse_2 - lse)·out_2
///
/// A row of out whose lse is -inf counts as 0, also if it has NaN. If both lse are -inf, out is 0 and lse is -inf. An
/// lse of NaN or +inf makes out and lse of its query NaN. |error of out| <= (max(|lse_1|, |lse_2|) + 4) · ε · Σ p·|v|,
/// because lse is rounded. States have no such error. half and bfloat16 are computed in float, and the bound adds the
/// rounding of out to T. `result` may be `first`, and must not overlap otherwise. Sinks must be in one of both only.
/// Throws std::invalid_argument before anything is written. Does not allocate. You write T if you pass braces.
/// Source: arXiv:2501.01005 (FlashInfer).
template <detail::BuiltInStorage T>
void merge(const std::type_identity_t<AttentionResult<const T>>& first,
           const std::type_identity_t<AttentionResult<const T>>& second, const AttentionResult<T>& result) {
  const char* function = "merge";
  detail::check_output(function, "result.out", result.out);
  detail::check_output(function, "result.lse", result.lse);
  for (int i = 0; i < 3; ++i)
    detail::check_extent(function, "result.lse", result.lse, i, "result.out", result.out, i);
  detail::check_no_overlap(function, "result.lse", result.lse, "result.out", result.out);
  detail::check_merged_result(result, "first.out", first.out, "first.lse", first.lse);
  detail::check_merged_result(result, "second.out", second.out, "second.lse", second.lse);
  detail::check_in_place_or_no_overlap(function, "result.out", result.out, "first.out", first.out);
  detail::check_in_place_or_no_overlap(function, "result.lse", result.lse, "first.lse", first.lse);
  detail::check_no_overlap(function, "result.out", result.out, "second.out", second.out);
  detail::check_no_overlap(function, "result.lse", result.lse, "second.lse", second.lse);

  using A = typename AttentionResult<T>::Lse;
  const View<T, 4> to = detail::addressable(result.out);
  const View<const T, 4> from = detail::addressable(first.out), other = detail::addressable(second.out);
  constexpr double masked = -std::numeric_limits<double>::infinity();
  for (index_t b = 0; b < to.extent(0); ++b) {
    for (index_t h = 0; h < to.extent(1); ++h) {
      for (index_t i = 0; i < to.extent(2); ++i) {
        const auto lse_1 = static_cast<double>(first.lse(b, h, i));
        const auto lse_2 = static_cast<double>(second.lse(b, h, i));
        const double top = std::max(lse_1, lse_2);
        const double weight_1 = lse_1 == masked ? 0 : std::exp(lse_1 - top);
        const double weight_2 = lse_2 == masked ? 0 : std::exp(lse_2 - top);
        const double sum = weight_1 + weight_2;
        detail::merge_results(detail::row_of(from, b, h, i), static_cast<A>(sum == 0 ? 0 : weight_1 / sum),
                              detail::row_of(other, b, h, i), static_cast<A>(sum == 0 ? 0 : weight_2 / sum),
                              to.extent(3), detail::row_of(to, b, h, i));
        result.lse(b, h, i) = static_cast<A>(sum == 0 ? masked : top + std::log(sum));
      }
    }
  }
}

/// Writes out = o / sum and, unless lse is `View{}`, lse = ln Σ exp(c·z). With sinks, adds one sink per head to the
/// denominator. Writes the statistics that are given: they require a state with statistics, or without rows. `out` may
/// be exactly state.o. No other output may overlap the state, the sinks or another output. Throws std::invalid_argument
/// before anything is written.
template <class T>
void finish(const AttentionState<T>& state, std::type_identity_t<View<T, 4>> out,
            std::type_identity_t<View<T, 3>> lse = {}, std::span<const std::type_identity_t<T>> sinks = {},
            const std::type_identity_t<RowStatistics<T>>& statistics = {}) {
  const char* function = "finish";
  const detail::StateNames& names = detail::names_of_state;
  detail::check_state(function, names, state);
  detail::check_output(function, "out", out);
  detail::check_same_extents(function, "out", out, "state.o", state.o);
  detail::check_in_place_or_no_overlap(function, "out", out, "state.o", View<const T, 4>(state.o));
  detail::for_each_row_number(names, state, [&](const char* name, const View<T, 3>& view) {
    detail::check_no_overlap(function, "out", out, name, view);
  });
  const bool wants_lse = detail::is_given(lse);
  if (wants_lse) {
    detail::check_output(function, "lse", lse);
    detail::check_same_extents(function, "lse", lse, "state.sum", state.sum);
    detail::check_no_overlap(function, "lse", lse, "out", out);
    detail::check_no_overlap_with_state(function, "lse", lse, names, state);
  }
  detail::check_sinks(function, sinks, out, lse);
  detail::for_each_statistic(statistics, [&](const char* name, const View<T, 3>& view) {
    detail::check_output(function, name, view);
    detail::check_same_extents(function, name, view, "state.sum", state.sum);
    detail::check_no_overlap(function, name, view, "out", out);
    detail::check_no_overlap(function, name, view, "lse", lse);
    detail::check_no_overlap(function, name, view, "sinks", View<const T, 1>(sinks));
    detail::check_no_overlap_with_state(function, name, view, names, state);
    detail::for_each_statistic(statistics, [&](const char* other_name, const View<T, 3>& other) {
      if (name != other_name) detail::check_no_overlap(function, name, view, other_name, other);
    });
    if (!state.has_statistics() && view.size() > 0)
      detail::fail_value(function, name, "has rows", view.extent(2), "the state has no statistics: must be",
                         0);
  });
  const View<T, 4> from = detail::addressable(state.o), to = detail::addressable(out);
  for (index_t b = 0; b < out.extent(0); ++b) {
    for (index_t h = 0; h < out.extent(1); ++h) {
      for (index_t i = 0; i < out.extent(2); ++i) {
        const auto shift = static_cast<double>(state.shift(b, h, i)),
                   sum = static_cast<double>(state.sum(b, h, i));
        const detail::Normalizer normalizer =
            sinks.empty()
                ? detail::Normalizer(shift, sum)
                : detail::Normalizer(shift, sum, static_cast<double>(sinks[static_cast<std::size_t>(h)]));
        detail::kernels<detail::RowKernels<T>>().multiply(detail::row_of(from, b, h, i), to.extent(3),
                                                          static_cast<T>(normalizer.factor),
                                                          detail::row_of(to, b, h, i));
        if (wants_lse) lse(b, h, i) = static_cast<T>(normalizer.lse());
        if (state.has_statistics() && statistics.is_given()) {
          detail::write_statistics(statistics, {b, h, i}, normalizer.factor, state.sum(b, h, i),
                                   detail::statistics_of(state, b, h, i));
        }
      }
    }
  }
}

SSMAX_END
/// @}

/// @addtogroup online_softmax
/// @{
SSMAX_BEGIN_CODE

/// The state of one query, T = float or double.
template <class T>
class OnlineSoftmax {
 public:
  /// Makes a state without keys. c multiplies every logit of this query and may be 0 or negative.
  explicit OnlineSoftmax(double c = 1) : c_(c), multiplier_(c) {}

  /// Reads n logits and writes their weights to `out`, which may be `in`. Returns the factor for the accumulator:
  /// multiply the accumulator by the factor before you add the new terms. After NaN, c·z = +inf, or a c that is not
  /// finite, the state stays NaN. A c·z·log2 e beyond the range of double counts as +inf or -inf.
  double update(const T* in, index_t n, T* out) {
    const auto& kernels = detail::kernels<detail::RowKernels<T>>();
    constexpr T inf = std::numeric_limits<T>::infinity();
    const T* z = in;
    if (c_ < 0) {
      kernels.affine(in, n, T{0}, T{-1}, T{0}, out);
      z = out;
    }
    const detail::Extremum<T> top = kernels.max(z, n);
    const double largest = std::abs(c_) * static_cast<double>(top.value) * std::numbers::log2e;
    poisoned_ = poisoned_ || top.has_nan || !std::isfinite(c_) || top.value == inf ||
                (top.value != -inf && !(largest < std::numeric_limits<double>::infinity()));
    if (poisoned_ || !std::isfinite(largest)) {  // all weights are 0
      std::fill_n(out, n, T{0});
      return 1;
    }
    const bool exact = std::abs(largest) < detail::largest_shift<double>;
    const double block_shift = exact ? detail::round_shift(largest) : largest;
    const bool first = sum_ == 0;
    const double raised = first ? block_shift : std::max(shift_, block_shift);
    const double factor = first ? 1 : std::exp2(shift_ - raised);
    shift_ = raised;
    const T unit = std::abs(multiplier_.direction);
    const bool direct = exact && std::abs(raised) < detail::largest_shift<double>;
    if (!direct || unit != 1) {
      kernels.affine(z, n, direct ? T{0} : top.value, unit, T{0}, out);
      z = out;
    }
    detail::OverlappedWork<T> nothing{};
    T sum = kernels.exp_store(z, n, multiplier_.scale, direct ? static_cast<T>(raised) : T{0}, out, nothing);
    if (!direct && largest != raised) {
      const auto lowered = static_cast<T>(std::exp2(largest - raised));
      kernels.multiply(out, n, lowered, out);
      sum *= lowered;
    }
    sum_ = sum_ * factor + static_cast<double>(sum);
    return factor;
  }

  /// Returns the factor for the final accumulator: 1 / sum. Returns 0 if no key was visible, NaN after NaN.
  [[nodiscard]] double finish() const {
    if (poisoned_) return std::numeric_limits<double>::quiet_NaN();
    return sum_ > 0 ? 1 / sum_ : 0;
  }

  /// Returns ln Σ exp(c·z). Returns -inf if no key was visible, NaN after NaN.
  [[nodiscard]] double lse() const {
    if (poisoned_) return std::numeric_limits<double>::quiet_NaN();
    return shift_ * std::numbers::ln2 + std::log(sum_);
  }

  /// Returns the shift, with Σ exp(c·z) = 2^shift · sum. Returns -inf if no key was visible.
  [[nodiscard]] double shift() const { return sum_ == 0 ? -std::numeric_limits<double>::infinity() : shift_; }
  /// Returns the sum. Returns 0 if no key was visible, NaN after NaN.
  [[nodiscard]] double sum() const { return poisoned_ ? std::numeric_limits<double>::quiet_NaN() : sum_; }

  /// Returns to the state without keys.
  void reset() {
    shift_ = 0;
    sum_ = 0;
    poisoned_ = false;
  }

 private:
  double c_;
  detail::Multiplier<T> multiplier_;
  double shift_ = 0;
  double sum_ = 0;
  bool poisoned_ = false;
};

SSMAX_END
/// @}
