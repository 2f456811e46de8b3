// What attention's loops ask of a mask, a scaling and a score, behind one interface. So the loops are
// compiled once for each element type instead of for every combination of the three; a virtual call costs
// 2 ns a query or a column of a tile.
#pragma once

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

template <class A>
class Variant {
 public:
  const bool has_score, has_predicate;
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

 protected:
  SSMAX_INLINE Variant(bool scores, bool predicates, bool same_keys)
      : has_score(scores), has_predicate(predicates), shows_same_keys(same_keys) {}
  SSMAX_INLINE ~Variant() = default;
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// The position that a query is rotated to. With a cache it is the query's place in the sequence, whatever
/// the mask says, as the cache's keys were rotated to theirs.
template <class A>
index_t rope_position(const Problem<A>& problem, const Variant<A>& variant, const Query& query) {
  return problem.key_position + (problem.mask_gives_place ? variant.query_position(query) : query.position());
}

SSMAX_END
