// What attention's loops ask of a mask, a scaling and a score, behind one interface: those loops are compiled once for
// each element type instead of for every combination of policies, and a call costs 2 ns a query or a column of a tile.
#pragma once

#include "forward/prefill_scratch.hpp"
#include "problem.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// One vector of queries against some keys: logit (key, lane) lies at s[(key - keys.begin) · group + lane].
template <class A>
struct TileColumn {
  A* s;
  KeyRange keys;         // whole passes: past `length` there are none
  const QueryRow* rows;  // [width]
  index_t length;
};

template <class A>
class Variant {
 public:
  const bool has_score, has_predicate;

  Variant(const Variant&) = delete;
  Variant& operator=(const Variant&) = delete;
  virtual ~Variant() = default;

  /// What a query sees of the keys `held`, and its multiplier.
  virtual QueryRow row(const Query& query, KeyRange held) const = 0;
  virtual index_t query_position(const Query& query) const = 0;
  virtual index_t key_position(const Query& query, index_t key) const = 0;
  virtual bool sees(const Query& query, index_t key) const = 0;
  /// Logits become what the exponential is taken of, in units of log2: scores are applied, then the multiplier if there is
  /// a score (else the queries hold it); keys that the mask hides singly become -inf.
  virtual void apply(const TileColumn<A>& column, const LaneScratch<A>& memory) const = 0;
  /// The same for logits of one query, contiguous, but without the multiplier.
  virtual void apply(A* s, KeyRange keys, const QueryRow& row) const = 0;

 protected:
  Variant(bool scores, bool predicates) : has_score(scores), has_predicate(predicates) {}
};

/// Where a query's rotation puts it. A cache's keys lie at their places in the sequence, whatever the mask says.
template <class T, class X, class A = Compute<T>>
index_t rope_position(const Problem<T, X>& problem, const Variant<A>& variant, const Query& query) {
  return problem.key_position + (problem.rotate_keys ? variant.query_position(query) : query.position());
}

/// The query itself, widened and rotated: where it lies if that is nothing, else in scratch.
template <class T, class X, class A = Compute<T>>
const A* load_query(const Problem<T, X>& problem, const Variant<A>& variant, const Query& query, A* scratch) {
  const View<const T, 4>& q = problem.q;
  const index_t d = problem.width();
  const A* wide = widened(row_of(q, query.batch, query.head, query.index), d, scratch);
  if (problem.rope == nullptr) return wide;
  problem.rope->rotate(wide, d, scratch, d, 1, d, rope_position(problem, variant, query), false);
  return scratch;
}

/// Keys [range) widened and rotated, contiguous from `out`.
template <class T, class X, class A = Compute<T>>
void load_keys(const Problem<T, X>& problem, const Variant<A>& variant, index_t batch, index_t kv_head,
               KeyRange range, A* out) {
  const View<const X, 4>& k = problem.keys.k;
  const index_t d = k.extent(3);
  const Query query{batch, kv_head * problem.group(), 0, problem.shape(batch)};
  const bool rotated = problem.rope != nullptr && problem.rotate_keys;
  for_each_stretch(problem.keys, range, [&](index_t key, index_t row, index_t count) {
    const X* in = row_of(k, batch, kv_head, row);
    for (index_t i = 0; i < count; ++i, out += d) {
      const A* wide = widened(in + i * k.stride(2), d, out);
      if (rotated) {
        const index_t position = problem.key_position + variant.key_position(query, key + i);
        problem.rope->rotate(wide, d, out, d, 1, d, position, false);
      } else if (wide != out) {
        std::copy_n(wide, d, out);
      }
    }
  });
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
