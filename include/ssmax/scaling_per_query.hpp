/// @defgroup scaling_per_query A multiplier for each query (scaling_per_query.hpp)
/// @ingroup scaling
/// A scaling with a multiplier for each query, which you compute outside of the attention, and its gradient.
#pragma once

#include <concepts>
#include <type_traits>

#include "config.hpp"
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

/// @addtogroup scaling_per_query
/// @{
SSMAX_BEGIN_DATA

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
