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
/// | by_row | scores | z' = z + row[key] | row; gradient_row may be left out |
/// | same_keys | masks | all queries of a batch entry and head see the same keys | |
/// | by_size | scalings | c depends on the head and n alone, not on the position | |
///
///     void apply(const Lanes<T>& lanes) const                       replaces the logits by z'
///     void differentiate(const Lanes<const T>& lanes, T* d) const   multiplies d by dz'/dz; lanes has apply's results
///     const X* row(const Query&) const                              the query's row of float, double, half or
///                                                                   bfloat16, contiguous, or null without one
///     G* gradient_row(const Query&) const                           where accumulate adds dz' of the query's keys,
///                                                                   contiguous, for all queries or null for all
///
/// Lanes without a visible key hold any number, and differentiate may return any number for them. The same holds for
/// lanes where z' is -inf: their weight is 0.
///
/// apply and differentiate take T = float and double. A score that reads the distance or the head of a logit
/// takes PlacedLanes in place of Lanes. Exception: under a mask with the member key_position, the
/// library calls the formula of such a score for each logit.
///
/// The formula of the score must agree with the fast path up to rounding: the number of queries, the types and
/// the mask decide which of the two is called. A missing member, or one with another signature, is a compile
/// error. Exception: without gradient_row, the backward calls accumulate for each logit.
///
/// A class does not inherit the fast path of its base, since it may have a formula of its own.

/// @defgroup lanes Lanes (fast_path.hpp)
/// @ingroup score
/// Logits that a vectorized score function replaces at once, one logit per lane.
///
/// | path | lanes |
/// |---|---|
/// | prefill, short keys, backward | queries: one key, and queries that may differ in head and position |
/// | decode | keys: one query, and keys at neighbouring positions |
#pragma once

#include <type_traits>

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

/// Scores of the library with kernels of their own: z' = z + slope(head)·distance, z' = a·(z - a) + 1 with a of
/// |distance|, and z' = z + slope(head)·row[key].
template <class Score>
inline constexpr bool has_slope_kernel = false;
template <class Score>
inline constexpr bool has_factor_kernel = false;
template <class Score>
inline constexpr bool has_row_slope = false;

SSMAX_END
/// @}

/// @addtogroup lanes
/// @{
SSMAX_BEGIN_DATA

struct Query;

/// Logits z[0] to z[count - 1]. Lanes without a key hold any number. T is float or double, const where a score reads
/// alone.
template <class T>
class Lanes {
 public:
  T* z;           ///< [count].
  index_t count;  ///< At least 1.

  /// Lanes of `number` logits.
  SSMAX_INLINE constexpr Lanes(T* logits, index_t number) : z(logits), count(number) {}
  /// The same lanes, to be read.
  SSMAX_INLINE constexpr operator Lanes<const T>() const requires(!std::is_const_v<T>) { return {z, count}; }
};

/// Lanes with the query and the distance of each.
template <class T>
class PlacedLanes : public Lanes<T> {
 public:
  /// The type of a distance.
  using Number = std::remove_const_t<T>;

  /// Distances are distances[i] + offset. The queries lie query_bytes from one to the next.
  SSMAX_INLINE constexpr PlacedLanes(const Lanes<T>& lanes, const Number* distances, Number offset,
                                     const Query* first_query, index_t query_bytes)
      : Lanes<T>(lanes),
        distances_(distances),
        offset_(offset),
        first_query_(first_query),
        query_bytes_(query_bytes) {}

  /// The same lanes, to be read.
  SSMAX_INLINE constexpr operator PlacedLanes<const T>() const requires(!std::is_const_v<T>) {
    return {Lanes<const T>(this->z, this->count), distances_, offset_, first_query_, query_bytes_};
  }

  /// Returns key position - query position. Exact below 2^24 for float.
  SSMAX_INLINE constexpr Number distance(index_t i) const { return distances_[i] + offset_; }
  /// Returns the query. Its head is that of the logit.
  SSMAX_INLINE const Query& query(index_t i) const {
    return *reinterpret_cast<const Query*>(reinterpret_cast<const char*>(first_query_) + i * query_bytes_);
  }

 private:
  const Number* distances_;
  Number offset_;
  const Query* first_query_;
  index_t query_bytes_;
};

SSMAX_END
/// @}
