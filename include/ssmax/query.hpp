/// @defgroup query Queries, and masks of your own (query.hpp)
/// @ingroup mask
/// The query that a mask is called with, and the members of a mask of your own. mask.hpp has the library's masks.
///
/// A mask is a type with the member
///
///     KeyRange keys(query) const              returns a range that holds every key that the query sees
///
/// Optional members:
///
///     bool sees(query, key) const             returns whether the query sees a key of its range (default: true)
///     index_t query_position(query) const     returns the position of the query, for RoPE, ALiBi and scalings
///                                             (default: query.position())
///     index_t key_position(query, key) const  returns the position of the key (default: key). The result may depend on
///                                             the query's batch, shape and kv head only
///     Query aligned(query) const              returns the query at its place among the keys, for masks joined by &
///     void check(shape) const                 called before any write; throws if the mask does not fit
///
/// Optional members of a mask with `sees`:
///
///     KeyRange run(query, from) const         returns the first visible keys at or after `from`, without a gap; an
///                                             empty range if no key is left. Neighbouring runs may touch
///     index_t count(query) const              returns n, the number of visible keys
///     bool same_runs(query, other) const      of a mask with `run`: returns true if two queries of a batch entry have
///                                             the same runs; false is always right
///
/// `keys` and `sees` define the mask: n is the number of keys that `sees` shows. `run` must agree with `sees`.
/// With `run`, attention skips key blocks that no run touches, and does not call `sees` for each logit.
///
/// A source of keys (key_source.hpp) has rotated its keys to their places in the sequence. So the rope ignores the
/// positions of the mask. Exceptions: the option `rotate_source_keys`, and masks with the member
///
///     static constexpr bool rotated_to_positions = true;
///
/// It declares that the keys of a source were rotated to the mask's positions. The rope then rotates queries to the
/// mask's positions as well.
///
/// A member of these names with another signature is a compile error. If all queries see the same keys, specialise
/// same_keys (fast_path.hpp): short rows are then computed several per vector.
#pragma once

#include <algorithm>
#include <cstdint>

#include "config.hpp"
#include "detail/members/mask.hpp"
#include "view.hpp"

/// @cond
SSMAX_BEGIN_SHARED

template <class Compute>
struct DropoutOption;

SSMAX_END
/// @endcond

/// @addtogroup query
/// @{
SSMAX_BEGIN_DATA

/// Keys [begin, end).
struct KeyRange {
  index_t begin = 0;  ///< The first key.
  index_t end = 0;    ///< The first key after the range.

  /// Returns the number of keys.
  SSMAX_INLINE constexpr index_t size() const { return end - begin; }
};

/// The extents of a call. `keys` counts the keys of the query's batch entry: sequences of a cache differ in length.
struct QueryShape {
  index_t batch = 1,  ///< Entries of the batch.
      heads = 1,      ///< Heads of the queries.
      queries = 0,    ///< Queries of a head, in this call.
      keys = 0;       ///< Keys of the query's batch entry.

  /// Returns batch·heads·queries.
  SSMAX_INLINE constexpr index_t rows() const { return batch * heads * queries; }
};

/// One query of a call.
struct Query {
  index_t batch = 0,   ///< Its batch entry, from 0.
      head = 0,        ///< Its head, from 0.
      index = 0;       ///< Its index among the queries of the call, from 0.
  QueryShape shape{};  ///< The extents of the call.
  /// Added to position(). A mask sets it in `aligned` if its queries are not aligned bottom-right.
  index_t shift = 0;

  /// Returns the query's place among the keys. Aligned bottom-right: the last query has the place of the last
  /// key. The place is negative for the first queries if there are more queries than keys.
  SSMAX_INLINE constexpr index_t position() const { return index + shape.keys - shape.queries + shift; }
};

/// Dropout of weights: attention multiplies each weight by 0 with probability p, else by 1 / (1 - p). The sum of the
/// weights and lse are those without dropout. p is rounded to a multiple of 1/65536.
///
/// A weight's 16 random bits are those of Philox-4x32-10 (Salmon et al. 2011), counted by key / 8, the query's position
/// (Query::position) and its head. The key of Philox comes from seed, offset and sequence. So results do not depend on
/// threads, instruction sets, ranks, or on how a prompt is cut into calls. attention_backward takes the same Dropout.
struct Dropout {
  double p = 0;            ///< Probability, in [0, 1). 0: no dropout.
  std::uint64_t seed = 0,  ///< Chooses the weights, with `offset` and the index of the sequence.
      offset = 0;          ///< For instance the step of a training and the layer.
  KeptSpan<const std::uint64_t>
      seeds{};  ///< If given, a seed per sequence, in place of `seed` and the index.
  /// @cond
  template <class A>
  SSMAX_INLINE constexpr operator shared::DropoutOption<A>() const {
    return {p, seed, offset, seeds};
  }
  /// @endcond
};

SSMAX_END

SSMAX_BEGIN_DETAIL

template <class M>
SSMAX_INLINE void check_mask(const M& mask, const QueryShape& shape) {
  if constexpr (has_mask_check<M>) mask.check(shape);
}

