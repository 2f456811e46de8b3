// Defines the scores that add a matrix: Bias and SlopedBias. The public header is score.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <limits>
#include <span>
#include <type_traits>

#include "../../fast_path.hpp"
#include "../../query.hpp"
#include "../../view.hpp"
#include "../checks/error.hpp"
#include "../checks/views.hpp"
#include "query_matrix.hpp"

/// @addtogroup score
/// @{
SSMAX_BEGIN_DATA

template <class T, class G>
class BiasGradient;

/// z' = z + bias[batch, head, query, key], such as an additive mask or a bias of relative positions. A dimension of
/// stride 0 is broadcast. With HeadsOfMatrix::modulo, head h reads bias[batch, h % extent, query, key]. The last stride
/// is 1 or 0. T is float, double, half or bfloat16.
template <class T>
class Bias {
 public:
  /// [batch, heads, queries, keys], which must outlive the score.
  SSMAX_INLINE constexpr explicit Bias(const View<const T, 4>& bias,
                                       HeadsOfMatrix heads = HeadsOfMatrix::each)
      : bias_(bias, heads) {}

  /// Returns z + bias.
  template <std::floating_point Z>
  SSMAX_INLINE constexpr Z operator()(Z z, const Key& key) const {
    return z + static_cast<Z>(bias_(key.query, key.index));
  }
  /// Returns 1.
  template <std::floating_point Z>
  SSMAX_INLINE constexpr Z derivative(Z, const Key&) const {
    return Z{1};
  }
  /// Returns the query's row of the bias, or null if the last stride is not 1.
  SSMAX_INLINE constexpr const T* row(const Query& query) const { return bias_.row(query); }
  /// Returns true if every element is 0 or -inf: then the mask MatrixMask(bias) gives the same weights without this
  /// score. Reads every element once, a dimension of stride 0 as one element.
  [[nodiscard]] bool is_mask() const {
    const View<const T, 4>& bias = bias_.view();
    const auto stored = [&](int i) {
      return std::min(bias.extent(i), bias.stride(i) == 0 ? 1 : bias.extent(i));
    };
    for (index_t b = 0; b < stored(0); ++b) {
      for (index_t h = 0; h < stored(1); ++h) {
        for (index_t q = 0; q < stored(2); ++q) {
          for (index_t k = 0; k < stored(3); ++k) {
            const auto x = static_cast<double>(bias(b, h, q, k));
            if (x != 0 && x != -std::numeric_limits<double>::infinity()) return false;
          }
        }
      }
    }
    return true;
  }
  /// Throws std::invalid_argument unless the bias has the extents of the queries and keys.
  SSMAX_INLINE void check(const QueryShape& shape) const { bias_.check("Bias", "bias", shape); }

  /// Returns the score for attention_backward, which adds ∂bias to dbias. dbias has the extents of the bias. G is
  /// float or double. A dimension of stride 0 is summed over: give dbias stride 0 where the bias is broadcast. Heads
  /// that read the same matrix add to the same matrix of dbias.
  template <class G>
  [[nodiscard]] SSMAX_INLINE constexpr BiasGradient<T, G> gradient(const View<G, 4>& dbias) const {
    return {*this, dbias};
  }

 protected:
  /// The bias.
  SSMAX_INLINE constexpr const shared::QueryMatrix<const T>& matrix() const { return bias_; }

 private:
  shared::QueryMatrix<const T> bias_;
};

/// Deduces T from a view.
template <class T>
Bias(View<T, 4>, HeadsOfMatrix = HeadsOfMatrix::each) -> Bias<std::remove_const_t<T>>;

/// Bias with its gradient: dbias[batch, head, query, key] += dz.
template <class T, class G>
class BiasGradient : public Bias<T> {
  static_assert(std::floating_point<G>, "ssmax::Bias::gradient: sums are float or double");

 public:
  /// `score.gradient(dbias)` is this.
  SSMAX_INLINE constexpr BiasGradient(const Bias<T>& score, const View<G, 4>& dbias)
      : Bias<T>(score), dbias_(dbias, this->matrix().heads()) {}

