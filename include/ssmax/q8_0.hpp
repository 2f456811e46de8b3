/// @defgroup q8_0 Caches in groups of 32 (q8_0.hpp)
/// @ingroup kv_cache
/// The storage type of ggml's q8_0: groups of 32 numbers with one half factor, in 34 bytes. The bytes are those of
/// ggml.
///
///     KvCache<Q8_0> cache({.kv_heads = 2, .width = 64, .capacity = 32'768});
///     cache.append(k_new, v_new, &rope);                        // rounds to groups
///     attention({.q = q_new, .keys = cache, .out = out, .rope = &rope}, scaling, Causal{});
///
/// `append` rounds as ggml does. M is the largest magnitude of a group:
///
/// | | |
/// |---|---|
/// | d | M / 127 in float |
/// | scale | d, rounded to half |
/// | values[i] | x[i] · (1 / d), rounded to the nearest integer, halves away from 0. Exception: 0 if d is 0 or 1 / d overflows |
/// | number i | values[i] · scale |
///
/// | M | largest error of a number, up to M / 2^21 |
/// |---|---|
/// | below 127 · 2^-14 (0.0078) | M / 254 + 127 · 2^-25 |
/// | below 127 · 65520 (8 million) | M / 254 + M / 2^11 |
/// | larger | the factor is infinity: the numbers are infinite or NaN |
///
/// A group with a NaN or an infinity has the factor NaN: all its numbers are NaN. The results of queries that see the
/// row are then NaN.
///
/// Widths of keys and values must be multiples of 32. In a view over Q8_0, extents and strides count groups: PagedKeys
/// and IndexedKeys over a view with 4 groups in the last extent have width 128. Decode in float reads
/// the groups in place. The bf16 path (attention.hpp) dequantizes rows to bfloat16, as for types of 8 bits. The type is
/// for caches and sources of keys. Queries, results and rows of logits cannot have this type.
#pragma once

#include "config.hpp"
#include "eight_bit.hpp"
#include "half.hpp"

/// @addtogroup q8_0
/// @{
SSMAX_BEGIN_DATA

/// A group of 32 numbers: number i is values[i] · scale.
struct SSMAX_VISIBLE Q8_0 {
  /// The number of numbers.
  static constexpr index_t group = 32;

  /// The factor.
  half scale;
  /// The integers that the factor multiplies.
  Int8 values[group];

  /// Makes 32 zeros.
  SSMAX_INLINE constexpr Q8_0() = default;
};

SSMAX_END
/// @}
