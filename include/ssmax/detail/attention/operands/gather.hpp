// Finds, prefetches and copies the rows of short runs: pages, and sources with an index per key. A call of a kernel for
// such a run would cost as much as its products.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../terms/keys.hpp"

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

/// Returns whether the keys of kv heads 0 and 1 at one position lie nearer than `count` keys of a kv head are long. For
/// one key: in tensors [batch, key, kv_heads, channel]. For a chunk of keys: also in pages.
template <class Compute>
bool interleaves_heads(const AnyKeys<Compute>& source, index_t batch, index_t key, index_t count) {
  if (source.shape().kv_heads < 2) return false;
  const AnyKeyRun first = source.run(batch, 0, key), second = source.run(batch, 1, key);
  // In double: the stride of a single key may be any number.
  const auto bytes = static_cast<double>(reinterpret_cast<std::intptr_t>(second.k)) -
                     static_cast<double>(reinterpret_cast<std::intptr_t>(first.k));
  const auto key_bytes = static_cast<double>(first.k_stride) * static_cast<double>(source.k_size());
  return std::abs(bytes) < static_cast<double>(count) * std::abs(key_bytes);
}

/// Returns how many of the first rows lie at equal distances, and writes the distance in bytes to `distance`.
inline index_t equally_distant(const std::byte* const* rows, index_t count, index_t& distance) {
  distance = 0;
  if (count < 2) return count;
  const auto from_last = [&](index_t i) {
    return static_cast<index_t>(reinterpret_cast<std::intptr_t>(rows[i]) -
                                reinterpret_cast<std::intptr_t>(rows[i - 1]));
  };
  distance = from_last(1);
  index_t i = 2;
  while (i < count && from_last(i) == distance) ++i;
  return i;
}

/// Copies rows of `n` numbers. A row of `out` has `stride` numbers: those after the first `n` become 0.
template <class T>
void copy_rows(const std::byte* const* rows, index_t count, index_t n, T* out, index_t stride) {
  const index_t bytes = n * static_cast<index_t>(sizeof(T));
  for (index_t i = 0, copied; i < count; i += copied, out += copied * stride) {
    index_t distance;
    copied = equally_distant(rows + i, count - i, distance);
    if (distance != bytes || n != stride) copied = 1;
    std::memcpy(out, rows[i], static_cast<std::size_t>(copied * bytes));
    std::fill(out + copied * n, out + copied * stride, T{});
  }
}

/// Prefetches `bytes` bytes. This function and prefetch_rows must be inlined into a function that has effects: GCC 12
/// removes calls of functions that only prefetch.
SSMAX_INLINE void prefetch_bytes(const std::byte* first, index_t bytes) {
  for (index_t i = 0; i < bytes; i += 64) __builtin_prefetch(first + i);
}

SSMAX_INLINE void prefetch_rows(const std::byte* const* rows, index_t count, index_t offset, index_t bytes) {
  for (index_t i = 0; i < count; ++i) prefetch_bytes(rows[i] + offset, bytes);
}

SSMAX_END
