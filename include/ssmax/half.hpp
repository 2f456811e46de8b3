/// @defgroup half Half precision (half.hpp)
/// @ingroup view
/// Storage in 16 bits: half (IEEE binary16) and bfloat16. Arithmetic is done in float: kernels widen a row,
/// compute, and round once on the way out, to nearest even. (But attention has products of bfloat16.) These
/// scalar conversions are the definition that the vector ones must meet bit for bit (NaN stays NaN; its payload
/// is not kept).
#pragma once

#include <cstdint>

#include "config.hpp"

/// @addtogroup half
/// @{
SSMAX_BEGIN_DATA

/// The upper 16 bits of a float: 8 bits of precision, the range of float.
struct SSMAX_VISIBLE bfloat16 {
  /// As it lies in memory.
  std::uint16_t bits = 0;

  /// Zero.
  SSMAX_INLINE constexpr bfloat16() = default;
  /// Rounds to nearest even.
  SSMAX_INLINE constexpr explicit bfloat16(float value) {
    const auto u = __builtin_bit_cast(std::uint32_t, value);
    const bool is_nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
    // Adding 0x7FFF plus the lowest kept bit rounds to nearest even; a carry runs into the exponent as it
    // should.
    bits = is_nan ? static_cast<std::uint16_t>((u >> 16) | 0x40u)
                  : static_cast<std::uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
  }
  /// Exact.
  SSMAX_INLINE constexpr operator float() const {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
  }
};

/// IEEE binary16: 11 bits of precision, up to 65504, subnormal below 2^-14.
struct SSMAX_VISIBLE half {
  /// As it lies in memory.
  std::uint16_t bits = 0;

  /// Zero.
  SSMAX_INLINE constexpr half() = default;
  /// Rounds to nearest even; from 65520 on to infinity.
  SSMAX_INLINE constexpr explicit half(float value) {
    const auto u = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t sign = (u >> 16) & 0x8000u;
    const std::uint32_t magnitude = u & 0x7FFFFFFFu;
    std::uint32_t result;
    if (magnitude > 0x7F800000u) {
      result = 0x7E00u;
    } else if (magnitude >= 0x477FF000u) {  // 65520 and above round to infinity
      result = 0x7C00u;
    } else if (magnitude < 0x38800000u) {  // below 2^-14: subnormal, in units of 2^-24
      // Adding 0.5 puts the units of 2^-24 into the last bits of a float in [0.5, 1); the addition rounds to
      // even.
      result = __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, magnitude) + 0.5f) - 0x3F000000u;
    } else {
      result = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    }
    bits = static_cast<std::uint16_t>(sign | result);
  }
  /// Exact.
  SSMAX_INLINE constexpr operator float() const {
    const std::uint32_t sign = (bits & 0x8000u) << 16;
    const std::uint32_t exponent = (bits >> 10) & 0x1Fu;
    const std::uint32_t mantissa = bits & 0x3FFu;
    std::uint32_t magnitude;
    if (exponent == 0x1Fu) {
      magnitude = 0x7F800000u | (mantissa << 13) | (mantissa != 0 ? 0x400000u : 0u);
    } else if (exponent != 0) {
      magnitude = ((exponent + 112u) << 23) | (mantissa << 13);
    } else {
      magnitude = __builtin_bit_cast(std::uint32_t, static_cast<float>(mantissa) * 0x1p-24f);
    }
    return __builtin_bit_cast(float, sign | magnitude);
  }
};

SSMAX_END
/// @}
