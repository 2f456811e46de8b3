/// @defgroup score Scores (score.hpp)
/// Score functions replace a logit z by z' before the multiplier is applied: y = softmax(c·score(scale·q·k)).
///
/// | score | z' of query i and key j | derivative | source |
/// |---|---|---|---|
/// | Identity | z | 1 | |
/// | Softcap | cap·tanh(z / cap) | 1 / cosh²(z / cap) | Gemma 2, arXiv:2408.00118 |
/// | Alibi | z + slope_head·(position_j - position_i) | 1 | arXiv:2108.12409 |
/// | Alibi, absolute | z - slope_head·\|position_j - position_i\| | 1 | others' ALiBi, also for keys after the query |
/// | ScaleInvariant | a·z + 1 - a², a² = 1 + 2·ln(1 + t/τ), t the distance of i and j | a | arXiv:2505.17083 |
/// | Bias | z + bias[batch, head, i, j] | 1 | |
/// | SlopedBias | z + slope_head·matrix[batch, head, i, j] | 1 | ggml's `max_bias` |
/// | a \| b | b(a(z)) | b'(a(z))·a'(z) | |
///
/// The group `key` lists the members of a score function of your own.
///
/// A Bias of -inf gives a key the weight 0. All score functions keep a logit of -inf. The key still counts in n,
/// which comes from the mask, and NaN in the key or its value still reaches the result. Exception: with the mask
/// MatrixMask (mask.hpp), the key does not count and its NaN does not matter.

/// @defgroup key Keys, and scores of your own (score.hpp)
/// @ingroup score
/// The key that a score function is called with (query.hpp), and the members of a score function of your own.
///
/// A score function is a type with two const members:
///
///     score(z, key)                        returns z', the new logit
///     score.derivative(z, key)             returns dz'/dz at z
///
/// z is float or double. Make both members templates: otherwise their result is rounded. The library calls them for
/// visible keys only. Where z' is -inf, the result of `derivative` does not matter, NaN included. Optional member:
///
///     void check(const QueryShape&) const  called before any write; throws if the score does not fit
///
/// A score function with learnable parameters holds views of the gradients. If each query has one parameter θ,
/// such as the slope of its head (`Alibi{…}.gradient(…)`):
///
///     parameter_derivative(z, key) const           returns dz'/dθ at z
///     void accumulate(const Query&, double) const  receives ∂loss/∂θ of each query, one query after the other
///
/// If each logit has a gradient (`Bias(…).gradient(…)`):
///
///     void accumulate(const Key&, double) const    receives ∂loss/∂z' of each visible key
///     Sharing sharing(const QueryShape&) const     returns which logits share an element of the gradient (Sharing).
///                                                  Without it, the backward runs on one thread
///
/// A member of these names with another signature is a compile error.
///
/// The library calls the formula for each logit. Exception: a score whose type specialises by_lanes or by_row
/// (fast_path.hpp) is vectorized, as Softcap and Bias are.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <limits>
#include <span>
#include <vector>

#include "config.hpp"
#include "detail/checks/error.hpp"
#include "detail/kernels/scores.hpp"
#include "detail/matrices/scores.hpp"
#include "detail/members/score.hpp"
#include "fast_path.hpp"
#include "query.hpp"
#include "view.hpp"

/// @addtogroup key
/// @{
SSMAX_BEGIN_DATA

/// A type that replaces logits and returns the derivative: the top of score.hpp.
template <class C>
concept Score = detail::is_score<C>();

SSMAX_END
/// @}

/// @addtogroup score
/// @{
SSMAX_BEGIN_DETAIL

template <class S>
SSMAX_INLINE void check_score(const S& score, const QueryShape& shape) {
  if constexpr (has_score_check<S>) score.check(shape);
}

SSMAX_END

SSMAX_BEGIN_DATA

/// z' = z.
struct Identity {
  /// Returns z.
  template <std::floating_point T>
  SSMAX_INLINE constexpr T operator()(T z, const Key&) const {
    return z;
  }
  /// Returns 1.
  template <std::floating_point T>
  SSMAX_INLINE constexpr T derivative(T, const Key&) const {
    return T{1};
  }
};

