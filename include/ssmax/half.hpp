/// @defgroup half Half precision (half.hpp)
/// @ingroup view
/// Storage types of 16 bits: half (IEEE binary16) and bfloat16. Kernels convert a row to float, compute in float, and
/// round the results once, to nearest even. Exception: attention may multiply bfloat16 operands directly
/// (attention.hpp). The conversions in this file define the results: vectorized conversions are bit-identical to
/// them. (A NaN stays NaN, but its payload may change.)
#pragma once

#include <cstdint>

#include "config.hpp"

/// @addtogroup half
/// @{
SSMAX_BEGIN_DATA

/// The upper 16 bits of a float: 8 bits of precision, the range of float.
struct SSMAX_VISIBLE bfloat16 {
  /// The bits in memory.
  std::uint16_t bits = 0;

  /// Makes 0.
  SSMAX_INLINE constexpr bfloat16() = default;
  /// Rounds to nearest even.
  SSMAX_INLINE constexpr explicit bfloat16(float value) {
    const auto u = __builtin_bit_cast(std::uint32_t, value);
    const bool is_nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
    // Adding 0x7FFF plus the lowest kept bit rounds to nearest even. A carry correctly increments the exponent.
    bits = is_nan ? static_cast<std::uint16_t>((u >> 16) | 0x40u)
                  : static_cast<std::uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
  }
  /// Returns the value. Exact.
  SSMAX_INLINE constexpr operator float() const {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
  }
};

/// IEEE binary16: 11 bits of precision, up to 65504, subnormal below 2^-14.
struct SSMAX_VISIBLE half {
  /// The bits in memory.
  std::uint16_t bits = 0;

  /// Makes 0.
  SSMAX_INLINE constexpr half() = default;
  /// Rounds to nearest even. Values from 65520 on become infinity.
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
      // Adding 0.5 moves the units of 2^-24 into the last bits of a float in [0.5, 1). The addition rounds to nearest
      // even.
      result = __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, magnitude) + 0.5f) - 0x3F000000u;
    } else {
      result = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    }
    bits = static_cast<std::uint16_t>(sign | result);
  }
  /// Returns the value. Exact.
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
