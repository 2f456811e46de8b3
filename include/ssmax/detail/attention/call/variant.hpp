// What attention's loops ask of a mask, a scaling and a score, behind one interface. So the loops are
// compiled once for each element type instead of for every combination of the three; a virtual call costs
// 2 ns a query or a column of a tile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "../../kernels/prefill.hpp"
#include "problem.hpp"

SSMAX_BEGIN_SHARED

/// The logits of one vector of queries against some keys: logit (key, lane) lies at
/// s[(key - keys.begin) · tile_lanes + lane]. The other arrays over keys have the layout of s.
template <class A>
struct Logits {
  A* s;
  KeyRange keys;         // whole passes of the kernels: keys from `length` on do not exist
  const QueryRow* rows;  // [vector length]
  index_t length;        // keys of the sequence
  /// The backward pass only. z: the logit that the score function returned, or the one it received (see
  /// apply_and_keep); without a score function, of bfloat16 operands, the product. slope: the score function's
  /// derivative.
  A *z = nullptr, *slope = nullptr;
  /// Still to be applied, if given, one number per lane: s·multiplier or, with an offset, z·multiplier - offset.
  const A *multiplier = nullptr, *offset = nullptr;
};

/// One number per lane of a tile, [tile_lanes] each. The name says which step writes and reads it.
template <class A>
struct LaneNumbers {
  A *q_factor, *row_factor;          // queries on their way into lanes, and into rows
  A *rescale, *chunk_rescale;        // states: what earlier sums, and those of a chunk, are multiplied by
  A *multiplier, *slope, *distance;  // score functions
  A *first, *last;                   // masks: the visible keys of a lane
  A* dc;                             // gradients of the multipliers
  A *zero, *one;                     // constants
};

/// The scratch memory of one thread for one vector of queries.
template <class A>
struct TileScratch {
  const PrefillKernels<A>& kernels;
  index_t tile_lanes;
  const A** in;  // [vector length]: rows to be transposed
  A* wide;       // [vector length][key_block]: rows to be transposed that are not stored as A
  LaneNumbers<A> lane;
  A* transposed;  // [vector length][key_block]: numbers per key and lane, and weights that the kernels cannot form
};

/// The visible keys of some queries.
struct Hull {
  // Without queries, any is empty and all is everything.
  KeyRange any{std::numeric_limits<index_t>::max(), 0};  // from the first to the last key that a query sees
  KeyRange all{0, std::numeric_limits<index_t>::max()};  // keys that all queries see

  SSMAX_INLINE constexpr Hull() = default;
  SSMAX_INLINE void add(KeyRange keys) {
    all = {std::max(all.begin, keys.begin), std::min(all.end, keys.end)};
    if (keys.size() > 0) any = {std::min(any.begin, keys.begin), std::max(any.end, keys.end)};
  }
  SSMAX_INLINE void add(const Hull& other) {
    all = {std::max(all.begin, other.all.begin), std::min(all.end, other.all.end)};
    any = {std::min(any.begin, other.any.begin), std::max(any.end, other.any.end)};
  }
  /// Returns whether some query does not see a key of the block.
  SSMAX_INLINE bool masks(KeyRange block) const { return block.begin < all.begin || block.end > all.end; }
};

template <class A>
class Variant {
 public:
  const bool has_score;
  const bool has_predicate;  // a query need not see all keys of its range
  const bool has_runs;       // of such a mask: it knows its runs, so that `sees` is not called for each logit
  const bool shows_same_keys;  // to all queries of a batch entry and head, and they share c

  Variant(const Variant&) = delete;
  Variant& operator=(const Variant&) = delete;

  /// The keys of `stored` that a query may see, its multiplier, and what the scaling was called with.
  virtual QueryRow row(const Query& query, KeyRange stored) const = 0;
  virtual index_t query_position(const Query& query) const = 0;
  virtual index_t key_position(const Query& query, index_t key) const = 0;
  virtual bool sees(const Query& query, index_t key) const = 0;
  /// In place: applies the score, if there is one, and multiplies by c·log2(e) (without a score, the
  /// queries were multiplied by that). The result is in units of log2. Logits of keys that the mask hides
  /// singly become -inf.
  virtual void apply(const Logits<A>& logits, const TileScratch<A>& memory) const = 0;
  /// The same for logits of one query, contiguous, but without the multiplier.
  virtual void apply(A* s, KeyRange keys, const QueryRow& row) const = 0;

  // For masks with runs only. `count` rows, of which the first stands for all if has_same_runs says so:
  /// Returns whether rows are known to see the same keys.
  virtual bool has_same_runs(const QueryRow* rows, index_t count) const = 0;
  /// Returns the first key at or after `from` that some row sees; the greatest index_t if there is none.
  virtual index_t next_visible(const QueryRow* rows, index_t count, index_t from) const = 0;
  /// Returns a bit for each block of `block_keys` keys, from keys.begin on, that some row sees a key of.
  virtual std::uint32_t visible_blocks(const QueryRow* rows, index_t count, KeyRange keys,
                                       index_t block_keys) const = 0;
  /// Returns the hull of the runs that begin in `keys` or before. Runs are cut at keys.begin, not at keys.end. If a row
  /// has several runs there, `all` is empty.
  virtual Hull hull(const QueryRow* rows, index_t count, KeyRange keys) const = 0;
  /// Sets the logits of masked keys to -inf.
  virtual void mask_runs(const Logits<A>& logits, const TileScratch<A>& memory) const = 0;

 protected:
  SSMAX_INLINE Variant(bool scores, bool predicates, bool runs, bool same_keys)
      : has_score(scores), has_predicate(predicates), has_runs(runs), shows_same_keys(same_keys) {}
  SSMAX_INLINE ~Variant() = default;
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// The position that a query is rotated to. With rotated keys of a source it is the query's place in the sequence,
/// whatever the mask says, as the keys were rotated to theirs.
template <class A>
index_t rope_position(const Problem<A>& problem, const Variant<A>& variant, const Query& query) {
  return problem.key_position +
         (problem.mask_gives_place() ? variant.query_position(query) : query.position());
}

SSMAX_END