/// z' = cap·tanh(z / cap): within ±cap, and close to z if |z| is far below cap. -inf stays -inf. A call throws
/// std::invalid_argument unless cap is above 0 and a normal float.
struct Softcap {
  double cap;  ///< Above 0, and a normal float.

  /// The cap.
  SSMAX_INLINE constexpr explicit Softcap(double limit) : cap(limit) {}
  /// Returns cap·tanh(z / cap).
  template <std::floating_point T>
  SSMAX_INLINE T operator()(T z, const Key&) const {
    const auto limit = static_cast<T>(cap);
    return z == -std::numeric_limits<T>::infinity() ? z : limit * std::tanh(z / limit);
  }
  /// Returns 1 / cosh²(z / cap); 0 at ±inf.
  template <std::floating_point T>
  SSMAX_INLINE T derivative(T z, const Key&) const {
    const T cosh = std::cosh(z / static_cast<T>(cap));
    return T{1} / (cosh * cosh);
  }
  /// Replaces the logits by z'.
  template <std::floating_point T>
  SSMAX_INLINE void apply(const Lanes<T>& lanes) const {
    detail::kernels<detail::ScoreKernels<T>>().softcap(lanes.z, lanes.count, static_cast<T>(cap), lanes.z);
  }
  /// Multiplies derivative by dz'/dz of logits that apply has capped.
  template <std::floating_point T>
  SSMAX_INLINE void differentiate(const Lanes<const T>& capped, T* derivative) const {
    detail::kernels<detail::ScoreKernels<T>>().softcap_slope(capped.z, capped.count, static_cast<T>(cap),
                                                             derivative);
  }
  /// Throws std::invalid_argument unless the cap is above 0 and a normal float.
  SSMAX_INLINE void check(const QueryShape&) const {
    using Float = std::numeric_limits<float>;
    if (!(cap >= static_cast<double>(Float::min()) && cap <= static_cast<double>(Float::max()))) {
      detail::fail_format("ssmax::Softcap: cap is %g, must be above 0 and finite", cap);
    }
  }
};

/// Vectorized.
template <>
inline constexpr bool by_lanes<Softcap> = true;

struct AlibiGradient;

namespace shared {
template <class Range>
struct slopes_are_double;
}  // namespace shared

/// The distance that Alibi multiplies by the slope.
enum class AlibiDistance {
  relative,  ///< key position - query position.
  absolute   ///< -|key position - query position|. For keys up to the query, both distances are equal.
};

/// z' = z + slope·distance, with one slope per head. The distance is key position - query position, or as
/// AlibiDistance says.
struct Alibi {
  std::span<const double> slopes_per_head;       ///< One number per head. Empty for the slopes of the paper.
  index_t heads = 0;                             ///< Number of heads, of the slopes of the paper.
  AlibiDistance kind = AlibiDistance::relative;  ///< The distance that the slope multiplies.

  /// Uses the slopes of the paper. Throws std::invalid_argument for a negative number of heads.
  SSMAX_INLINE constexpr explicit Alibi(index_t number_of_heads,
                                        AlibiDistance distance_kind = AlibiDistance::relative)
      : heads(number_of_heads), kind(distance_kind) {
    if (heads < 0) detail::fail_value("Alibi", "heads", "are", heads, "must be at least", 0);
  }
  /// Uses slopes of your own, which must outlive the score.
  SSMAX_INLINE constexpr explicit Alibi(KeptSpan<const double> slopes,
                                        AlibiDistance distance_kind = AlibiDistance::relative)
      : slopes_per_head(slopes), heads(std::ssize(slopes)), kind(distance_kind) {}
  /// @cond
  template <shared::RangeOf<const float> Range, class Mistake = shared::slopes_are_double<Range>>
  Alibi(Range&&) SSMAX_REFUSE("ssmax::Alibi: slopes are double");
  /// @endcond

  /// Returns the slopes of the paper. If heads is a power of two: 2^(-8·i/heads) for i from 1 to heads.
  /// Otherwise: the slopes of the next lower power of two, then every other slope of the next higher one.
  [[nodiscard]] SSMAX_INLINE static std::vector<double> slopes(index_t heads) {
    if (heads < 0) detail::fail_value("Alibi::slopes", "heads", "are", heads, "must be at least", 0);
    constexpr index_t most = std::numeric_limits<index_t>::max() / static_cast<index_t>(sizeof(double));
    if (heads > most) detail::fail_value("Alibi::slopes", "heads", "are", heads, "must be at most", most);
    std::vector<double> result;
    for (const Alibi paper(heads); std::ssize(result) < heads;)
      result.push_back(paper.slope(std::ssize(result)));
    return result;
  }

