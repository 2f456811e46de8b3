// Tells finite numbers from NaN and infinity by their bits: right under -ffinite-math-only, too, where a compiler
// takes std::isfinite for true and x != x for false.
#pragma once

#include <cstdint>

#include "../../config.hpp"
#include "finite.hpp"

SSMAX_BEGIN
inline namespace SSMAX_DATA_NAMESPACE {
namespace SSMAX_VISIBLE shared {

SSMAX_INLINE constexpr bool is_finite(float x) {
  return (__builtin_bit_cast(std::uint32_t, x) & 0x7F800000u) != 0x7F800000u;
}
SSMAX_INLINE constexpr bool is_finite(double x) {
  constexpr std::uint64_t exponent = 0x7FF0000000000000u;
  return (__builtin_bit_cast(std::uint64_t, x) & exponent) != exponent;
}

}  // namespace shared
}  // namespace SSMAX_DATA_NAMESPACE
SSMAX_END
