/// @defgroup eight_bit Caches in 8 bits (eight_bit.hpp)
/// @ingroup kv_cache
/// Storage types of 8 bits for caches: Int8, Fp8E4M3 and Fp8E5M2. A cache stores one float factor per row of keys or
/// values, beside the numbers of the row.
///
///     KvCache<Int8> cache({.kv_heads = 2, .width = 64, .capacity = 32'768});
///     cache.append(k_new, v_new, &rope);                        // rounds to 8 bits
///     attention({.q = q_new, .keys = cache, .out = out, .rope = &rope}, scaling, Causal{});
///
/// `append` divides a row by its factor and rounds the quotients to nearest even. The decode path multiplies the
/// products of a row by its factor. M is the largest magnitude of the row:
///
/// | type | factor | largest error of an element x | codes |
/// |---|---|---|---|
/// | Int8 | M / 127 | M / 254 | integers in [-127, 127] |
/// | Fp8E4M3 | M / 448 | max(abs(x) / 16, M / 458752) | 3 bits of mantissa, no infinity, NaN is 0x7F and 0xFF |
/// | Fp8E5M2 | M / 57344 | max(abs(x) / 8, M / 7516192768) | 2 bits of mantissa, infinities and NaN as in half |
///
/// The rounding of the quotient and of the factor adds at most M / 2^22 to the error. Exception: the smallest factor is
/// 2^-126, so rows with M below 2^-110 may have an error of 2^-127. The factor of a row of zeros is 1. A row with a NaN
/// or an infinity has the factor NaN: the results of queries that see the row are NaN.
///
/// The types of q, k and v decide how the numbers are read:
///
/// | q | path | numbers of 8 bits |
/// |---|---|---|
/// | any | decode | read in place |
/// | any | prefill | each row is widened to float first |
/// | bfloat16 | bf16 (attention.hpp) | each row is dequantized to bfloat16 first |
///
/// Dequantizing rounds element · factor once to nearest even. So the results of the bf16 path are bit-identical to
/// those over a bfloat16 cache of the dequantized numbers. The rounding changes an element x by at most abs(x) / 256,
/// less than the error of the table. Exception: with `rotate_source_keys`, the call rotates keys before it rounds them.
///
/// The types are for caches and for sources that return k_scales and v_scales (key_source.hpp), such as PagedKeys
/// with the factors of a pool (KeyScales). A source may also return a factor per channel for the keys of a
/// run, as PagedKeys does with ChannelScales: dequantizing then rounds element · factor of the row · factor of the
/// channel. A NaN code of a source stays NaN. Queries, results and rows of logits cannot have these types.

/// @defgroup q8_0 Caches in groups of 32 (eight_bit.hpp)
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
/// | values[i] | x[i] · (1 / d), rounded to nearest, halves away from 0. Exception: 0 if d is 0 or 1 / d overflows |
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
/// over a view with 4 groups in the last extent has width 128. Decode in float reads the groups in place. The bf16 path
/// (attention.hpp) dequantizes rows to bfloat16, as for types of 8 bits. The type is for caches and sources of keys.
/// Queries, results and rows of logits cannot have this type.
#pragma once

#include <concepts>
#include <cstdint>

#include "config.hpp"
#include "half.hpp"

/// @addtogroup eight_bit
/// @{
SSMAX_BEGIN_DETAIL