  /// Returns the slope of a head.
  SSMAX_INLINE constexpr double slope(index_t head) const {
    if (!slopes_per_head.empty()) return slopes_per_head[static_cast<std::size_t>(head)];
    const auto lower = static_cast<double>(std::bit_floor(static_cast<std::size_t>(heads)));
    const auto i = static_cast<double>(head);
    return std::exp2(-8.0 * (i < lower ? i + 1 : i - lower + 0.5) / lower);
  }
  /// Returns the distance, computed from key position - query position.
  SSMAX_INLINE constexpr index_t distance(index_t relative) const {
    return kind == AlibiDistance::absolute ? std::min(relative, -relative) : relative;
  }
  /// Returns z + slope·distance.
  template <std::floating_point T>
  SSMAX_INLINE constexpr T operator()(T z, const Key& key) const {
    return z + static_cast<T>(slope(key.query.head)) *
                   static_cast<T>(distance(key.key_position - key.query_position));
  }
  /// Returns 1.
  template <std::floating_point T>
  SSMAX_INLINE constexpr T derivative(T, const Key&) const {
    return T{1};
  }
  /// Throws std::invalid_argument unless there is one slope per head.
  SSMAX_INLINE void check(const QueryShape& shape) const {
    detail::check_equal("Alibi", "slopes", "have extent", heads, "heads are", shape.heads);
  }

  /// Returns the score for attention_backward, which adds ∂slopes to dslopes, one element per head.
  [[nodiscard]] SSMAX_INLINE constexpr AlibiGradient gradient(std::span<double> dslopes) const;
};

/// Alibi with the gradient of its slopes: dslopes[head] += Σ dz·distance.
struct AlibiGradient : Alibi {
  std::span<double> dslopes;  ///< One number per head, added to.

  /// `score.gradient(gradients)` is this.
  SSMAX_INLINE constexpr AlibiGradient(const Alibi& score, std::span<double> gradients)
      : Alibi(score), dslopes(gradients) {}

  /// Returns dz'/dslope = distance.
  template <std::floating_point T>
  SSMAX_INLINE constexpr T parameter_derivative(T, const Key& key) const {
    return static_cast<T>(distance(key.key_position - key.query_position));
  }
  /// Adds to the element of the query's head.
  SSMAX_INLINE void accumulate(const Query& query, double dslope) const {
    dslopes[static_cast<std::size_t>(query.head)] += dslope;
  }
  /// Throws std::invalid_argument unless there is one slope, and one gradient, per head.
  SSMAX_INLINE void check(const QueryShape& shape) const {
    Alibi::check(shape);
    detail::check_equal("Alibi", "dslopes", "have extent", std::ssize(dslopes), "heads are", shape.heads);
  }
};

/// @cond
SSMAX_INLINE constexpr AlibiGradient Alibi::gradient(std::span<double> dslopes) const {
  return {*this, dslopes};
}
/// @endcond

/// Applies A, then B: z' = b(a(z)).
template <Score A, Score B>
class Composed {
 public:
  /// `first | second` is this.
  SSMAX_INLINE constexpr Composed(const A& first, const B& second) : first_(first), second_(second) {}

  /// Returns b(a(z)).
  template <std::floating_point T>
  SSMAX_INLINE constexpr T operator()(T z, const Key& key) const {
    return static_cast<T>(second_(static_cast<T>(first_(z, key)), key));
  }
  /// Returns b'(a(z))·a'(z).
  template <std::floating_point T>
  SSMAX_INLINE constexpr T derivative(T z, const Key& key) const {
    const auto between = static_cast<T>(first_(z, key));
    return static_cast<T>(second_.derivative(between, key)) * static_cast<T>(first_.derivative(z, key));
  }
  /// Calls the checks of both.
  SSMAX_INLINE void check(const QueryShape& shape) const {
    detail::check_score(first_, shape);
    detail::check_score(second_, shape);
  }
  /// Returns the first score function.
  SSMAX_INLINE constexpr const A& first() const { return first_; }
  /// Returns the second score function.
  SSMAX_INLINE constexpr const B& second() const { return second_; }

