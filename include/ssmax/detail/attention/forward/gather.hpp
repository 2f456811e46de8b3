// Finds, prefetches and copies the rows of short runs. A source with an index per key has runs of one key, for which a
// call of a kernel would cost more than the products. So single keys are copied side by side.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "../keys/any_keys.hpp"

SSMAX_BEGIN_DETAIL

/// Returns whether the first two runs of `keys` have fewer than `few` keys each.
template <class Compute>
bool has_short_runs(const AnyKeys<Compute>& source, index_t batch, index_t kv_head, KeyRange keys,
                    index_t few) {
  if (keys.size() <= 0) return false;
  const index_t first = source.run(batch, kv_head, keys.begin).count;
  if (first >= std::min(few, keys.size())) return false;
  return source.run(batch, kv_head, keys.begin + first).count < few;
}

/// Returns whether the rows of single keys should be copied side by side. Exception: returns false for keys or values
/// with factors, which would have to be copied as well.
template <class Compute>
bool has_single_keys(const AnyKeys<Compute>& source, index_t batch, index_t kv_head, KeyRange keys) {
  constexpr index_t few = 8;
  if (keys.size() < 2 * few || !has_short_runs(source, batch, kv_head, keys, few)) return false;
  const AnyKeyRun first = source.run(batch, kv_head, keys.begin);
  const auto has_factors = [](const StoredFactors& factors) {
    return factors.rows != nullptr || factors.channels != nullptr;
  };
  return !has_factors(first.k_factors) && !has_factors(first.v_factors);
}

/// Copies rows of `n` numbers. A row of `out` has `stride` numbers: those after the first `n` become 0.
template <class T>
void copy_rows(const std::byte* const* rows, index_t count, index_t n, T* out, index_t stride) {
  for (index_t i = 0; i < count; ++i, out += stride) {
    std::memcpy(out, rows[i], static_cast<std::size_t>(n) * sizeof(T));
    std::fill(out + n, out + stride, T{});
  }
}

/// Prefetches `bytes` bytes. This function and prefetch_rows must be inlined into a function that has effects: GCC 12
/// removes calls of functions that only prefetch.
SSMAX_INLINE void prefetch_bytes(const std::byte* first, index_t bytes) {
  for (index_t i = 0; i < bytes; i += 64) __builtin_prefetch(first + i);
}

SSMAX_INLINE void prefetch_rows(const std::byte* const* rows, index_t count, index_t bytes) {
  for (index_t i = 0; i < count; ++i) prefetch_bytes(rows[i], bytes);
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
      std::memcpy(copy + i * bytes, rows[first + i], static_cast<std::size_t>(bytes));
    }
    f(first, copied);
  }
}

SSMAX_END
