// Masks: which keys a query sees, as one range of keys per query, and with it n, the length of that range.
//
// A mask is a struct with  keys(query) -> KeyRange  and, optionally,  check(shape), called before anything is
// written, and  static constexpr bool uniform = true  where all queries see the same keys (short rows then go
// several at a time).
//   Full     every key
//   Causal   keys up to the query's own position, aligned bottom-right: the last query sees the last key
//   Lengths  the first `visible[r]` keys of row r (ragged rows), rows counted over [batch, head, query]
#pragma once

#include <algorithm>
#include <concepts>
#include <span>

#include "config.hpp"
#include "detail/error.hpp"

namespace ssmax {
inline namespace SSMAX_DATA_NAMESPACE {

/// Keys [begin, end).
struct KeyRange {
  index_t begin = 0;
  index_t end = 0;

  SSMAX_INLINE constexpr index_t size() const { return end - begin; }
};

/// The extents that queries are counted in.
struct QueryShape {
  index_t batch = 1, heads = 1, queries = 0, keys = 0;

  SSMAX_INLINE constexpr index_t rows() const { return batch * heads * queries; }
};

/// One query, and the shape it belongs to.
struct Query {
  index_t batch = 0, head = 0, index = 0;
  QueryShape shape{};
};

template <class M>
concept Mask = requires(const M& mask, const Query& query) {
  { mask.keys(query) } -> std::same_as<KeyRange>;
};

struct Full {
  static constexpr bool uniform = true;

  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const { return {0, query.shape.keys}; }
};

struct Causal {
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const {
    return {0, std::max<index_t>(0, query.index + 1 + query.shape.keys - query.shape.queries)};
  }
};

struct Lengths {
  std::span<const index_t> visible;

  SSMAX_INLINE constexpr explicit Lengths(std::span<const index_t> lengths) : visible(lengths) {}
  /// Values outside [0, keys] are cut to it: the check is O(1) and cannot look at them all.
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const {
    const auto row = (query.batch * query.shape.heads + query.head) * query.shape.queries + query.index;
    return {0, std::clamp<index_t>(visible[static_cast<std::size_t>(row)], 0, query.shape.keys)};
  }
  SSMAX_INLINE void check(const QueryShape& shape) const {
    if (static_cast<index_t>(visible.size()) != shape.rows()) {
      detail::fail_value("Lengths", "visible", "has extent", static_cast<index_t>(visible.size()), "rows are",
                         shape.rows());
    }
  }
};

}  // namespace SSMAX_DATA_NAMESPACE

inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// The keys that a query sees, cut to those that exist: a user's mask may say more, or end before it begins.
template <class M>
SSMAX_INLINE KeyRange visible_keys(const M& mask, const Query& query) {
  const KeyRange keys = mask.keys(query);
  const index_t begin = std::clamp<index_t>(keys.begin, 0, query.shape.keys);
  return {begin, std::clamp<index_t>(keys.end, begin, query.shape.keys)};
}

template <class M>
constexpr bool is_uniform() {
  if constexpr (requires { M::uniform; }) {
    return M::uniform;
  } else {
    return false;
  }
}

template <class M>
SSMAX_INLINE void check_mask(const M& mask, const QueryShape& shape) {
  if constexpr (requires { mask.check(shape); }) mask.check(shape);
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
