// Includes SSMAX_KERNELS, the text of some kernels, once for each instruction set that this unit compiles.
// Each copy has a namespace of its own and is compiled for its instruction set, whatever the flags of the
// unit. Only this file, for_each_extension.inl and for_each_matrix.inl open target regions.
//
// Rules inside a region:
// - Standard headers must not be included.
// - Feature names must exist in both compilers.
//
// With GCC the region sets tune=generic, so that the kernels do not depend on the unit's flags. GCC 12 with
// -march=native tunes for Zen 3 on a Zen 4: rows of 16 then took 0.52 instead of 0.37 ns per element.
//
// All kernels are in the code namespace. Units with different -m flags therefore have separate kernels.

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
SSMAX_BEGIN_TARGET("avx2,fma,f16c")
namespace avx2 {
#include "../simd/avx2.inl"
//
#include SSMAX_KERNELS
}  // namespace avx2
SSMAX_END_TARGET
#endif

#if defined(SSMAX_COMPILES_AVX512)
SSMAX_BEGIN_TARGET("avx512f")
namespace avx512 {
#include "../simd/avx512.inl"
//
#include SSMAX_KERNELS
}  // namespace avx512
SSMAX_END_TARGET
#endif

SSMAX_END
