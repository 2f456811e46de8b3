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

/// Prefetches `bytes` bytes. Always inline, and called from loops that have other effects: GCC 12 removes calls of a
/// function that only prefetches.
SSMAX_INLINE void prefetch_bytes(const std::byte* first, index_t bytes) {
  for (index_t i = 0; i < bytes; i += 64) __builtin_prefetch(first + i);
}

/// Prefetches the keys and values of a range.
template <class Compute>
void prefetch_rows(const AnyKeys<Compute>& source, index_t batch, index_t kv_head, KeyRange keys) {
  while (keys.begin < keys.end) {
    const AnyKeyRun run = source.run(batch, kv_head, keys.begin);
    const index_t count = std::min(run.count, keys.size());
    const auto *k = static_cast<const std::byte*>(run.k), *v = static_cast<const std::byte*>(run.v);
    for (index_t i = 0; i < count; ++i) {
      prefetch_bytes(k + i * run.k_stride * source.k_size(), source.k_row() * source.k_size());
      prefetch_bytes(v + i * run.v_stride * source.v_size(), source.v_row() * source.v_size());
    }
    keys.begin += count;
  }
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
      if (i < next) prefetch_bytes(rows[first + copied + i], bytes);
      copy_row(copy + i * bytes, rows[first + i], bytes);
    }
    f(first, copied);
  }
}

SSMAX_END
