// The instruction sets that there are kernels for. SSMAX_HAVE_…: whether a build has kernels for one.
// SSMAX_COMPILES_…: defined where this unit compiles them. Header-only, a unit compiles all that the build
// has; with SSMAX_COMPILED none, but for the library's units of kernels, which compile one each.
//
// To add one: a row here, what the processor must offer (processor.hpp), a region (for_each_target.inl) and
// its operations (simd/).
#pragma once

#include "../../config.hpp"

// apply(name, NAME) for each, in rising order of preference.
#define SSMAX_TARGETS(apply) \
  apply(scalar, SCALAR) apply(neon, NEON) apply(simd128, SIMD128) apply(avx2, AVX2) apply(avx512, AVX512)

#define SSMAX_HAVE_SCALAR 1

#if (defined(__GNUC__) || defined(__clang__)) && defined(__aarch64__) && !defined(SSMAX_NO_NEON)
#define SSMAX_HAVE_NEON 1
#else
#define SSMAX_HAVE_NEON 0
#endif

// WebAssembly: an engine refuses a module that has an instruction it does not know, so nothing is left to
// choose at run time. The unit's flag decides (-msimd128).
#if defined(__wasm_simd128__) && !defined(SSMAX_NO_SIMD128)
#define SSMAX_HAVE_SIMD128 1
#else
#define SSMAX_HAVE_SIMD128 0
#endif

#if (defined(__GNUC__) || defined(__clang__)) && defined(__x86_64__)
#define SSMAX_IS_X86_64 1
#else
#define SSMAX_IS_X86_64 0
#endif

// SSMAX_AVX512_EMULATION, in a test build, is a header whose names replace the intrinsics of AVX-512. Kernels
// for AVX2 then stay out.
#if SSMAX_IS_X86_64 && !defined(SSMAX_NO_AVX2) && !defined(SSMAX_AVX512_EMULATION)
#define SSMAX_HAVE_AVX2 1
#else
#define SSMAX_HAVE_AVX2 0
#endif

#if SSMAX_IS_X86_64 && !defined(SSMAX_NO_AVX512)
#define SSMAX_HAVE_AVX512 1
#else
#define SSMAX_HAVE_AVX512 0
#endif

#if !defined(SSMAX_COMPILED) || defined(SSMAX_LIBRARY_SCALAR)
#define SSMAX_COMPILES_SCALAR 1
#endif
#if SSMAX_HAVE_NEON && (!defined(SSMAX_COMPILED) || defined(SSMAX_LIBRARY_NEON))
#define SSMAX_COMPILES_NEON 1
#endif
#if SSMAX_HAVE_SIMD128 && (!defined(SSMAX_COMPILED) || defined(SSMAX_LIBRARY_SIMD128))
#define SSMAX_COMPILES_SIMD128 1
#endif
#if SSMAX_HAVE_AVX2 && (!defined(SSMAX_COMPILED) || defined(SSMAX_LIBRARY_AVX2))
#define SSMAX_COMPILES_AVX2 1
#endif
#if SSMAX_HAVE_AVX512 && (!defined(SSMAX_COMPILED) || defined(SSMAX_LIBRARY_AVX512))
#define SSMAX_COMPILES_AVX512 1
#endif
#if defined(SSMAX_COMPILES_SCALAR) || defined(SSMAX_COMPILES_NEON) || defined(SSMAX_COMPILES_SIMD128) || \
    defined(SSMAX_COMPILES_AVX2) || defined(SSMAX_COMPILES_AVX512)
#define SSMAX_COMPILES_KERNELS 1
#endif

namespace ssmax {
inline namespace SSMAX_DATA_NAMESPACE {

/// scalar, neon, simd128, avx2, avx512: in rising order of preference.
/// @ingroup target
enum class Target {
#define SSMAX_NAME(name, NAME) name,
  SSMAX_TARGETS(SSMAX_NAME)
#undef SSMAX_NAME
};

}  // namespace SSMAX_DATA_NAMESPACE
}  // namespace ssmax
