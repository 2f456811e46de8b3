/// @defgroup fast_path Fast paths (fast_path.hpp)
/// Fast paths: what may be done by vectors for a score, or once for many rows for a mask or a scaling, in
/// place of asking it key by key or row by row.
///
/// A policy is computed by its own formula unless its type asks for a fast path by name, in namespace ssmax
/// or the global one, before its first use:
///
///     template <>
///     inline constexpr ssmax::FastPath ssmax::fast_path<Clipped> = ssmax::FastPath::elementwise;
///
/// What the type then promises, and the members that it has, all const:
///
/// | fast path | of | the type promises | members |
/// |---|---|---|---|
/// | none | all | nothing; what a type has that does not ask | |
/// | elementwise | scores | z' depends on z alone | apply, differentiate |
/// | distance | scores | z' = z + slope·(key position - query position) | slope |
/// | distance_factor | scores | z' = a·(z - a) + 1, where a > 0 depends on abs(distance) alone | factors |
/// | row | scores | z' = z + row[key] | row, gradient_row where it learns every logit |
/// | same_keys | masks | all queries of a batch entry and head see the same keys | |
/// | by_size | scalings | c depends on the head and n alone, not on the position | |
///
///     void apply(T* z, index_t n) const                           replaces n logits by z'
///     void differentiate(const T* scored, index_t n, T* d) const  multiplies d by dz'/dz where apply made it
///     double slope(index_t head) const
///     const T* factors(index_t from, index_t count, T* scratch) const  returns a of distances from, from + 1, …,
///                                                                 `count` of them; may write them to scratch
///     const X* row(const Query&) const                            the query's row of float, double, half or
///                                                                 bfloat16, contiguous, or null without one
///     G* gradient_row(const Query&) const                         where accumulate adds dz' of the query's keys,
///                                                                 contiguous, for all queries or null for all
///
/// apply and differentiate take T = float and double, lanes that hold no logit among them. The formula must
/// say the same as the fast path, up to rounding: which of them is used depends on the number of queries, the
/// types and the mask. A member that is missing or has another signature is an error of the compiler.
///
/// A class does not inherit the fast path of its base, since it may have a formula of its own.
#pragma once

#include "config.hpp"

/// @addtogroup fast_path
/// @{
SSMAX_BEGIN_DATA

/// A score, a mask or a scaling asks for one of these: the table at the top of fast_path.hpp.
enum class FastPath {
  none,             ///< Nothing.
  elementwise,      ///< z' depends on z alone.
  distance,         ///< z' = z + slope·(key position - query position).
  distance_factor,  ///< z' = a·(z - a) + 1 with a of |query position - key position|.
  row,              ///< z' = z + row[key].
  same_keys,        ///< All queries of a batch entry and head see the same keys.
  by_size           ///< c depends on the head and n alone, not on the position.
};

/// The fast path that a type asks for. To be specialised for a type of one's own.
template <class Policy>
inline constexpr FastPath fast_path = FastPath::none;

SSMAX_END
/// @}