/// Returns mask.keys(query), cut to [0, keys). A mask of the user's may return a larger range, or one that ends
/// before it begins.
template <class M>
SSMAX_INLINE constexpr KeyRange visible_keys(const M& mask, const Query& query) {
  const KeyRange keys = mask.keys(query);
  const index_t begin = std::clamp<index_t>(keys.begin, 0, query.shape.keys);
  return {begin, std::clamp<index_t>(keys.end, begin, query.shape.keys)};
}

/// Returns whether a query sees a key of its range.
template <class M>
SSMAX_INLINE constexpr bool sees(const M& mask, const Query& query, index_t key) {
  if constexpr (has_predicate<M>) return mask.sees(query, key);
  return true;
}

/// Returns the first visible keys at or after `from`, without a gap. Returns an empty range if no key is left.
template <class M>
SSMAX_INLINE constexpr KeyRange next_run(const M& mask, const Query& query, index_t from) {
  if constexpr (has_run<M>) return mask.run(query, from);
  const KeyRange keys = visible_keys(mask, query);
  return {std::max(keys.begin, from), keys.end};
}

/// Returns whether two queries of a batch entry are known to have the same runs.
template <class M>
SSMAX_INLINE constexpr bool same_runs(const M& mask, const Query& query, const Query& other) {
  if constexpr (has_same_runs<M>) return mask.same_runs(query, other);
  if constexpr (has_run<M>) return false;
  const KeyRange keys = visible_keys(mask, query), other_keys = visible_keys(mask, other);
  return keys.begin == other_keys.begin && keys.end == other_keys.end;
}

/// Calls f(run) for the visible runs of a query within `keys`, in rising order. Runs that touch become one. Requires a
/// mask with runs.
template <class M, class F>
SSMAX_INLINE void for_each_visible_run(const M& mask, const Query& query, KeyRange keys, const F& f) {
  KeyRange joined{keys.begin, keys.begin};
  for (index_t from = keys.begin; from < keys.end;) {
    const KeyRange next = mask.run(query, from);
    const KeyRange run{std::max(next.begin, from), std::min(next.end, keys.end)};
    if (run.size() <= 0) break;
    if (run.begin > joined.end) {
      if (joined.size() > 0) f(joined);
      joined.begin = run.begin;
    }
    joined.end = from = run.end;
  }
  if (joined.size() > 0) f(joined);
}

/// Returns n. `range` is visible_keys(mask, query). O(1), O(runs) or, with `sees` alone, O(range).
template <class M>
constexpr index_t visible_count(const M& mask, const Query& query, const KeyRange& range) {
  if constexpr (has_count<M>) return std::clamp<index_t>(mask.count(query), 0, range.size());
  if constexpr (!has_predicate<M>) return range.size();
  index_t count = 0;
  if constexpr (has_run<M>) {
    for_each_visible_run(mask, query, range, [&](KeyRange run) { count += run.size(); });
  } else {
    for (index_t key = range.begin; key < range.end; ++key) count += sees(mask, query, key) ? 1 : 0;
  }
  return count;
}

/// Returns the first visible key of a range, or the end of the range. Requires a range within visible_keys(mask,
/// query). O(1) or, with `sees` alone, O(range).
template <class M>
constexpr index_t first_visible(const M& mask, const Query& query, KeyRange range) {
  if constexpr (has_run<M>) {
    const KeyRange run = mask.run(query, range.begin);
    return run.size() > 0 ? std::clamp(run.begin, range.begin, range.end) : range.end;
  }
  index_t key = range.begin;
  while (key < range.end && !sees(mask, query, key)) ++key;
  return key;
}

template <class M>
SSMAX_INLINE constexpr index_t query_position(const M& mask, const Query& query) {
  if constexpr (has_query_position<M>) return mask.query_position(query);
  return query.position();
}

template <class M>
SSMAX_INLINE constexpr index_t key_position(const M& mask, const Query& query, index_t key) {
  if constexpr (has_key_position<M>) return mask.key_position(query, key);
  return key;
}

template <class M>
SSMAX_INLINE constexpr Query aligned(const M& mask, const Query& query) {
  if constexpr (has_alignment<M>) return mask.aligned(query);
  return query;
}

SSMAX_END

SSMAX_BEGIN_DATA

/// A type that defines the visible keys of each query: the top of query.hpp.
template <class M>
concept Mask = detail::is_mask<M>();

SSMAX_END
/// @}

/// @addtogroup key
/// @{
SSMAX_BEGIN_DATA

/// A key and the query that attends to it. Positions are those of the mask: Documents restarts them.
struct Key {
  Query query{};               ///< The query.
  index_t index = 0;           ///< The index of the key in its sequence.
  index_t query_position = 0,  ///< The position of the query.
      key_position = 0;        ///< The position of the key.
};

/// The matrix of a head, where a mask or a score reads matrices [batch, heads, queries, keys].
enum class HeadsOfMatrix {
  each,  ///< Head h reads matrix h: as many matrices as heads.
  modulo  ///< Head h reads matrix h % matrices, as in ggml. The number of matrices must divide the number of heads.
};

/// The logits that add to one element of a score's gradient. They determine which tasks run at the same time.
enum class Sharing {
  one_head,  ///< Logits of one query or one key, in one head of one batch entry. No limit.
  heads,     ///< Logits of one key, in any heads and batch entries. One kv head after the other.
  any        ///< Any logits. One thread.
};

SSMAX_END
/// @}
