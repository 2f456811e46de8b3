/// @defgroup scaling_per_query A multiplier for each query (scaling_per_query.hpp)
/// @ingroup scaling
/// A multiplier for each query, formed outside of the attention, and its gradient.
#pragma once

#include <array>
#include <concepts>
#include <type_traits>

#include "config.hpp"
#include "detail/checks/error.hpp"
#include "detail/checks/views.hpp"
#include "query.hpp"
#include "row.hpp"
#include "view.hpp"

SSMAX_BEGIN_DETAIL

/// [batch, heads, queries], with any strides.
template <class T>
void check_per_query(const char* function, const char* name, const View<T, 3>& values,
                     const QueryShape& shape) {
  const std::array<index_t, 3> expected{shape.batch, shape.heads, shape.queries};
  for (int i = 0; i < 3; ++i) {
    const index_t extent = expected[static_cast<std::size_t>(i)];
    if (values.extent(i) != extent) {
      fail_extent(function, name, i, values.extent(i), "the attention", extent);
    }
  }
  if (values.empty()) return;
  if (values.data_handle() == nullptr) {
    fail_value(function, name, "is null but has size", values.size(), "must be", 0);
  }
  check_reach(function, name, values);
}

SSMAX_END

/// @addtogroup scaling_per_query
/// @{
SSMAX_BEGIN_DATA

template <class T, class G>
class PerQueryGradient;

/// c = c[batch, head, query], formed outside of the attention: what a query-aware scale gives. T is float,
/// double, half or bfloat16. Strides are free, and stride 0 broadcasts. Queries are counted in the call: in
/// decode the first new query is 0; over MPI they are those of the whole sequence, on every rank. Rows of rank 2
/// are the queries of one head, [1, 1, rows].
template <class T>
class PerQuery {
 public:
  /// [batch, heads, queries], which must outlive the scaling.
  SSMAX_INLINE constexpr explicit PerQuery(const View<const T, 3>& multipliers) : c_(multipliers) {}

  /// c[batch, head, query].
  SSMAX_INLINE constexpr double operator()(const PlacedRow& row) const {
    return static_cast<double>(c_(row.batch, row.head, row.query));
  }
  /// Throws std::invalid_argument unless c has the extents of the queries.
  SSMAX_INLINE void check_shape(const QueryShape& shape, const char* function = "PerQuery") const {
    detail::check_per_query(function, "c", c_, shape);
  }

  /// For backward: adds to dc, of c's extents, float or double. A dimension of stride 0 is summed over, as it
  /// must be where c is broadcast along it.
  template <class G>
  [[nodiscard]] SSMAX_INLINE constexpr PerQueryGradient<T, G> gradient(const View<G, 3>& dc) const {
    return {*this, dc};
  }

 private:
  template <class, class>
  friend class PerQueryGradient;

  View<const T, 3> c_;
};

/// Of a view: T is its type of elements.
template <class T>
PerQuery(View<T, 3>) -> PerQuery<std::remove_const_t<T>>;

/// PerQuery with somewhere to put ∂c: dc[batch, head, query] += ∂loss/∂c of that query.
template <class T, class G>
class PerQueryGradient : public PerQuery<T> {
  static_assert(std::floating_point<G>, "ssmax::PerQuery::gradient: sums are float or double");

 public:
  /// `scaling.gradient(dc)` is this.
  SSMAX_INLINE constexpr PerQueryGradient(const PerQuery<T>& scaling, const View<G, 3>& dc)
      : PerQuery<T>(scaling), dc_(dc) {}

  /// Adds to the element of the query.
  SSMAX_INLINE void accumulate(const PlacedRow& row, double dc) const {
    dc_(row.batch, row.head, row.query) += static_cast<G>(dc);
  }
  /// Throws std::invalid_argument unless c and dc have the extents of the queries, and lie apart.
  SSMAX_INLINE void check_shape(const QueryShape& shape, const char* function = "PerQuery") const {
    PerQuery<T>::check_shape(shape, function);
    detail::check_per_query(function, "dc", dc_, shape);
    detail::check_apart(function, "dc", dc_, "c", this->c_);
  }

 private:
  View<G, 3> dc_;
};

SSMAX_END
/// @}
