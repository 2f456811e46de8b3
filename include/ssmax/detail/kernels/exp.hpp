// The exponential of a vector.
//
// exp is 2^(x·(scale.high + scale.low) - shift) with an integer shift. So the shift is exact,
// every rescaling between blocks is by an exact power of two, and the only rounding of the
// argument is at magnitude 1/2.
#pragma once

#include "lanes.hpp"

SSMAX_BEGIN_SHARED

/// c·log2(e) in two parts: together they hold the double product to the last bit that matters.
template <class T>
struct Scale {
  T high, low;
};

/// |in·scale| of a row's maximum must stay below this for its shift to be exact with room to spare.
template <class T>
inline constexpr T largest_shift = T{1 << 20};

SSMAX_END

#define SSMAX_KERNELS "../kernels/exp.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS

// Targets without a fused multiply-add have one of their own.
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