/// Rounds to a float of 8 bits with `mantissa` bits of mantissa, to nearest even. Finite values saturate: `largest` is
/// the bit pattern of the largest finite value, as float. Returns `infinity` for infinities.
template <int mantissa, std::uint32_t largest, std::uint32_t infinity>
SSMAX_INLINE constexpr std::uint8_t to_fp8(float value) {
  constexpr std::uint32_t bias = (1u << (6 - mantissa)) - 1u, dropped = 23 - mantissa;
  constexpr std::uint32_t smallest_normal = (128u - bias) << 23;
  const auto u = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t sign = (u >> 24) & 0x80u, magnitude = u & 0x7FFFFFFFu;
  std::uint32_t result;
  if (magnitude > 0x7F800000u) {
    result = 0x7Fu;
  } else if (magnitude == 0x7F800000u) {
    result = infinity;
  } else if (magnitude < smallest_normal) {
    // The last bit of this power of two is the smallest subnormal. The addition rounds to nearest even.
    constexpr std::uint32_t power = smallest_normal + (dropped << 23);
    result = __builtin_bit_cast(std::uint32_t,
                                __builtin_bit_cast(float, magnitude) + __builtin_bit_cast(float, power)) -
             power;
  } else {
    const std::uint32_t finite = magnitude < largest ? magnitude : largest;
    const std::uint32_t odd = (finite >> dropped) & 1u;
    result = (finite - ((127u - bias) << 23) + (1u << (dropped - 1)) - 1u + odd) >> dropped;
  }
  return static_cast<std::uint8_t>(sign | result);
}

SSMAX_END

SSMAX_BEGIN_DATA

/// An integer in [-127, 127].
struct SSMAX_VISIBLE Int8 {
  /// The integer in memory.
  std::int8_t value = 0;
  /// The largest value.
  static constexpr float largest = 127;

  /// Makes 0.
  SSMAX_INLINE constexpr Int8() = default;
  /// Rounds to nearest even and saturates. NaN becomes 0.
  SSMAX_INLINE constexpr explicit Int8(float x) {
    const float bounded = x < -largest ? -largest : x > largest ? largest : x == x ? x : 0;
    // The last bit of a float near 1.5·2^23 is 1.
    const float sum = bounded + 0x1.8p23f;
    value = static_cast<std::int8_t>(__builtin_bit_cast(std::int32_t, sum) - 0x4B400000);
  }
  /// Returns the value. Exact.
  SSMAX_INLINE constexpr operator float() const { return static_cast<float>(value); }
};

/// e4m3 of the Open Compute Project: 4 bits of precision, up to 448, subnormal below 2^-6. It has no infinity.
struct SSMAX_VISIBLE Fp8E4M3 {
  /// The bits in memory.
  std::uint8_t bits = 0;
  /// The largest value.
  static constexpr float largest = 448;

  /// Makes 0.
  SSMAX_INLINE constexpr Fp8E4M3() = default;
  /// Rounds to nearest even and saturates. An infinity becomes NaN.
  SSMAX_INLINE constexpr explicit Fp8E4M3(float x) : bits(detail::to_fp8<3, 0x43E00000u, 0x7Fu>(x)) {}
  /// Returns the value. Exact.
  SSMAX_INLINE constexpr operator float() const {
    // Half's bias of the exponent is larger by 8. Bit 7 of `high`, the top bit of half's exponent, is set for NaN only.
    const unsigned magnitude = bits & 0x7Fu, high = (bits & 0x80u) << 1 | ((magnitude + 1) & 0x80u);
    half scaled;
    scaled.bits = static_cast<std::uint16_t>((high | magnitude) << 7);
    return static_cast<float>(scaled) * 256;
  }
};

/// e5m2 of the Open Compute Project: the upper 8 bits of a half. 3 bits of precision, up to 57344, subnormal below
/// 2^-14.
struct SSMAX_VISIBLE Fp8E5M2 {
  /// The bits in memory.
  std::uint8_t bits = 0;
  /// The largest finite value.
  static constexpr float largest = 57344;

  /// Makes 0.
  SSMAX_INLINE constexpr Fp8E5M2() = default;
  /// Rounds to nearest even. Finite values saturate.
  SSMAX_INLINE constexpr explicit Fp8E5M2(float x) : bits(detail::to_fp8<2, 0x47600000u, 0x7Cu>(x)) {}
  /// Returns the value. Exact.
  SSMAX_INLINE constexpr operator float() const {
    half same;
    same.bits = static_cast<std::uint16_t>(bits << 8);
    return static_cast<float>(same);
  }
};

SSMAX_END

SSMAX_BEGIN_DETAIL

template <class X>
concept EightBitStorage = std::same_as<X, Int8> || std::same_as<X, Fp8E4M3> || std::same_as<X, Fp8E5M2>;

SSMAX_END
/// @}

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
