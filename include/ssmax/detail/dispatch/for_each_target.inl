// Includes SSMAX_KERNELS, the text of some kernels, once for each instruction set that this unit compiles:
// into a namespace of its own, compiled for that instruction set whatever the flags of the unit. The only
// place that opens target regions.
//
// Inside a region: no standard header, no lambda (GCC does not give it the region's target), and only
// feature names that both compilers know. In GCC also tune=generic, since the kernels should not depend
// on the unit's flags: what -march=native tunes for (Zen 3, to GCC 12 on a Zen 4) made rows of 16 take
// 0.52 instead of 0.37 ns an element. Everything here is in the code namespace, so units built with
// other -m flags stay apart.

SSMAX_BEGIN_DETAIL

#if defined(SSMAX_COMPILES_SCALAR)
namespace scalar {
#include "../simd/scalar.inl"
//
#include SSMAX_KERNELS
}  // namespace scalar
#endif

#if defined(SSMAX_COMPILES_NEON)
namespace neon {
#include "../simd/neon.inl"
//
#include SSMAX_KERNELS
}  // namespace neon
#endif

#if defined(SSMAX_COMPILES_SIMD128)
namespace simd128 {
#include "../simd/simd128.inl"
//
#include SSMAX_KERNELS
}  // namespace simd128
#endif

#if defined(SSMAX_COMPILES_AVX2)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,tune=generic")
#endif
namespace avx2 {
#include "../simd/avx2.inl"
//
#include SSMAX_KERNELS
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#if defined(SSMAX_COMPILES_AVX512)
#if defined(SSMAX_AVX512_EMULATION)
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,tune=generic")
#endif
namespace avx512 {
#include "../simd/avx512.inl"
//
#include SSMAX_KERNELS
}  // namespace avx512
#if defined(SSMAX_AVX512_EMULATION)
#elif defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

SSMAX_END
