// The only place that opens target regions: includes each instruction set's vectors and the kernels' one text
// into a namespace of their own, compiled for that instruction set whatever the flags of the translation
// unit.
//
// Inside a region: no standard header, no lambda (GCC does not give it the region's target), and only feature names
// that both compilers know. In GCC also tune=generic: what -march=native tunes for (Zen 3, to GCC 12 on a Zen 4) made
// rows of 16 take 0.52 instead of 0.37 ns an element, and the kernels should not depend on the unit's flags. Everything
// here is in the code namespace, so units built with other -m flags stay apart.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "../config.hpp"
#include "../half.hpp"
#include "leaves.hpp"

#if (defined(__GNUC__) || defined(__clang__)) && defined(__x86_64__)
#if defined(SSMAX_AVX512_EMULATION)
// A test build: AVX-512 kernels on a machine without AVX-512. The macro holds the header to include; its
// names replace the intrinsics, so AVX2 stays out.
#include SSMAX_AVX512_EMULATION
#define SSMAX_HAVE_AVX512 1
#else
#if !defined(__clang__)
// GCC 12 warns of its own _mm512_undefined_ps() once that is inlined (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#define SSMAX_HAVE_AVX2 1
#define SSMAX_HAVE_AVX512 1
#endif
#elif (defined(__GNUC__) || defined(__clang__)) && defined(__aarch64__)
#include <arm_neon.h>
#define SSMAX_HAVE_NEON 1
#endif

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

namespace scalar {
#include "simd/scalar.inl"
//
#include "kernels/all.inl"
//
#include "simd/scalar_exp.inl"
}  // namespace scalar

#if defined(SSMAX_HAVE_NEON)
namespace neon {
#include "simd/neon.inl"
//
#include "kernels/all.inl"
}  // namespace neon
#endif

#if defined(SSMAX_HAVE_AVX2)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,tune=generic")
#endif
namespace avx2 {
#include "simd/avx2.inl"
//
#include "kernels/all.inl"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#if defined(SSMAX_HAVE_AVX512)
#if defined(SSMAX_AVX512_EMULATION)
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,tune=generic")
#endif
namespace avx512 {
#include "simd/avx512.inl"
//
#include "kernels/all.inl"
}  // namespace avx512
#if defined(SSMAX_AVX512_EMULATION)
#elif defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
