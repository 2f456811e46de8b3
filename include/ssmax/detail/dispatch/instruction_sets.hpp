// Lists the instruction sets that have kernels.
//
// | macro | meaning |
// |---|---|
// | SSMAX_HAVE_… | 1 if a build has kernels for the instruction set, else 0 |
// | SSMAX_COMPILES_… | defined if this unit compiles the kernels |
//
// A header-only unit compiles all kernels of the build. With SSMAX_COMPILED, only the library's kernel units
// compile kernels: one instruction set each.
//
// To add an instruction set, add:
// 1. a row to SSMAX_TARGETS and its macros in this file,
// 2. the required processor features to processor.hpp,
// 3. a region to for_each_target.inl,
// 4. its operations to simd/.
//
// An extension adds products of bfloat16 to an instruction set and otherwise equals it. It needs a row in
// SSMAX_TARGETS, a row in SSMAX_EXTENSIONS, one in bf16.hpp, and a region in for_each_extension.inl or
// for_each_matrix.inl.
#pragma once

#include "../../config.hpp"

// Expands to apply(name, NAME) for each target, in rising order of preference.
#define SSMAX_TARGETS(apply)                                                                  \
  apply(scalar, SCALAR) apply(neon, NEON) apply(neon_bf16, NEON_BF16) apply(simd128, SIMD128) \
      apply(avx2, AVX2) apply(avx512, AVX512) apply(avx512_bf16, AVX512_BF16) apply(amx, AMX)

// Expands to apply(name, base) for each extension: base is the instruction set that it extends.
#define SSMAX_EXTENSIONS(apply) apply(neon_bf16, neon) apply(avx512_bf16, avx512) apply(amx, avx512)

#define SSMAX_HAVE_SCALAR 1

#if (defined(__GNUC__) || defined(__clang__)) && defined(__aarch64__) && !defined(SSMAX_NO_NEON)
#define SSMAX_HAVE_NEON 1
#else
#define SSMAX_HAVE_NEON 0
#endif

// WebAssembly: the unit's flag -msimd128 decides. There is no choice at run time, because an engine rejects a
// module that contains an unsupported instruction.
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

// A test build sets SSMAX_AVX512_EMULATION to a header whose functions replace the intrinsics of AVX-512.
// This build leaves out the kernels for AVX2.
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

// BFDOT. Clang before 16 offers its intrinsics only if the unit's own flags enable the feature.
#if SSMAX_HAVE_NEON && !defined(__clang__) && defined(__linux__) && !defined(SSMAX_NO_NEON_BF16)
#define SSMAX_HAVE_NEON_BF16 1
#else
#define SSMAX_HAVE_NEON_BF16 0
#endif

#if SSMAX_HAVE_AVX512 && !defined(SSMAX_NO_AVX512_BF16)
#define SSMAX_HAVE_AVX512_BF16 1
#else
#define SSMAX_HAVE_AVX512_BF16 0
#endif

// AMX needs Linux: a process requests permission for the tile registers from the kernel. Weights are rounded
// as for AVX512_BF16.
#if SSMAX_HAVE_AVX512_BF16 && defined(__linux__) && !defined(SSMAX_NO_AMX)
#define SSMAX_HAVE_AMX 1
#else
#define SSMAX_HAVE_AMX 0
#endif

// 1 if this unit compiles the kernels of all instruction sets: every header-only unit, and ssmax.cpp.
#if !defined(SSMAX_COMPILED) || defined(SSMAX_LIBRARY_WHOLE)
#define SSMAX_COMPILES_ALL 1
#else
#define SSMAX_COMPILES_ALL 0
#endif

#if SSMAX_HAVE_NEON_BF16 && (SSMAX_COMPILES_ALL || defined(SSMAX_LIBRARY_NEON_BF16))
#define SSMAX_COMPILES_NEON_BF16 1
#endif
#if SSMAX_HAVE_AMX && (SSMAX_COMPILES_ALL || defined(SSMAX_LIBRARY_AMX))
#define SSMAX_COMPILES_AMX 1
#endif
#if SSMAX_HAVE_AVX512_BF16 && \
    (SSMAX_COMPILES_ALL || defined(SSMAX_COMPILES_AMX) || defined(SSMAX_LIBRARY_AVX512_BF16))
#define SSMAX_COMPILES_AVX512_BF16 1
#endif

#if SSMAX_COMPILES_ALL || defined(SSMAX_LIBRARY_SCALAR)
#define SSMAX_COMPILES_SCALAR 1
#endif
#if SSMAX_HAVE_NEON && \
    (SSMAX_COMPILES_ALL || defined(SSMAX_LIBRARY_NEON) || defined(SSMAX_COMPILES_NEON_BF16))
#define SSMAX_COMPILES_NEON 1
#endif
#if SSMAX_HAVE_SIMD128 && (SSMAX_COMPILES_ALL || defined(SSMAX_LIBRARY_SIMD128))
#define SSMAX_COMPILES_SIMD128 1
#endif
#if SSMAX_HAVE_AVX2 && (SSMAX_COMPILES_ALL || defined(SSMAX_LIBRARY_AVX2))
#define SSMAX_COMPILES_AVX2 1
#endif
#if SSMAX_HAVE_AVX512 && \
    (SSMAX_COMPILES_ALL || defined(SSMAX_LIBRARY_AVX512) || defined(SSMAX_COMPILES_AVX512_BF16))
#define SSMAX_COMPILES_AVX512 1
#endif
#if defined(SSMAX_COMPILES_SCALAR) || defined(SSMAX_COMPILES_NEON) || defined(SSMAX_COMPILES_SIMD128) || \
    defined(SSMAX_COMPILES_AVX2) || defined(SSMAX_COMPILES_AVX512)
#define SSMAX_COMPILES_KERNELS 1
#endif

SSMAX_BEGIN_DATA

/// scalar, neon, neon_bf16, simd128, avx2, avx512, avx512_bf16, amx: in rising order of preference.
/// @ingroup target
enum class Target {
#define SSMAX_NAME(name, NAME) name,
  SSMAX_TARGETS(SSMAX_NAME)
#undef SSMAX_NAME
};

namespace SSMAX_VISIBLE shared {

/// Returns the instruction set that a target extends, or the target itself.
SSMAX_INLINE constexpr Target base_of(Target target) {
#define SSMAX_BASE(name, base) \
  if (target == Target::name) return Target::base;
  SSMAX_EXTENSIONS(SSMAX_BASE)
#undef SSMAX_BASE
  return target;
}

}  // namespace shared

SSMAX_END
