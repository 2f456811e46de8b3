// Loads rows of queries, keys and values: converts each row to the compute type and rotates queries and keys.
#pragma once

#include "../terms/variant.hpp"

SSMAX_BEGIN_DETAIL

/// Returns a query, converted and rotated: in place if the row needs neither, else in scratch.
template <class Compute>
SSMAX_INLINE const Compute* load_query(const Problem<Compute>& problem, const Variant<Compute>& variant,
                                       const QueryRow& of, Compute* scratch) {
  const index_t d = problem.width();
  const Compute* row = problem.q.load(of.entry(), of.query.head, of.row(), scratch);
  if (!problem.has_rope()) return row;
  rotate(problem.rope, {row, d}, {scratch, d}, 1, d, rope_place(problem, variant, of.query), false);
  return scratch;
}

/// Writes keys of a sequence with extents `shape`, converted and rotated, to `out`.
template <class Compute>
void load_keys(const Problem<Compute>& problem, const Variant<Compute>& variant, const QueryShape& shape,
               const HeadKeys& keys, StridedRows<Compute> out) {
  const index_t d = problem.width();
  const Query query{keys.batch, problem.first_head() + keys.kv_head * problem.heads_per_kv_head(), 0, shape};
  const bool rotated = problem.rotates_keys();
  for_each_run(problem.keys, keys, [&](index_t key, const AnyKeyRun& run) {
    if (!rotated) problem.keys.copy_k(run, out);
    for (index_t i = 0; rotated && i < run.count; ++i) {
      const Compute* row = problem.keys.load_k(run, i, out[i]);
      const index_t position = problem.key_position + variant.key_position(query, key + i);
      rotate(problem.rope, {row, d}, {out[i], d}, 1, d, {position, keys.batch}, false);
    }
    out.first = out[run.count];
  });
}

/// Writes the values of keys, converted, to `out`.
template <class Compute>
void load_values(const AnyKeys<Compute>& source, const HeadKeys& keys, StridedRows<Compute> out) {
  for_each_run(source, keys, [&](index_t, const AnyKeyRun& run) {
    source.copy_v(run, out);
    out.first = out[run.count];
  });
}

SSMAX_END
