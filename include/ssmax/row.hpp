/// @defgroup row Rows, and scalings of your own (row.hpp)
/// @ingroup scaling
/// The argument of a scaling, and the members of a scaling of your own. scaling.hpp has the library's scalings.
///
/// A scaling is a callable that takes a Row and returns a number, such as a lambda. The number is the multiplier
/// c of the row's logits, y = softmax(c·z). c may be negative or zero. Optional members:
///
///     void check(index_t heads, index_t largest_n) const  called before any write; throws on bad sizes
///     void check_shape(const QueryShape&) const           the same, for scalings with a number per query
///     void accumulate(const Row&, double dc) const        adds dc·∂c/∂parameter to the caller's arrays: the scaling is
///                                                         learnable
///
/// A scaling that depends on the query of the call takes a PlacedRow in place of the Row.
///
/// **The position of a row** is the query's own position in the sequence, from 0. The mask's keys do not change it:
///
/// | call | position of query i |
/// |---|---|
/// | attention, rows of a matrix | i + keys - queries: the last query stands at the last key |
/// | attention over a source of keys | the same with the keys that the query's sequence has stored so far |
/// | a mask with `query_position` | what the mask returns: Documents counts from the document's first key |
/// | a query before the first key | 0 |
///
/// The option `key_position` changes the rope's positions only. n is the number of visible keys.
///
/// A scaling must return the same number for the same row: the library may call it any number of times per query. If
/// the scaling's type specialises by_size (fast_path.hpp), the library may call it once for all queries that see the
/// same keys.
///
/// check and check_shape may take one more argument, `const char* function` with a default. The library passes
/// the name of the called function, such as "attention", for error messages.
///
/// A member of these names with another signature, or an operator() that is not const, is a compile error.
///
/// RowFunctor makes a scaling callable on data.
#pragma once

#include <algorithm>
#include <concepts>
#include <type_traits>
#include <utility>

#include "config.hpp"
#include "detail/members/optional_member.hpp"
#include "fast_path.hpp"
#include "query.hpp"

/// @addtogroup row
/// @{
SSMAX_BEGIN_DATA

/// The argument of a scaling. The top of row.hpp defines the position.
struct Row {
  index_t head = 0;      ///< From 0.
  index_t position = 0;  ///< The query's own position in the sequence, at least 0.
  index_t n = 0;         ///< The number of visible keys, at least 1.

  /// Compares all three numbers.
  SSMAX_INLINE constexpr bool operator==(const Row&) const = default;
};

/// A Row with the place of its query in the call.
struct PlacedRow : Row {
  index_t batch = 0;  ///< The query's batch entry, from 0.
  index_t query =
      0;  ///< The query's index in the call, from 0. If q holds a part of the queries: among all of them.

  /// Compares all five numbers.
  SSMAX_INLINE constexpr bool operator==(const PlacedRow&) const = default;
};

/// The dimension of a matrix that a functor normalizes over.
enum class Axis {
  rows,    ///< Each row: the last dimension.
  columns  ///< Each column.
};

SSMAX_END

SSMAX_BEGIN_DETAIL

SSMAX_OPTIONAL_MEMBER(has_scaling_check, "scaling", check, std::same_as<void>,
                      "void check(index_t heads, index_t largest_n) const", index_t{}, index_t{})
SSMAX_OPTIONAL_MEMBER(has_scaling_shape_check, "scaling", check_shape, std::same_as<void>,
                      "void check_shape(const QueryShape&) const", std::declval<const QueryShape&>())
SSMAX_OPTIONAL_MEMBER(has_multiplier_gradient, "scaling", accumulate, std::same_as<void>,
                      "void accumulate(const Row&, double dc) const", std::declval<const PlacedRow&>(),
                      double{})