  /// Adds to the element of the query and key.
  SSMAX_INLINE void accumulate(const Key& key, double dz) const {
    dbias_(key.query, key.index) += static_cast<G>(dz);
  }
  /// Returns the query's row of dbias, or null if the last stride is not 1.
  SSMAX_INLINE constexpr G* gradient_row(const Query& query) const { return dbias_.row(query); }
  /// Returns which logits share an element of dbias: those along dimensions of stride 0, and those of heads that read
  /// the same matrix.
  SSMAX_INLINE Sharing sharing(const QueryShape& shape) const {
    const View<G, 4>& dbias = dbias_.view();
    const auto sums = [&](int i, index_t extent) { return extent > 1 && dbias.stride(i) == 0; };
    const bool heads = sums(0, shape.batch) || sums(1, shape.heads) || dbias.extent(1) < shape.heads;
    const bool queries = sums(2, shape.queries), keys = sums(3, shape.keys);
    if (keys && (queries || heads)) return Sharing::any;
    return heads ? Sharing::heads : Sharing::one_head;
  }
  /// Throws std::invalid_argument unless bias and dbias have the extents of the queries and keys and do not overlap.
  SSMAX_INLINE void check(const QueryShape& shape) const {
    Bias<T>::check(shape);
    dbias_.check("Bias", "dbias", shape);
    const View<G, 4>& dbias = dbias_.view();
    const View<const T, 4>& bias = this->matrix().view();
    detail::check_extent("Bias", "dbias", dbias, 1, "bias", bias, 1);
    // Without the dimensions that are summed over, dbias must satisfy the rules of an output.
    std::array<index_t, 4> extents{}, strides{};
    for (int i = 0; i < 4; ++i) {
      const auto at = static_cast<std::size_t>(i);
      strides[at] = dbias.stride(i);
      extents[at] = strides[at] == 0 ? std::min<index_t>(dbias.extent(i), 1) : dbias.extent(i);
    }
    const View<G, 4> sums(dbias.data_handle(), extents, strides);
    detail::check_output("Bias", "dbias", sums);
    detail::check_no_overlap("Bias", "dbias", sums, "bias", bias);
  }

 private:
  shared::QueryMatrix<G> dbias_;
};

/// Vectorized.
template <class T>
inline constexpr bool by_row<Bias<T>> = true;
/// Vectorized.
template <class T, class G>
inline constexpr bool by_row<BiasGradient<T, G>> = true;

/// z' = z + slope·matrix[batch, head, query, key], with one slope per head. ggml's `max_bias` computes the bias in this
/// way from its mask, with HeadsOfMatrix::modulo. A dimension of stride 0 is broadcast. The last stride is 1 or 0. T is
/// float, double, half or bfloat16.
///
/// Join the mask MatrixMask if the matrix has elements of -inf: 0·-inf is NaN, and a negative slope makes +inf of -inf.
template <class T>
class SlopedBias {
 public:
  /// Stores matrix [batch, heads, queries, keys] and the slopes, one per head. Both must outlive the score.
  SSMAX_INLINE constexpr SlopedBias(const View<const T, 4>& matrix, KeptSpan<const double> slopes,
                                    HeadsOfMatrix heads = HeadsOfMatrix::each)
      : matrix_(matrix, heads), slopes_(slopes) {}

  /// Returns the slope of a head.
  SSMAX_INLINE constexpr double slope(index_t head) const { return slopes_[static_cast<std::size_t>(head)]; }
  /// Returns z + slope·matrix.
  template <std::floating_point Z>
  SSMAX_INLINE constexpr Z operator()(Z z, const Key& key) const {
    return z + static_cast<Z>(slope(key.query.head)) * static_cast<Z>(matrix_(key.query, key.index));
  }
  /// Returns 1.
  template <std::floating_point Z>
  SSMAX_INLINE constexpr Z derivative(Z, const Key&) const {
    return Z{1};
  }
  /// Returns the query's row of the matrix, or null if the last stride is not 1.
  SSMAX_INLINE constexpr const T* row(const Query& query) const { return matrix_.row(query); }
  /// Throws std::invalid_argument unless the matrix has the extents of the queries and keys and there is one slope per
  /// head.
  SSMAX_INLINE void check(const QueryShape& shape) const {
    matrix_.check("SlopedBias", "matrix", shape);
    detail::check_equal("SlopedBias", "slopes", "have extent", std::ssize(slopes_), "heads are", shape.heads);
  }

 private:
  shared::QueryMatrix<const T> matrix_;
  std::span<const double> slopes_;
};

/// Deduces T from a view.
template <class T, class Slopes>
SlopedBias(View<T, 4>, Slopes&&, HeadsOfMatrix = HeadsOfMatrix::each) -> SlopedBias<std::remove_const_t<T>>;

/// Vectorized.
template <class T>
inline constexpr bool by_row<SlopedBias<T>> = true;

SSMAX_END

SSMAX_BEGIN_DETAIL

template <class T>
inline constexpr bool has_row_slope<SlopedBias<T>> = true;

SSMAX_END
/// @}
