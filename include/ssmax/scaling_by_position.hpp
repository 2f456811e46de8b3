/// @defgroup scaling_by_position Scalings by position (scaling_by_position.hpp)
/// @ingroup scaling
/// Scalings of published models that depend on the query's own position p, counted from 0. They do not depend on n.
/// row.hpp defines p.
///
/// For packed documents, the models' code in Hugging Face differs. Ministral 3 counts within the document
/// (`position_ids`). With the mask Documents, these scalings also count within the document. Llama 4 and Inkling
/// count through the documents. For their p, join masks that do not define positions, such as Causal and a MatrixMask
/// of the documents.
#pragma once

#include <cmath>

#include "config.hpp"
#include "detail/checks/error.hpp"
#include "row.hpp"

/// @addtogroup scaling_by_position
/// @{
SSMAX_BEGIN_DATA

/// The scaling c = max(1, ln(p+1) / ln L) of Qwen. L is the trained length, at least 2.
struct QwenLogN : RowFunctor<QwenLogN> {
  index_t trained_length;  ///< L, the trained length.

  /// Sets L.
  SSMAX_INLINE constexpr explicit QwenLogN(index_t length) : trained_length(length) {}
  using RowFunctor::operator();
  /// Returns max(1, ln(p+1) / ln L).
  SSMAX_INLINE double operator()(const Row& row) const {
    const auto seen = static_cast<double>(row.position + 1);
    return row.position < trained_length ? 1.0
                                         : std::log(seen) / std::log(static_cast<double>(trained_length));
  }
  /// Throws std::invalid_argument if L is below 2.
  SSMAX_INLINE void check(index_t, index_t, const char* function = "QwenLogN") const {
    detail::check_at_least(function, "trained_length", trained_length, 2);
  }
};

/// The scaling c = 1 + a·ln(1 + floor((p+1)/F)) of Llama 4.
struct Llama4Temperature : RowFunctor<Llama4Temperature> {
  double scale;          ///< a.
  index_t floor_length;  ///< F.

  /// Sets a and F.
  SSMAX_INLINE constexpr explicit Llama4Temperature(double a = 0.1, index_t f = 8192)
      : scale(a), floor_length(f) {}
  using RowFunctor::operator();
  /// Returns 1 + a·ln(1 + floor((p+1)/F)).
  SSMAX_INLINE double operator()(const Row& row) const {
    return 1.0 + scale * std::log1p(static_cast<double>((row.position + 1) / floor_length));
  }
  /// Throws std::invalid_argument if F is below 1.
  SSMAX_INLINE void check(index_t, index_t, const char* function = "Llama4Temperature") const {
    detail::check_at_least(function, "floor_length", floor_length, 1);
  }
};

/// The scaling c = 1 + β·ln(1 + floor(p/L)) of Ministral 3.
struct MinistralTemperature : RowFunctor<MinistralTemperature> {
  double scale;            ///< β.
  index_t trained_length;  ///< L.

  /// Sets β and L.
  SSMAX_INLINE constexpr explicit MinistralTemperature(double beta = 0.1, index_t length = 16384)
      : scale(beta), trained_length(length) {}
  using RowFunctor::operator();
  /// Returns 1 + β·ln(1 + floor(p/L)).
  SSMAX_INLINE double operator()(const Row& row) const {
    return 1.0 + scale * std::log1p(static_cast<double>(row.position / trained_length));
  }
  /// Throws std::invalid_argument if L is below 1.
  SSMAX_INLINE void check(index_t, index_t, const char* function = "MinistralTemperature") const {
    detail::check_at_least(function, "trained_length", trained_length, 1);
  }
};

/// The scaling c = 1 + α·ln max(1, (p+1)/F) of Inkling. Inkling also multiplies its position bias by c. To do so,
/// pass the bias as the score function `Bias(bias)`: a scaling multiplies the result of the score function.
struct InklingTemperature : RowFunctor<InklingTemperature> {
  double alpha;          ///< α.
  index_t floor_length;  ///< F.

  /// Sets α and F.
  SSMAX_INLINE constexpr explicit InklingTemperature(double a = 0.1, index_t f = 128'000)
      : alpha(a), floor_length(f) {}
  using RowFunctor::operator();
  /// Returns 1 + α·ln max(1, (p+1)/F).
  SSMAX_INLINE double operator()(const Row& row) const {
    const double ratio = static_cast<double>(row.position + 1) / static_cast<double>(floor_length);
    return ratio > 1 ? 1.0 + alpha * std::log(ratio) : 1.0;
  }
  /// Throws std::invalid_argument if F is below 1.
  SSMAX_INLINE void check(index_t, index_t, const char* function = "InklingTemperature") const {
    detail::check_at_least(function, "floor_length", floor_length, 1);
  }
};

SSMAX_END
/// @}
