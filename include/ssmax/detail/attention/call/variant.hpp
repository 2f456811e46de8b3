// What attention's loops ask of a mask, a scaling and a score, behind one interface. So the loops are
// compiled once for each element type instead of for every combination of the three; a virtual call costs
// 2 ns a query or a column of a tile.
#pragma once

#include "../../kernels/prefill.hpp"
#include "problem.hpp"

SSMAX_BEGIN_SHARED

/// One vector of queries against some keys: logit (key, lane) lies at s[(key - keys.begin) · group + lane].
template <class A>
struct TileColumn {
  A* s;
  KeyRange keys;         // whole passes: past `length` there are none
  const QueryRow* rows;  // [width]
  index_t length;
};

/// Memory of one thread, for what is done to a column.
template <class A>
struct ColumnScratch {
  const PrefillKernels<A>& kernels;
  index_t group;  // lanes of a group
  const A** in;   // [width]: rows to be transposed
  A* lanes;       // [4][group]
  A* apart;       // [width][key_block]
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
  virtual void apply(const TileColumn<A>& column, const ColumnScratch<A>& memory) const = 0;
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
template <class T, class X, class A = Compute<T>>
index_t rope_position(const Problem<T, X>& problem, const Variant<A>& variant, const Query& query) {
  return problem.key_position + (problem.mask_gives_place ? variant.query_position(query) : query.position());
}

SSMAX_END
