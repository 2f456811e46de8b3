// Copies the rows of single keys side by side, for products with few queries. A source with an index per key has runs
// of one key, for which a call of a kernel would cost more than the products.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "../keys/any_keys.hpp"

SSMAX_BEGIN_DETAIL

/// Returns whether the first two runs of `keys` have fewer than 8 keys each. Exception: returns false for keys or
/// values with factors, which would have to be copied as well.
template <class Compute>
bool has_single_keys(const AnyKeys<Compute>& source, index_t batch, index_t kv_head, KeyRange keys) {
  constexpr index_t few = 8;
  if (keys.size() < 2 * few) return false;
  const AnyKeyRun first = source.run(batch, kv_head, keys.begin);
  const auto has_factors = [](const StoredFactors& factors) {
    return factors.rows != nullptr || factors.channels != nullptr;
  };
  if (has_factors(first.k_factors) || has_factors(first.v_factors) || first.count >= few) return false;
  return source.run(batch, kv_head, keys.begin + first.count).count < few;
}

inline void copy_row(std::byte* to, const std::byte* from, index_t bytes) {
  index_t i = 0;
  for (; i + 64 <= bytes; i += 64) std::memcpy(to + i, from + i, 64);
  std::memcpy(to + i, from + i, static_cast<std::size_t>(bytes - i));
}

/// Finds the rows of keys and values of a range, and calls f(i, key row, value row) for the i-th position.
template <class Compute, class F>
void for_each_row(const AnyKeys<Compute>& source, index_t batch, index_t kv_head, KeyRange keys, const F& f) {
  index_t i = 0;
  for_each_run(source, batch, kv_head, keys, [&](index_t, const AnyKeyRun& run) {
    const auto *k = static_cast<const std::byte*>(run.k), *v = static_cast<const std::byte*>(run.v);
    for (index_t row = 0; row < run.count; ++row, ++i) {
      f(i, k, v);
      k += run.k_stride * source.k_size();
      v += run.v_stride * source.v_size();
    }
  });
}

/// Rows that are copied side by side at a time.
inline constexpr index_t copied_rows = 64;

/// Copies `count` rows of `bytes` bytes side by side, copied_rows at a time. After each copy, calls f(first row, rows).
/// Prefetches the rows of the next copy. A prefetch of the first rows is up to the caller.
template <class F>
void for_each_copy(const std::byte* const* rows, index_t count, index_t bytes, std::byte* copy, const F& f) {
  for (index_t first = 0; first < count; first += copied_rows) {
    const index_t copied = std::min(copied_rows, count - first);
    const index_t next = std::min(copied_rows, count - first - copied);
    for (index_t i = 0; i < copied; ++i) {
      if (i < next) {
        for (index_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(rows[first + copied + i] + byte);
      }
      copy_row(copy + i * bytes, rows[first + i], bytes);
    }
    f(first, copied);
  }
}

SSMAX_END
