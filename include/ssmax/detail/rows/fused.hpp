// Computes a·b + c in double with one rounding.
#pragma once

#include <cmath>
#include <cstdint>

#include "../../config.hpp"

SSMAX_BEGIN_DETAIL

#if defined(__clang__)

/// Returns x rounded to its 26 leading bits.
inline double leading_half(double x) {
  const std::uint64_t unit = std::uint64_t{1} << 27;
  return __builtin_bit_cast(double, (__builtin_bit_cast(std::uint64_t, x) + unit / 2) & ~(unit - 1));
}

/// Returns a·b + c as if the product were exact (T. J. Dekker, 1971). The result is exact if c is -a·b
/// rounded. This code replaces std::fma for Clang: with -Ofast, Clang computes std::fma with two roundings if
/// the unit's flags lack the instruction, even between SSMAX_BEGIN and SSMAX_END.
inline double fused(double a, double b, double c) {
  const double product = a * b, sum = product + c;
  const double a_high = leading_half(a), a_low = a - a_high;
  const double b_high = leading_half(b), b_low = b - b_high;
  const double of_product = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low;
  const double added = sum - product;
  const double of_sum = (product - (sum - added)) + (c - added);
  const double result = sum + (of_sum + of_product);
  return std::isfinite(result) ? result : sum;  // infinite arguments or halves
}

#else

inline double fused(double a, double b, double c) { return std::fma(a, b, c); }

#endif

SSMAX_END
