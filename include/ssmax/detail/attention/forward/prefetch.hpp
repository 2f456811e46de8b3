// Decides whether few queries prefetch keys and values.
#pragma once

#include <algorithm>

#include "../call/problem.hpp"

SSMAX_BEGIN_DETAIL

/// The largest count of numbers in the keys and values of a task that are not prefetched. They may lie in the
/// second-level cache, where prefetching costs a tenth of the time.
inline constexpr index_t max_cached_numbers = index_t{256} << 10;

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
  const index_t width = std::max<index_t>(1, problem.width() + problem.value_width());
  const bool is_wide = problem.keys.k_kind() == ElementKind::compute && problem.width() > 64;
  if (problem.rows() == 4 && is_wide) return 0;
  return keys.size() <= max_cached_numbers / width ? 0 : 64;
}

SSMAX_END
