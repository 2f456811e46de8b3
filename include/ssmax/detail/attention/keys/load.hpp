// Queries, keys and values as the kernels take them: widened and rotated.
#pragma once

#include <algorithm>

#include "../../kernels/rows.hpp"
#include "../../memory/conversion.hpp"
#include "../call/variant.hpp"

SSMAX_BEGIN_DETAIL

/// A query, widened and rotated: in scratch, or where it lies if neither is needed.
template <class T, class X, class A = Compute<T>>
const A* load_query(const Problem<T, X>& problem, const Variant<A>& variant, const Query& query, A* scratch) {
  const index_t d = problem.width();
  const A* wide = widened(row_of(problem.q, query.batch, query.head, problem.row_of(query)), d, scratch);
  if (!problem.has_rope()) return wide;
  rotate(problem.rope, wide, d, scratch, d, 1, d, rope_position(problem, variant, query), false);
  return scratch;
}

/// Row i of keys or values as n elements T: where it lies or, if it has to be widened (and multiplied by its
/// factor), in scratch.
template <class T, class X>
const T* load_row(const X* rows, index_t stride, [[maybe_unused]] const float* scales, index_t i, index_t n,
                  T* scratch) {
  const T* wide = widened(rows + i * stride, n, scratch);
  if constexpr (ScaledStorage<X>) {
    kernels<RowKernels<T>>().multiply(wide, n, static_cast<T>(scales[i]), scratch);
  }
  return wide;
}

/// Keys [range) widened and rotated, contiguous from `out`.
template <class T, class X, class A = Compute<T>>
void load_keys(const Problem<T, X>& problem, const Variant<A>& variant, index_t batch, index_t kv_head,
               KeyRange range, A* out) {
  const index_t d = problem.width();
  const Query query{batch, problem.first_head() + kv_head * problem.group(), 0, problem.shape(batch)};
  const bool rotated = problem.has_rope() && problem.rotate_keys;
  for_each_stretch(problem.keys, batch, kv_head, range, [&](index_t key, const KeyStretch<X>& stretch) {
    for (index_t i = 0; i < stretch.count; ++i, out += d) {
      const A* wide = load_row(stretch.k, stretch.k_stride, stretch.k_scales, i, d, out);
      if (rotated) {
        const index_t position = problem.key_position + variant.key_position(query, key + i);
        rotate(problem.rope, wide, d, out, d, 1, d, position, false);
      } else if (wide != out) {
        std::copy_n(wide, d, out);
      }
    }
  });
}

/// Values of the keys [range) widened, contiguous from `out`.
template <class X, class A>
void load_values(const AnyKeys<X>& keys, index_t batch, index_t kv_head, KeyRange range, A* out) {
  const index_t dv = keys.shape().value_width;
  for_each_stretch(keys, batch, kv_head, range, [&](index_t, const KeyStretch<X>& stretch) {
    for (index_t i = 0; i < stretch.count; ++i, out += dv) {
      const A* wide = load_row(stretch.v, stretch.v_stride, stretch.v_scales, i, dv, out);
      if (wide != out) std::copy_n(wide, dv, out);
    }
  });
}

SSMAX_END