 private:
  A first_;
  B second_;
};

namespace shared {

template <class C>
inline constexpr bool is_composed = false;
template <Score A, Score B>
inline constexpr bool is_composed<Composed<A, B>> = true;

}  // namespace shared

/// Returns the score that applies a, then b. For two score functions of your own outside of namespace ssmax, write
/// `Composed(a, b)`.
template <Score A, Score B>
[[nodiscard]] SSMAX_INLINE constexpr Composed<A, B> operator|(const A& a, const B& b) {
  return {a, b};
}

SSMAX_END

SSMAX_BEGIN_CODE

/// z' = a·z + 1 - a² with a² = 1 + 2·ln(1 + t/τ), t = |query position - key position|. With normally distributed
/// logits, each range of distances [t, 10·t] gets about the same weight at every length of the context.
///
/// A table of 24 bytes per position holds a for distances below `positions`. For larger distances a is computed
/// at each use. Make one score for all calls and heads, with the positions of the longest context. The class
/// holds tables, so its name carries the compile flags of the translation unit: units with different -m flags
/// each have their own class.
class ScaleInvariant {
 public:
  /// Makes the table. Throws std::invalid_argument unless τ is above 0 and finite and positions are at least 0. For
  /// distances far below τ, z' is close to z. 0 positions: no table.
  explicit ScaleInvariant(double tau = 10, index_t positions = 4096) : tau_(tau), positions_(positions) {
    if (!(tau > 0 && tau <= std::numeric_limits<double>::max())) {
      detail::fail_format("ssmax::ScaleInvariant: tau is %g, must be above 0 and finite", tau);
    }
    if (positions < 0)
      detail::fail_value("ScaleInvariant", "positions", "are", positions, "must be at least", 0);
    constexpr index_t most = std::numeric_limits<index_t>::max() / static_cast<index_t>(4 * sizeof(double));
    if (positions > most)
      detail::fail_value("ScaleInvariant", "positions", "are", positions, "must be at most", most);
    for (index_t t = 1 - positions; t < positions; ++t) {
      wide_.push_back(formula(t));
      narrow_.push_back(static_cast<float>(wide_.back()));
    }
  }

  /// Returns a of the distances [from, from + count). Exception: if the table lacks one of them, writes a to
  /// scratch[count] and returns scratch.
  template <std::floating_point T>
  SSMAX_INLINE const T* factors(index_t from, index_t count, T* scratch) const {
    if (from > -positions_ && from <= positions_ - count) return table<T>() + (from + positions_ - 1);
    for (index_t i = 0; i < count; ++i) scratch[i] = static_cast<T>(formula(from + i));
    return scratch;
  }
  /// Returns a·z + 1 - a².
  template <std::floating_point T>
  SSMAX_INLINE T operator()(T z, const Key& key) const {
    const T a = factor<T>(key);
    return a * (z - a) + T{1};
  }
  /// Returns a.
  template <std::floating_point T>
  SSMAX_INLINE T derivative(T, const Key& key) const {
    return factor<T>(key);
  }

 private:
  SSMAX_INLINE double formula(index_t distance) const {
    return std::sqrt(1 + 2 * std::log1p(std::abs(static_cast<double>(distance)) / tau_));
  }
  template <class T>
  SSMAX_INLINE const T* table() const {
    if constexpr (std::same_as<T, float>) {
      return narrow_.data();
    } else {
      return wide_.data();
    }
  }
  template <class T>
  SSMAX_INLINE T factor(const Key& key) const {
    T scratch;
    return *factors(key.key_position - key.query_position, 1, &scratch);
  }

  double tau_;
  index_t positions_;
  std::vector<float> narrow_;  // a of distances 1 - positions to positions - 1
  std::vector<double> wide_;
};

SSMAX_END

SSMAX_BEGIN_DETAIL

template <>
inline constexpr bool has_slope_kernel<Alibi> = true;
template <>
inline constexpr bool has_slope_kernel<AlibiGradient> = true;
template <>
inline constexpr bool has_factor_kernel<ScaleInvariant> = true;

SSMAX_END
/// @}
