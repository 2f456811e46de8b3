/// @defgroup scaling_of_queries Scalings by position and by query (scaling_of_queries.hpp)
/// @ingroup scaling
/// Scalings that differ from query to query, of published models and of your own numbers.
///
/// The scalings of published models depend on the query's own position p, counted from 0. They do not depend on n.
/// row.hpp defines p. PerQuery has a multiplier for each query, which you compute outside of the attention, and its
/// gradient.
///
/// For packed documents, the models' code in Hugging Face differs. Ministral 3 counts within the document
/// (`position_ids`). With the mask Documents, these scalings also count within the document. Llama 4 and Inkling
/// count through the documents. For their p, join masks that do not define positions, such as Causal and a MatrixMask
/// of the documents.
#pragma once

#include <cmath>
#include <concepts>
#include <type_traits>

#include "config.hpp"
#include "detail/checks/error.hpp"
#include "detail/checks/views.hpp"
#include "query.hpp"
#include "row.hpp"
#include "view.hpp"

SSMAX_BEGIN_DETAIL

/// Throws unless `values` is [batch, heads, queries]. Any strides.
inline void check_per_query(const char* function, const char* name, const AnyView& values,
                            const QueryShape& shape) {
  const index_t extents[] = {shape.batch, shape.heads, shape.queries};
  check_fits_attention(function, name, values, extents);
}

SSMAX_END

/// @addtogroup scaling_of_queries
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

template <class T, class G>
class PerQueryGradient;

/// The scaling c = c[batch, head, query], for example a query-aware scale. T is float, double, half or bfloat16. Any
/// strides; stride 0 broadcasts. Query 0 is the first query of the call: over a cache, the first new query. Over MPI,
/// every rank passes the multipliers of the whole sequence. For rows of rank 2, the multipliers are [1, 1, rows].
template <class T>
class PerQuery {
 public:
  /// Stores the view [batch, heads, queries]. The multipliers must outlive the scaling.
  SSMAX_INLINE constexpr explicit PerQuery(const View<const T, 3>& multipliers) : c_(multipliers) {}

  /// Returns c[batch, head, query].
  SSMAX_INLINE constexpr double operator()(const PlacedRow& row) const {
    return static_cast<double>(c_(row.batch, row.head, row.query));
  }
  /// Throws std::invalid_argument unless c has the extents of the queries.
  SSMAX_INLINE void check_shape(const QueryShape& shape, const char* function = "PerQuery") const {
    detail::check_per_query(function, "c", c_, shape);
  }

  /// Returns this scaling for a backward call, which adds to dc. dc has the extents of c and is float or double. If c
  /// is broadcast along a dimension, give dc stride 0 there: the gradient is then summed over the dimension.
  template <class G>
  [[nodiscard]] SSMAX_INLINE constexpr PerQueryGradient<T, G> gradient(const View<G, 3>& dc) const {
    return {*this, dc};
  }

 private:
  template <class, class>
  friend class PerQueryGradient;

  View<const T, 3> c_;
};

/// Deduces T from the element type of a view.
template <class T>
PerQuery(View<T, 3>) -> PerQuery<std::remove_const_t<T>>;

/// PerQuery with a gradient. A backward call adds to it: dc[batch, head, query] += ∂loss/∂c of the query.
template <class T, class G>
class PerQueryGradient : public PerQuery<T> {
  static_assert(std::floating_point<G>, "ssmax::PerQuery::gradient: sums are float or double");

 public:
  /// Stores the scaling and the view. `scaling.gradient(dc)` calls this constructor.
  SSMAX_INLINE constexpr PerQueryGradient(const PerQuery<T>& scaling, const View<G, 3>& dc)
      : PerQuery<T>(scaling), dc_(dc) {}

  /// Adds ∂loss/∂c to the element of the query.
  SSMAX_INLINE void accumulate(const PlacedRow& row, double dc) const {
    dc_(row.batch, row.head, row.query) += static_cast<G>(dc);
  }
  /// Throws std::invalid_argument unless c and dc have the extents of the queries and do not overlap.
  SSMAX_INLINE void check_shape(const QueryShape& shape, const char* function = "PerQuery") const {
    PerQuery<T>::check_shape(shape, function);
    detail::check_per_query(function, "dc", dc_, shape);
    detail::check_no_overlap(function, "dc", dc_, "c", this->c_);
  }

 private:
  View<G, 3> dc_;
};

SSMAX_END
/// @}
