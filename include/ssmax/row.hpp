/// @defgroup row Rows, and scalings of your own (row.hpp)
/// @ingroup scaling
/// Rows of logits as a scaling sees them, and what it takes to be one. scaling.hpp has the scalings.
///
/// A scaling is any callable Row -> number, so a lambda is one. The number is the multiplier c of the row's
/// logits, y = softmax(c·z); it may be negative or zero. Optional members:
///
///     void check(index_t heads, index_t largest_n) const  called before any write; throws on bad sizes
///     void check_shape(const QueryShape&) const           likewise, for what has a number per query
///     void accumulate(const Row&, double dc) const        adds dc·∂c/∂parameter to the caller's arrays;
///                                                         this makes it learnable
///
/// A scaling that has to know which query of the call a row belongs to takes a PlacedRow in place of the Row.
///
/// **The position of a row** is the query's own position in the sequence, from 0, whichever keys the mask shows:
///
/// | call | position of query i |
/// |---|---|
/// | attention, rows of a matrix | i + keys - queries: the last query stands at the last key |
/// | decode | the same with the keys that the query's sequence has stored so far |
/// | a mask with `query_position` | what the mask says: Documents counts from the document's first key |
/// | a query before the first key | 0 |
///
/// `key_position` of the options moves the rope only. n is the number of visible keys and does not depend on the
/// position.
///
/// The library calls a scaling once per query. Exception: it calls a scaling whose type asks for by_size
/// (fast_path.hpp) once for all queries that see the same keys. Short rows share vectors only then.
///
/// check and check_shape may take one argument more, `const char* function` with a default: the name of the function
/// that was called, such as "attention", for their messages.
///
/// A member of these names with another signature, or an operator() that is not const, is an
/// error of the compiler.
///
/// RowFunctor makes a scaling callable on data.
#pragma once

#include <algorithm>
#include <concepts>
#include <type_traits>
#include <utility>

#include "config.hpp"
#include "detail/checks/optional_member.hpp"
#include "fast_path.hpp"
#include "query.hpp"

/// @addtogroup row
/// @{
SSMAX_BEGIN_DATA

/// The argument of a scaling. The top of row.hpp defines the position.
struct Row {
  index_t head = 0;      ///< From 0.
  index_t position = 0;  ///< The query's own position in the sequence, at least 0.
  index_t n = 0;         ///< How many keys the query sees, at least 1.

  /// All three are equal.
  SSMAX_INLINE constexpr bool operator==(const Row&) const = default;
};

/// A Row, and which query of the call it belongs to.
struct PlacedRow : Row {
  index_t batch = 0;  ///< The query's batch entry, from 0.
  index_t query = 0;  ///< Its place among the queries of the call, from 0; among all, where q is a part.

  /// All five are equal.
  SSMAX_INLINE constexpr bool operator==(const PlacedRow&) const = default;
};

/// Which dimension of a matrix a functor normalises over.
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
SSMAX_OPTIONAL_MEMBER(learns_multiplier, "scaling", accumulate, std::same_as<void>,
                      "void accumulate(const Row&, double dc) const", std::declval<const PlacedRow&>(),
                      double{})

template <class S>
consteval bool find_reads_query() {
  constexpr bool takes_row = requires(const S& scaling, const Row& row) { scaling(row); };
  constexpr bool learns_from_row = requires(const S& scaling, const Row& row) {
    scaling.accumulate(row, 0.0);
  };
  return !takes_row || (learns_multiplier<S> && !learns_from_row);
}

/// A Row is not enough for the scaling: it asks which query of the call the row belongs to.
template <class S>
constexpr bool reads_query = find_reads_query<S>();

/// All queries of a head that see the same keys have the same multiplier.
template <class S>
constexpr bool goes_by_size = by_size<S> && !reads_query<S>;

/// The position in the Row of a query.
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
    // Each of them refuses a member of its name that does not fit.
    (void)has_scaling_check<S>, (void)has_scaling_shape_check<S>, (void)learns_multiplier<S>;
  }
  return fits;
}

SSMAX_END

SSMAX_BEGIN_DATA

/// A type that gives the multiplier of a row: the top of row.hpp.
template <class S>
concept Scaling = detail::is_scaling<S>();

/// A scaling that takes the gradient of its multiplier.
template <class S>
concept LearnableScaling = Scaling<S> && detail::learns_multiplier<S>;

SSMAX_END

SSMAX_BEGIN_CODE

/// Teaches the functors a container X: softmax.hpp has those for spans, vectors and views, eigen.hpp those
/// for Eigen. It offers `apply(scaling, in, out, axis)` and `apply(scaling, in, axis)`, which returns
/// the result.
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

/// Makes a scaling callable on data: `scaling(in, out)` and `out = scaling(in)`, for everything that has an
/// Adaptor.
template <class Derived>
struct RowFunctor {
  /// out = softmax(c·in). out may be in, or lies apart from it.
  template <class In, class Out>
  requires requires { sizeof(Adaptor<std::remove_cvref_t<In>>); }
  SSMAX_INLINE void operator()(const In& in, Out&& out, Axis axis = Axis::rows) const {
    Adaptor<std::remove_cvref_t<In>>::apply(static_cast<const Derived&>(*this), in, out, axis);
  }
  /// softmax(c·in), in a container of its own.
  template <class In>
  requires requires { sizeof(Adaptor<std::remove_cvref_t<In>>); }
  [[nodiscard]] SSMAX_INLINE auto operator()(const In& in, Axis axis = Axis::rows) const {
    return Adaptor<std::remove_cvref_t<In>>::apply(static_cast<const Derived&>(*this), in, axis);
  }
};

SSMAX_END
/// @}