template <class S>
consteval bool find_reads_query() {
  constexpr bool takes_row = requires(const S& scaling, const Row& row) { scaling(row); };
  constexpr bool takes_gradient_of_row = requires(const S& scaling, const Row& row) {
    scaling.accumulate(row, 0.0);
  };
  return !takes_row || (has_multiplier_gradient<S> && !takes_gradient_of_row);
}

/// True if the scaling takes a PlacedRow.
template <class S>
constexpr bool reads_query = find_reads_query<S>();

/// True if all queries of a head that see the same keys have the same multiplier.
template <class S>
constexpr bool depends_on_size_only = by_size<S> && !reads_query<S>;

/// Returns the position in the Row of a query.
template <class M>
SSMAX_INLINE constexpr index_t row_position(const M& mask, const Query& query) {
  return std::max<index_t>(0, query_position(mask, query));
}

template <class S>
consteval bool is_scaling() {
  constexpr bool fits = requires(const S& scaling, const PlacedRow& row) {
    { scaling(row) } -> std::convertible_to<double>;
  };
  constexpr bool nearly_fits = requires(S & scaling, const PlacedRow& row) {
    { scaling(row) } -> std::convertible_to<double>;
  };
  static_assert(fits || !nearly_fits, "ssmax: the operator()(const Row&) of a scaling must be const");
  if constexpr (fits) {
    static_assert(!by_lanes<S> && !by_row<S> && !same_keys<S>,
                  "ssmax: the fast path of a scaling is by_size");
    // A member of one of these names with another signature is a compile error.
    (void)has_scaling_check<S>, (void)has_scaling_shape_check<S>, (void)has_multiplier_gradient<S>;
  }
  return fits;
}

SSMAX_END

SSMAX_BEGIN_DATA

/// A type that returns the multiplier of a row: the top of row.hpp.
template <class S>
concept Scaling = detail::is_scaling<S>();

/// A scaling with the member `accumulate`.
template <class S>
concept LearnableScaling = Scaling<S> && detail::has_multiplier_gradient<S>;

SSMAX_END

SSMAX_BEGIN_CODE

/// Lets functors take a container X. softmax.hpp has adaptors of spans, vectors and views, eigen.hpp of Eigen's
/// types. An adaptor has `apply(scaling, in, out, axis)` and `apply(scaling, in, axis)`, which returns the
/// result.
template <class X>
struct Adaptor;

namespace detail {

template <class S>
SSMAX_INLINE void check_scaling(const char* function, const S& scaling, const QueryShape& shape) {
  if constexpr (requires { scaling.check(index_t{}, index_t{}, function); }) {
    scaling.check(shape.heads, shape.keys, function);
  } else if constexpr (has_scaling_check<S>) {
    scaling.check(shape.heads, shape.keys);
  }
  if constexpr (requires { scaling.check_shape(shape, function); }) {
    scaling.check_shape(shape, function);
  } else if constexpr (has_scaling_shape_check<S>) {
    scaling.check_shape(shape);
  }
}

}  // namespace detail

SSMAX_END

SSMAX_BEGIN_DATA

/// Makes a scaling callable on data: `scaling(in, out)` and `out = scaling(in)`, for types with an Adaptor.
template <class Derived>
struct RowFunctor {
  /// Writes out = softmax(c·in). out is `in` or does not overlap it.
  template <class In, class Out>
  requires requires { sizeof(Adaptor<std::remove_cvref_t<In>>); }
  SSMAX_INLINE void operator()(const In& in, Out&& out, Axis axis = Axis::rows) const {
    Adaptor<std::remove_cvref_t<In>>::apply(static_cast<const Derived&>(*this), in, out, axis);
  }
  /// Returns softmax(c·in).
  template <class In>
  requires requires { sizeof(Adaptor<std::remove_cvref_t<In>>); }
  [[nodiscard]] SSMAX_INLINE auto operator()(const In& in, Axis axis = Axis::rows) const {
    return Adaptor<std::remove_cvref_t<In>>::apply(static_cast<const Derived&>(*this), in, axis);
  }
};

SSMAX_END
/// @}
