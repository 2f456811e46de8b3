// Rows of q and k as products in 16 bits take them.
//
// A row that was rotated is no longer bfloat16. Rounded to it, its logits would err by 2^-9 of their terms, and
// SSMax multiplies them by 4 to 10. So it comes in two parts, x = high + low, which hold 16 bits of it, and a
// product of rotated rows is three: with the parts behind one another as channels, q is (high, low, high) and k
// (high, high, low). A cache's keys were rounded when they were stored: (high, low) and (k, k).
#pragma once

#include <algorithm>

#include "../../kernels/prefill.hpp"
#include "../keys/load.hpp"

SSMAX_BEGIN_DETAIL

/// Products that a logit takes.
template <class T, class X>
index_t logit_parts(const Problem<T, X>& problem) {
  return !problem.has_rope() ? 1 : problem.rotate_keys ? 3 : 2;
}

/// Channels that the product of queries and keys sums over: where operands are E, whole multiples of `unit`.
template <class E, class T, class X>
index_t product_depth(const Problem<T, X>& problem, index_t unit) {
  if constexpr (std::same_as<E, Compute<T>>) {
    return problem.width();
  } else {
    return (problem.width() * logit_parts(problem) + unit - 1) / unit * unit;
  }
}

/// in[n] = high + low, each rounded to nearest; scratch[n].
inline void split_row(const float* in, index_t n, bfloat16* high, bfloat16* low, float* scratch) {
  narrow(in, n, high);
  widen(high, n, scratch);
  for (index_t i = 0; i < n; ++i) scratch[i] = in[i] - scratch[i];
  narrow(scratch, n, low);
}

/// A query in its parts, filled up with 0 to `depth`; wide[2 · d].
template <class T, class X, class A>
void load_query_parts(const Problem<T, X>& problem, const Variant<A>& variant, const Query& query,
                      index_t depth, A* wide, bfloat16* out) {
  const index_t d = problem.width(), parts = logit_parts(problem);
  std::fill(out + parts * d, out + depth, bfloat16{});
  if (parts == 1) {
    std::copy_n(row_of(problem.q, query.batch, query.head, problem.row_of(query)), d, out);
    return;
  }
  split_row(load_query(problem, variant, query, wide), d, out, out + d, wide + d);
  if (parts == 3) std::copy_n(out, d, out + 2 * d);
}

/// Keys [range) in their parts, rows of `depth`; wide[2 · d].
template <class T, class X, class A>
void load_key_parts(const Problem<T, X>& problem, const Variant<A>& variant, index_t batch, index_t kv_head,
                    KeyRange range, index_t depth, A* wide, bfloat16* out) {
  const index_t d = problem.width(), parts = logit_parts(problem);
  for_each_stretch(problem.keys, batch, kv_head, range, [&](index_t key, const KeyStretch<X>& stretch) {
    for (index_t i = 0; i < stretch.count; ++i, out += depth) {
      if (parts == 3) {
        load_keys(problem, variant, batch, kv_head, {key + i, key + i + 1}, wide);
        split_row(wide, d, out, out + 2 * d, wide + d);
        std::copy_n(out, d, out + d);
      } else {
        for (index_t part = 0; part < parts; ++part) {
          std::copy_n(stretch.k + i * stretch.k_stride, d, out + part * d);
        }
      }
      std::fill(out + parts * d, out + depth, bfloat16{});
    }
  });
}

SSMAX_END
