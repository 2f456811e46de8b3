// Queries and keys as the kernels take them: widened and rotated.
#pragma once

#include <algorithm>

#include "../memory/conversion.hpp"
#include "variant.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// The query itself, widened and rotated: where it lies if that is nothing, else in scratch.
template <class T, class X, class A = Compute<T>>
const A* load_query(const Problem<T, X>& problem, const Variant<A>& variant, const Query& query, A* scratch) {
  const View<const T, 4>& q = problem.q;
  const index_t d = problem.width();
  const A* wide = widened(row_of(q, query.batch, query.head, query.index), d, scratch);
  if (!problem.has_rope()) return wide;
  rotate(problem.rope, wide, d, scratch, d, 1, d, rope_position(problem, variant, query), false);
  return scratch;
}

/// Keys [range) widened and rotated, contiguous from `out`.
template <class T, class X, class A = Compute<T>>
void load_keys(const Problem<T, X>& problem, const Variant<A>& variant, index_t batch, index_t kv_head,
               KeyRange range, A* out) {
  const View<const X, 4>& k = problem.keys.k;
  const index_t d = k.extent(3);
  const Query query{batch, kv_head * problem.group(), 0, problem.shape(batch)};
  const bool rotated = problem.has_rope() && problem.rotate_keys;
  for_each_stretch(problem.keys, range, [&](index_t key, index_t row, index_t count) {
    const X* in = row_of(k, batch, kv_head, row);
    for (index_t i = 0; i < count; ++i, out += d) {
      const A* wide = widened(in + i * k.stride(2), d, out);
      if (rotated) {
        const index_t position = problem.key_position + variant.key_position(query, key + i);
        rotate(problem.rope, wide, d, out, d, 1, d, position, false);
      } else if (wide != out) {
        std::copy_n(wide, d, out);
      }
    }
  });
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
