// Declares the exponential of a vector.
//
// exp is computed as 2^(x·(scale.high + scale.low) - shift) with an integer shift. So the shift is exact, and
// blocks are rescaled by exact powers of two. The argument is rounded only at magnitude 1/2.
#pragma once

#include "lanes.hpp"

SSMAX_BEGIN_SHARED

/// The product c·log2(e) in two parts. Together the parts hold the double product to the last bit that
/// matters.
template <class T>
struct Scale {
  T high, low;
};

/// Upper bound for |in·scale| of a row's maximum: below it the shift is exact, with a margin.
template <class T>
inline constexpr T largest_shift = T{1 << 20};

/// Rounds to the nearest integer. Requires |product| < largest_shift. std::nearbyint is not used, because it
/// is a call into libm without SSE4.1.
template <class T>
SSMAX_INLINE T round_shift(T product) {
  constexpr T magic = sizeof(T) == sizeof(double) ? T(0x1.8p52) : T(0x1.8p23);
  return (product + magic) - magic;
}

SSMAX_END

#define SSMAX_KERNELS "../kernels/exp.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS

// Targets without a fused multiply-add have their own exponential.
SSMAX_BEGIN_DETAIL

#if defined(SSMAX_COMPILES_SCALAR)
namespace scalar {
#include "../simd/scalar_exp.inl"
}  // namespace scalar
#endif

#if defined(SSMAX_COMPILES_SIMD128)
namespace simd128 {
#include "../simd/simd128_exp.inl"
}  // namespace simd128
#endif

SSMAX_END
