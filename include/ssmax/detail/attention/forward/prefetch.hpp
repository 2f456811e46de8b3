// Decides whether few queries prefetch keys and values, and prefetches those in short runs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../call/problem.hpp"

SSMAX_BEGIN_DETAIL

/// The largest count of numbers in the keys and values of a task that are not prefetched. They may lie in the
/// second-level cache, where prefetching costs a tenth of the time.
inline constexpr index_t max_cached_numbers = index_t{256} << 10;

/// Returns whether the keys and values of a task may lie beyond the second-level cache.
template <class Compute>
bool exceeds_cache(const Problem<Compute>& problem, KeyRange keys) {
  return keys.size() > max_cached_numbers / std::max<index_t>(1, problem.width() + problem.value_width());
}

/// Returns how many keys before its use a task over `keys` prefetches a value or, in float, a key. 0: it does not
/// prefetch. Keys of bfloat16 are prefetched at twice the distance. Measured on Zen 5 with bfloat16, 8 queries, from
/// memory:
///
/// | distance of values, of keys | width 64 | width 128 |
/// |---|---|---|
/// | 0 | 12 GB/s | 14 GB/s |
/// | 64, 64 | 24 GB/s | 21 GB/s |
/// | 64, 128 | 26 GB/s | 28 GB/s |
/// | 128, 192 | 26 GB/s | 28 GB/s |
/// | 128, 256 | 25 GB/s | 27 GB/s |
///
/// With float, 8 queries and width 64: 37 instead of 21 GB/s from the third-level cache, 27 instead of 18 from memory.
/// kernels/decode.inl has the figures of 1 to 4 queries. Exception: four queries of float rows of more than 64
/// channels do not prefetch. With prefetching, they reach 0.85 of the rate from the third-level cache and 1.03 from
/// memory.
template <class Compute>
index_t keys_to_prefetch(const Problem<Compute>& problem, KeyRange keys) {
  const bool is_wide = problem.keys.k_kind() == ElementKind::compute && problem.width() > 64;
  if (problem.rows() == 4 && is_wide) return 0;
  return exceeds_cache(problem, keys) ? 64 : 0;
}

/// Prefetches `count` rows. Always inlined: GCC removes calls of a function that only prefetches.
SSMAX_INLINE void prefetch_rows_of(const void* rows, index_t stride_bytes, index_t row_bytes, index_t count) {
  for (index_t i = 0; i < count; ++i) {
    const auto row = reinterpret_cast<std::uintptr_t>(rows) + static_cast<std::uintptr_t>(i * stride_bytes);
    for (std::uintptr_t byte = 0; byte < static_cast<std::uintptr_t>(row_bytes); byte += 64)
      __builtin_prefetch(reinterpret_cast<const void*>(row + byte));
  }
}

/// For a run of at most 64 keys: prefetches the keys, or the values, of the positions 64 after those of the run,
/// within `keys`. Kernels prefetch within a run only. Time relative to a KvCache, pages of 16 keys in random order
/// from memory, one query per kv head, Zen 5:
///
/// | pool | bfloat16, 12 kv heads of width 64: without; with | float: without; with |
/// |---|---|---|
/// | [pages, 16, kv_heads, d] | 5.8; 2.7 | 2.7; 1.9 |
/// | [pages, kv_heads, 16, d] | 5.1; 2.8 | 2.1; 1.7 |
template <bool are_values, class Compute>
SSMAX_INLINE void prefetch_next_runs(const Problem<Compute>& problem, index_t batch, index_t kv_head,
                                     KeyRange run, KeyRange keys) {
  constexpr index_t distance = 64;
  if (run.size() > distance) return;
  const AnyKeys<Compute>& source = problem.keys;
  const index_t end = std::min(run.end + distance, keys.end);
  for (index_t key = run.begin + distance; key < end;) {
    const AnyKeyRun next = source.run(batch, kv_head, key);
    const index_t count = std::min(next.count, end - key);
    if constexpr (are_values) {
      prefetch_rows_of(next.v, next.v_stride * source.v_size(), problem.value_width() * source.v_size(),
                       count);
    } else {
      prefetch_rows_of(next.k, next.k_stride * source.k_size(), problem.width() * source.k_size(), count);
    }
    key += count;
  }
}

SSMAX_END
