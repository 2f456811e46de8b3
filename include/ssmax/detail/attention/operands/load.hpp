// Loads rows of queries, keys and values: converts each row to the compute type and rotates queries and keys.
#pragma once

#include <algorithm>

#include "../terms/variant.hpp"

SSMAX_BEGIN_DETAIL

/// Returns a query, converted and rotated: in place if the row needs neither, else in scratch.
template <class Compute>
SSMAX_INLINE const Compute* load_query(const Problem<Compute>& problem, const Variant<Compute>& variant,
                                       const QueryRow& of, Compute* scratch) {
  const index_t d = problem.width();
  const Compute* row = problem.q.load(of.entry, of.query.head, of.row, scratch);
  if (!problem.has_rope()) return row;
  rotate(problem.rope, row, d, scratch, d, 1, d, rope_position(problem, variant, of.query), false);
  return scratch;
}

/// Writes keys [range) of a sequence, converted and rotated, to `out`. A row of `out` has `stride` numbers.
template <class Compute>
void load_keys(const Problem<Compute>& problem, const Variant<Compute>& variant, const Sequence& sequence,
               index_t kv_head, KeyRange range, Compute* out, index_t stride) {
  const index_t d = problem.width();
  const Query query{sequence.batch, problem.first_head() + kv_head * problem.heads_per_kv_head(), 0,
                    sequence.shape};
  const bool rotated = problem.rotates_keys();
  for_each_run(problem.keys, sequence.batch, kv_head, range, [&](index_t key, const AnyKeyRun& run) {
    if (!rotated) problem.keys.copy_k(run, out, stride);
    for (index_t i = 0; rotated && i < run.count; ++i) {
      const Compute* row = problem.keys.load_k(run, i, out + i * stride);
      const index_t position = problem.key_position + variant.key_position(query, key + i);
      rotate(problem.rope, row, d, out + i * stride, d, 1, d, position, false);
    }
    out += run.count * stride;
  });
}

/// Writes the values of keys [range), converted, to `out`. A row of `out` has `stride` numbers.
template <class Compute>
void load_values(const AnyKeys<Compute>& keys, index_t batch, index_t kv_head, KeyRange range, Compute* out,
                 index_t stride) {
  for_each_run(keys, batch, kv_head, range, [&](index_t, const AnyKeyRun& run) {
    keys.copy_v(run, out, stride);
    out += run.count * stride;
  });
}

SSMAX_END
