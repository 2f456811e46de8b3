/// @defgroup lanes Lanes (lanes.hpp)
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
#include "query.hpp"

/// @addtogroup lanes
/// @{
SSMAX_BEGIN_DATA

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
