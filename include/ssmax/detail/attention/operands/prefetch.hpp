// Decides which keys and values few queries prefetch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../terms/problem.hpp"
#include "gather.hpp"

SSMAX_BEGIN_DETAIL

/// The largest count of numbers in the keys and values of a task that are not prefetched. They may lie in the
/// second-level cache, where prefetching costs a tenth of the time.
inline constexpr index_t max_cached_numbers = index_t{256} << 10;

/// The largest number of bytes of keys and values, of all sequences and kv heads, that two to four queries do not
/// prefetch. They may lie in the third-level cache, if it holds the layers of the model.
inline constexpr index_t max_shared_bytes = index_t{8} << 20;

/// Returns whether the keys and values of a task may lie beyond the second-level cache. `keys` may be reversed.
template <class Compute>
bool exceeds_cache(const Problem<Compute>& problem, KeyRange keys) {
  const index_t count = std::clamp<index_t>(keys.size(), 0, max_cached_numbers + 1);  // the product fits
  return count * (problem.width() + problem.value_width()) > max_cached_numbers;
}

/// Returns how many keys before its use a task of `rows` rows over `keys` prefetches a value or, in float, a key.
/// 0: it does not prefetch. Keys of bfloat16 are prefetched at twice the distance. On the bf16 path, so are keys and
/// values of 8 bits, which are dequantized before the products of a block. Two to four queries do not prefetch from
/// the third-level cache. One query does not prefetch float. It prefetches rows of 8 bits 192 keys before their use.
/// Exception: one query does not prefetch Q8_0, whose groups count as wide numbers. Not measured with AVX-512.
/// Measured: docs/measured.md.
template <class Compute>
index_t keys_to_prefetch(const Problem<Compute>& problem, index_t rows, KeyRange keys, index_t element_size) {
  const bool is_wide = element_size >= static_cast<index_t>(sizeof(float));
  if (rows == 1) return is_wide ? 0 : element_size == 1 ? 192 : 64;
  if (!exceeds_cache(problem, keys)) return 0;
  if (rows > 4) return 64;
  const KeySourceShape shape = problem.keys.shape();
  const index_t bytes =
      shape.batch * shape.kv_heads * keys.size() * (shape.width + shape.value_width) * element_size;
  return bytes <= max_shared_bytes ? 0 : is_wide ? 32 : 64;
}

/// The number of rows after which a row of a long list is prefetched.
inline constexpr index_t listed_ahead = 64;

/// The largest number of bytes of listed keys and values that are prefetched for the next kv head.
inline constexpr index_t max_next_bytes = index_t{16} << 10;

/// The longest run of keys whose kernels prefetch the runs after it. Kernels of longer runs prefetch within the run.
inline constexpr index_t short_run = 256;

/// Returns whether a task takes rows of several kv heads whose keys lie between each other. It then reads a few keys of
/// each in turn. Exception: tasks of 8 bits, not measured, take one kv head. Measured: docs/measured.md.
template <class Compute>
bool takes_several_heads(const Problem<Compute>& problem) {
  return std::min(problem.keys.k_size(), problem.keys.v_size()) >= 2;
}

/// Returns how many keys such a task reads of each kv head in turn. Measured: docs/measured.md.
inline index_t keys_in_turn(index_t element_size) {
  return element_size >= static_cast<index_t>(sizeof(float)) ? 16 : 32;
}

/// Returns whether tasks of several kv heads read a few keys of each in turn, judged by the runs of one sequence. If
/// another sequence has short runs and unknown distances between kv heads, DecodeTask reads its runs without a list.
/// Runs with factors of channels have a sum of their own, so they are not cut.
template <class Compute>
bool may_cut_runs(const AnyKeys<Compute>& source, index_t batch, index_t key) {
  if (source.run(batch, 0, key).v_factors.channels != nullptr) return false;
  return source.head_distance().is_known ||
         !has_short_runs(source, batch, 0, {key, source.stored(batch).end}, short_run);
}

/// Returns the distance in bytes from the keys, or the values, of a short run to those that its kernels prefetch. They
/// lie at least 64 positions later, in the same place of a later run if all runs are equally long. `key` is the first
/// position of the run.
///
/// Only keys and values of 8 bits are prefetched in this way. The rows of other short runs are listed (row_list.hpp).
/// Rejected alternative, for pages: a copy of short runs side by side before the products. It was slower for 12 kv
/// heads of bfloat16.
template <bool are_values, class Compute>
index_t bytes_to_later_run(const AnyKeys<Compute>& source, index_t batch, index_t kv_head, index_t key,
                           const AnyKeyRun& run) {
  const index_t later = key + (63 / run.count + 1) * run.count;
  if (later >= source.stored(batch).end) return 0;
  const AnyKeyRun to = source.run(batch, kv_head, later);
  const auto address = [](const void* rows) { return reinterpret_cast<std::intptr_t>(rows); };
  return are_values ? address(to.v) - address(run.v) : address(to.k) - address(run.k);
}

/// Returns keys_to_prefetch on the decode path for long runs of tensors [batch, key, kv_heads, channel]. A distance of
/// 64 keys is better for rows of 128 bytes from memory, and worse in the caches. Measured: docs/measured.md.
inline index_t interleaved_keys_to_prefetch(index_t row_bytes) {
  return std::clamp<index_t>(2048 / std::max<index_t>(row_bytes, 1), 8, 16);
}

/// The distances at which a task of few queries prefetches.
struct Prefetching {
  index_t k_keys = 0, v_keys = 0;  // in a long run
  bool exceeds_cache = false;

  Prefetching() = default;
  template <class Compute>
  Prefetching(const Problem<Compute>& problem, index_t batch, index_t rows, KeyRange keys)
      : k_keys(keys_to_prefetch(problem, rows, keys, problem.keys.k_size())),
        v_keys(keys_to_prefetch(problem, rows, keys, problem.keys.v_size())),
        exceeds_cache(detail::exceeds_cache(problem, keys)) {
    if (keys.size() <= 0 || !interleaves_heads(problem.keys, batch, keys.begin, 1)) return;
    k_keys = interleaved_keys_to_prefetch(problem.keys.k_row() * problem.keys.k_size());
    v_keys = interleaved_keys_to_prefetch(problem.keys.v_row() * problem.keys.v_size());
  }

  /// Returns the distance in bytes from the keys, or the values, of a run to those that its kernels prefetch.
  template <bool are_values, class Compute>
  index_t bytes(const AnyKeys<Compute>& source, index_t batch, index_t kv_head, index_t key,
                const AnyKeyRun& run) const {
    if (exceeds_cache && run.count <= short_run)
      return bytes_to_later_run<are_values>(source, batch, kv_head, key, run);
    return are_values ? bytes_ahead(v_keys, run.v_stride, source.v_size())
                      : bytes_ahead(k_keys, run.k_stride, source.k_size());
  }
};

SSMAX_END
