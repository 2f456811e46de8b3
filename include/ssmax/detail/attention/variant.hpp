// What attention's loops ask of a mask, a scaling and a score, behind one interface: those loops are compiled once for
// each element type instead of for every combination of policies, and a call costs 2 ns a query or a column of a tile.
#pragma once

#include "../kernels/prefill.hpp"
#include "problem.hpp"

namespace ssmax {
inline namespace SSMAX_DATA_NAMESPACE {
namespace SSMAX_VISIBLE shared {

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

  Variant(const Variant&) = delete;
  Variant& operator=(const Variant&) = delete;

  /// What a query sees of the keys `stored`, and its multiplier.
  virtual QueryRow row(const Query& query, KeyRange stored) const = 0;
  virtual index_t query_position(const Query& query) const = 0;
  virtual index_t key_position(const Query& query, index_t key) const = 0;
  virtual bool sees(const Query& query, index_t key) const = 0;
  /// Applies the score, then the multiplier c if there is a score (else the queries hold it), in place: the result is in
  /// units of log2. Logits of keys that the mask hides singly become -inf.
  virtual void apply(const TileColumn<A>& column, const ColumnScratch<A>& memory) const = 0;
  /// The same for logits of one query, contiguous, but without the multiplier.
  virtual void apply(A* s, KeyRange keys, const QueryRow& row) const = 0;

 protected:
  SSMAX_INLINE Variant(bool scores, bool predicates) : has_score(scores), has_predicate(predicates) {}
  SSMAX_INLINE ~Variant() = default;
};

}  // namespace shared
}  // namespace SSMAX_DATA_NAMESPACE

inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// Where a query's rotation puts it. A cache's keys lie at their places in the sequence, whatever the mask says.
template <class T, class X, class A = Compute<T>>
index_t rope_position(const Problem<T, X>& problem, const Variant<A>& variant, const Query& query) {
  return problem.key_position + (problem.rotate_keys ? variant.query_position(query) : query.position());
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
