/// @defgroup fast_path Fast paths (fast_path.hpp)
/// Fast paths of scores, masks and scalings. By default the library calls a policy for each logit or each query.
/// A type that requests a fast path by name is called for many of them at once.
///
///     template <>
///     inline constexpr bool ssmax::by_lanes<Clipped> = true;
///
/// Specialise the variable in namespace ssmax or the global one, before the first use of the type:
///
/// | variable | of | the type promises | members, all const |
/// |---|---|---|---|
/// | by_lanes | scores | | apply, differentiate |
/// | by_row | scores | z' = z + row[key] | row; gradient_row where every logit has a gradient |
/// | same_keys | masks | all queries of a batch entry and head see the same keys | |
/// | by_size | scalings | c depends on the head and n alone, not on the position | |
///
///     void apply(const Lanes<T>& lanes) const                       replaces the logits by z'
///     void differentiate(const Lanes<const T>& lanes, T* d) const   multiplies d by dz'/dz; lanes holds what apply made
///     const X* row(const Query&) const                              the query's row of float, double, half or bfloat16,
///                                                                   contiguous, or null without one
///     G* gradient_row(const Query&) const                           where accumulate adds dz' of the query's keys,
///                                                                   contiguous, for all queries or null for all
///
/// Lanes without a visible key hold any number, and differentiate may return any number for them. The same holds for
/// lanes where z' is -inf: their weight is 0.
///
/// apply and differentiate take T = float and double. A score that reads the distance or the head of a logit
/// takes PlacedLanes (lanes.hpp) in place of Lanes. Exception: under a mask with the member key_position, the
/// library calls the formula of such a score for each logit.
///
/// The formula of the score must agree with the fast path up to rounding: the number of queries, the types and
/// the mask decide which of the two is called. A missing member, or one with another signature, is a compile
/// error.
///
/// A class does not inherit the fast path of its base, since it may have a formula of its own.
#pragma once

#include "config.hpp"

/// @addtogroup fast_path
/// @{
SSMAX_BEGIN_DATA

/// True if the score is vectorized by `apply` and `differentiate`.
template <class Score>
inline constexpr bool by_lanes = false;

/// True if the score adds a row of numbers to the logits of a query.
template <class Score>
inline constexpr bool by_row = false;

/// True if the mask shows the same keys to all queries of a batch entry and head.
template <class Mask>
inline constexpr bool same_keys = false;

/// True if the multiplier of the scaling depends on the head and n alone.
template <class Scaling>
inline constexpr bool by_size = false;

SSMAX_END

SSMAX_BEGIN_DETAIL

/// Scores of the library with kernels of their own: z' = z + slope(head)·distance, and z' = a·(z - a) + 1 with a of
/// |distance|.
template <class Score>
inline constexpr bool has_slope_kernel = false;
template <class Score>
inline constexpr bool has_factor_kernel = false;

SSMAX_END
/// @}
