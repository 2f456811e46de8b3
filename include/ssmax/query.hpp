// Queries, and what a mask says of them. mask.hpp has the masks.
//
// A mask is a type with
//   KeyRange keys(query) const               a range that holds every key that the query sees
// and, optionally,
//   bool sees(query, key) const              which keys of that range it sees (default: all). n is their number
//   index_t query_position(query) const      positions, for all that goes by them (RoPE, ALiBi, scalings), where
//   index_t key_position(query, key) const   they are not query.position() and key. A key has one position for
//                                            queries of a kv head: only batch and shape of `query`, and its head
//                                            as far as that tells kv heads apart, may be looked at
//   Query aligned(query) const               the query moved to the key it stands at, for the masks joined by &
//   void check(shape) const                  called before anything is written; throws if the mask does not fit
//   static constexpr bool uniform = true     all queries see the same keys (short rows then go several at a time)
#pragma once

#include <algorithm>
#include <concepts>

#include "config.hpp"

namespace ssmax {
inline namespace SSMAX_DATA_NAMESPACE {

/// Keys [begin, end).
struct KeyRange {
  index_t begin = 0;
  index_t end = 0;

  SSMAX_INLINE constexpr index_t size() const { return end - begin; }
};

/// The extents that queries are counted in. `keys` are those of the query's batch entry: a cache's sequences
/// differ in length.
struct QueryShape {
  index_t batch = 1, heads = 1, queries = 0, keys = 0;

  SSMAX_INLINE constexpr index_t rows() const { return batch * heads * queries; }
};

/// One query, and the shape it belongs to.
struct Query {
  index_t batch = 0, head = 0, index = 0;
  QueryShape shape{};
  /// Of position(): set by a mask whose queries do not stand bottom-right, for those it is joined with.
  index_t shift = 0;

  /// The key that the query stands at: bottom-right, so that the last query stands at the last key. Negative
  /// where there are more queries than keys.
  SSMAX_INLINE constexpr index_t position() const { return index + shape.keys - shape.queries + shift; }
};

template <class M>
concept Mask = requires(const M& mask, const Query& query) {
  { mask.keys(query) } -> std::same_as<KeyRange>;
};

}  // namespace SSMAX_DATA_NAMESPACE

inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// The mask does not show all keys of its range.
template <class M>
constexpr bool has_predicate = requires(const M& mask, const Query& query, index_t key) {
  { mask.sees(query, key) } -> std::convertible_to<bool>;
};

template <class M>
constexpr bool has_query_position = requires(const M& mask, const Query& query) {
  { mask.query_position(query) } -> std::convertible_to<index_t>;
};

template <class M>
constexpr bool has_key_position = requires(const M& mask, const Query& query, index_t key) {
  { mask.key_position(query, key) } -> std::convertible_to<index_t>;
};

template <class M>
constexpr bool has_alignment = requires(const M& mask, const Query& query) {
  { mask.aligned(query) } -> std::same_as<Query>;
};

template <class M>
constexpr bool defines_positions = has_query_position<M> || has_key_position<M> || has_alignment<M>;

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

/// The range of the keys that a query sees, cut to those that exist: a user's mask may say more, or end before
/// it begins.
template <class M>
SSMAX_INLINE constexpr KeyRange visible_keys(const M& mask, const Query& query) {
  const KeyRange keys = mask.keys(query);
  const index_t begin = std::clamp<index_t>(keys.begin, 0, query.shape.keys);
  return {begin, std::clamp<index_t>(keys.end, begin, query.shape.keys)};
}

/// Whether a query sees a key of its range.
template <class M>
SSMAX_INLINE constexpr bool sees(const M& mask, const Query& query, index_t key) {
  if constexpr (has_predicate<M>) {
    return mask.sees(query, key);
  } else {
    return true;
  }
}

/// n, where `range` is all of the query's range: how many of these keys it sees. O(1) or, with a predicate,
/// O(range).
template <class M>
constexpr index_t visible_count(const M& mask, const Query& query, const KeyRange& range) {
  if constexpr (has_predicate<M>) {
    index_t count = 0;
    for (index_t key = range.begin; key < range.end; ++key) count += mask.sees(query, key) ? 1 : 0;
    return count;
  } else {
    return range.size();
  }
}

template <class M>
SSMAX_INLINE constexpr index_t query_position(const M& mask, const Query& query) {
  if constexpr (has_query_position<M>) {
    return mask.query_position(query);
  } else {
    return query.position();
  }
}

template <class M>
SSMAX_INLINE constexpr index_t key_position(const M& mask, const Query& query, index_t key) {
  if constexpr (has_key_position<M>) {
    return mask.key_position(query, key);
  } else {
    return key;
  }
}

template <class M>
SSMAX_INLINE constexpr Query aligned(const M& mask, const Query& query) {
  if constexpr (has_alignment<M>) {
    return mask.aligned(query);
  } else {
    return query;
  }
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
