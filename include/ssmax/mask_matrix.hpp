/// @defgroup mask_matrix Masks that show any set of keys (mask_matrix.hpp)
/// @ingroup mask
/// Masks that show any set of keys: MaskMatrix and Finite look it up, `Where` computes it.
///
/// n is then counted key by key, which costs as much as looking. Where most keys are hidden, join a mask that
/// cuts the range first: `Causal{} & Where(f)` asks f of the keys up to the query only.
///
/// Matrices are [batch, heads, queries, keys]. One that is the same for all heads, say, is a view of as many
/// heads with stride 0; the last stride is 1 or 0.
#pragma once

#include <concepts>
#include <limits>
#include <type_traits>
#include <utility>

#include "config.hpp"
#include "detail/checks/matrix.hpp"
#include "half.hpp"
#include "query.hpp"
#include "view.hpp"

/// @addtogroup mask_matrix
/// @{
SSMAX_BEGIN_DETAIL

/// Returns whether x is -inf. Comparing the bits of 16-bit numbers is faster than widening them.
template <class T>
SSMAX_INLINE constexpr bool is_minus_infinity(T x) {
  if constexpr (std::same_as<T, half> || std::same_as<T, bfloat16>) {
    return x.bits == T(-std::numeric_limits<float>::infinity()).bits;
  } else {
    return x == -std::numeric_limits<T>::infinity();
  }
}

SSMAX_END

SSMAX_BEGIN_DATA

/// The keys where the matrix is true.
struct MaskMatrix {
  View<const bool, 4> visible;  ///< [batch, heads, queries, keys].

  /// The matrix must outlive the mask.
  SSMAX_INLINE constexpr explicit MaskMatrix(const View<const bool, 4>& matrix) : visible(matrix) {}
  /// [0, keys): every key is asked for.
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const { return {0, query.shape.keys}; }
  /// Whether the matrix is true there.
  SSMAX_INLINE constexpr bool sees(const Query& query, index_t key) const {
    return visible(query.batch, query.head, query.index, key);
  }
  /// Throws std::invalid_argument unless the matrix has the extents of the queries and keys.
  SSMAX_INLINE void check(const QueryShape& shape) const {
    detail::check_matrix("MaskMatrix", "visible", visible, shape);
  }
};

/// The keys where an additive mask is not -inf. A very negative number that is finite hides nothing. What the
/// mask adds elsewhere is the affair of the score Bias.
template <class T>
class Finite {
 public:
  /// The matrix must outlive the mask. T is float, double, half or bfloat16.
  SSMAX_INLINE constexpr explicit Finite(const View<const T, 4>& values) : values_(values) {}
  /// [0, keys): every key is asked for.
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const { return {0, query.shape.keys}; }
  /// Whether the mask is not -inf there.
  SSMAX_INLINE constexpr bool sees(const Query& query, index_t key) const {
    return !detail::is_minus_infinity(values_(query.batch, query.head, query.index, key));
  }
  /// Throws std::invalid_argument unless the matrix has the extents of the queries and keys.
  SSMAX_INLINE void check(const QueryShape& shape) const {
    detail::check_matrix("Finite", "values", values_, shape);
  }

 private:
  View<const T, 4> values_;
};

/// Of a view: T is its type of elements.
template <class T>
Finite(View<T, 4>) -> Finite<std::remove_const_t<T>>;

/// The keys for which f(query, key) is true. f may be called more than once for a pair, and by several
/// threads.
template <class F>
requires std::predicate<const F&, const Query&, index_t>
class Where {
 public:
  /// f takes `(const Query&, index_t key)` and returns a bool; it is copied.
  SSMAX_INLINE constexpr explicit Where(F f) : f_(std::move(f)) {}
  /// [0, keys): every key is asked for.
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const { return {0, query.shape.keys}; }
  /// f(query, key).
  SSMAX_INLINE constexpr bool sees(const Query& query, index_t key) const { return f_(query, key); }

 private:
  F f_;
};

SSMAX_END
/// @}
