// Defines the masks for any set of keys: MatrixMask and Where. The public header is mask.hpp.
#pragma once

#include <concepts>
#include <limits>
#include <type_traits>
#include <utility>

#include "../../half.hpp"
#include "../../query.hpp"
#include "../../view.hpp"
#include "query_matrix.hpp"

/// @addtogroup mask_matrix
/// @{
SSMAX_BEGIN_DETAIL

/// Returns true if an element of a matrix shows its key: true, or not -inf. For 16-bit types, an integer comparison is
/// faster than a conversion.
template <class T>
SSMAX_INLINE constexpr bool shows(T x) {
  if constexpr (std::same_as<T, bool>) {
    return x;
  } else if constexpr (std::same_as<T, half> || std::same_as<T, bfloat16>) {
    return x.bits != T(-std::numeric_limits<float>::infinity()).bits;
  } else {
    return x != -std::numeric_limits<T>::infinity();
  }
}

SSMAX_END

SSMAX_BEGIN_DATA

/// A mask by a matrix. A key is visible if its element is true in a matrix of bool, or not -inf in an additive mask. A
/// finite number, however negative, does not mask a key. To add the finite numbers to the logits, use the score
/// function Bias. T is bool, float, double, half or bfloat16.
template <class T>
class MatrixMask {
 public:
  /// Stores the view. The matrix must outlive the mask.
  SSMAX_INLINE constexpr explicit MatrixMask(const View<const T, 4>& matrix,
                                             HeadsOfMatrix heads = HeadsOfMatrix::each)
      : matrix_(matrix, heads) {}
  /// Returns [0, keys).
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const { return {0, query.shape.keys}; }
  /// Returns true if the element of the key is true or not -inf.
  SSMAX_INLINE constexpr bool sees(const Query& query, index_t key) const {
    return detail::shows(matrix_(query, key));
  }
  /// Throws std::invalid_argument unless the matrix has the extents of the queries and keys.
  SSMAX_INLINE void check(const QueryShape& shape) const { matrix_.check("MatrixMask", "matrix", shape); }

 private:
  shared::QueryMatrix<const T> matrix_;
};

/// Deduces T from the element type of a view.
template <class T>
MatrixMask(View<T, 4>, HeadsOfMatrix = HeadsOfMatrix::each) -> MatrixMask<std::remove_const_t<T>>;

/// A mask by a function: a key is visible if f(query, key) is true. Several threads may call f, and more than once
/// for a pair.
template <class F>
requires std::predicate<const F&, const Query&, index_t>
class Where {
 public:
  /// Copies f, which takes `(const Query&, index_t key)` and returns a bool.
  SSMAX_INLINE constexpr explicit Where(F f) : f_(std::move(f)) {}
  /// Returns [0, keys).
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const { return {0, query.shape.keys}; }
  /// Returns f(query, key).
  SSMAX_INLINE constexpr bool sees(const Query& query, index_t key) const { return f_(query, key); }

 private:
  F f_;
};

SSMAX_END
/// @}
