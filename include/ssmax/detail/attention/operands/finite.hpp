// Handles NaN and infinities in V. A weight of 0 times such a number is NaN. So products with V read 0 in its
// place, and the number is added separately to each query that attends to the key.
#pragma once

#include <algorithm>
#include <cmath>

#include "load.hpp"

SSMAX_BEGIN_DETAIL

/// Copies n numbers, with 0 for NaN and infinities. `in` and `out` may be the same array.
template <class Operand>
void copy_finite(const Operand* in, index_t n, Operand* out) {
  std::replace_copy_if(
      in, in + n, out, [](Operand x) { return !std::isfinite(static_cast<ComputeType<Operand>>(x)); },
      Operand{});
}

/// Calls add(query, channel, x) for each number x of a value row that is NaN or infinite, and for each of
/// `queries` rows to which the key is visible.
template <class Compute, class Add>
void for_each_nonfinite(const Variant<Compute>& variant, const QueryRow* rows, index_t queries, index_t key,
                        const Compute* value, index_t channels, const Add& add) {
  for (index_t c = 0; c < channels; ++c) {
    if (std::isfinite(value[c])) continue;
    for (index_t i = 0; i < queries; ++i) {
      const QueryRow& row = rows[i];
      if (key < row.keys.begin || key >= row.keys.end || !variant.sees(row.query, key)) continue;
      add(i, c, value[c]);
    }
  }
}

/// Calls add(query, key, channel, x) as the function above does, for all values of `keys`. value[value_width] is
/// scratch.
template <class Compute, class Add>
void for_each_nonfinite(const Problem<Compute>& problem, const Variant<Compute>& variant,
                        const HeadKeys& keys, const QueryRow* rows, index_t queries, Compute* value,
                        const Add& add) {
  const index_t dv = problem.value_width();
  for (index_t key = keys.range.begin; key < keys.range.end; ++key) {
    load_values(problem.keys, {keys.batch, keys.kv_head, {key, key + 1}}, {value, dv});
    for_each_nonfinite(variant, rows, queries, key, value, dv,
                       [&](index_t i, index_t c, Compute x) { add(i, key, c, x); });
  }
}

SSMAX_END
