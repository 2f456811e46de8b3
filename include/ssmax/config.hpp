/// @defgroup config Version and macros (config.hpp)
/// Version, what a compiler must offer, index type, compiler macros, and the inline namespaces.
///
/// Which namespace a name lives in decides what may be linked with what:
///
/// `SSMAX_DATA_NAMESPACE` holds plain data that users pass through their own interfaces: views, scalings, masks,
/// scores, pools, workspaces, states, explanations, RopeOptions, KvCacheOptions and CrossEntropyOptions. Its name
/// carries the version only, so that units built with other -m flags can exchange it. Every member function there
/// is `SSMAX_INLINE`: no out-of-line copy exists that the linker could take from a unit built for a larger
/// instruction set.
///
/// `SSMAX_CODE_NAMESPACE` holds everything that is compiled to code, and the classes that own tables or that only one
/// call reads: Rope, KvCache, ScaleInvariant, OnlineSoftmax; AttentionArguments, PartialArguments, AttentionOptions,
/// BackwardArguments, AttentionGradients, DecodeArguments, RowsBackward; all of mpi. Make them in the unit that uses
/// them. Its name carries version, baseline instruction set, exception mode, assertion mode and whether the kernels
/// come with the unit, so that the linker never merges two different bodies. The name distinguishes baselines by
/// AVX-512, AVX2, FMA, AVX, SSE4 and WebAssembly's SIMD128: units that differ in smaller steps (-msse3,
/// -mbmi) share code, as they do of every other header.
///
/// `SSMAX_COMPILED_NAMESPACE` holds the kernels and the drivers, the loops that call them. Header-only, it is
/// the code namespace: every unit compiles what it calls. With `SSMAX_COMPILED`, which the CMake target
/// ssmax::compiled sets, they are declared here and compiled in that library, once, whatever the flags of the
/// units that call them; its name carries the version only. What passes between a unit and the library is
/// plain data (namespace shared). Units of both kinds may be linked into one program.
///
/// This reference leaves the inline namespaces out: what is in them is found in namespace ssmax.
/// @{
#pragma once

#if __cplusplus <= 201703L && (!defined(_MSVC_LANG) || _MSVC_LANG <= 201703L)
// No such file. GCC and Clang go on after #error, and print a thousand more; here they stop.
#include "ssmax needs C++20, as in -std=c++20"
#endif

#include <cstddef>

// The one place that names the version: CMake reads these three lines, the namespaces below are made of them.
/// Rises when the interface breaks.
#define SSMAX_VERSION_MAJOR 0
/// Rises when something is added; before 1.0 also when the interface breaks.
#define SSMAX_VERSION_MINOR 1
/// Rises when something is mended.
#define SSMAX_VERSION_PATCH 0

/// To be compared in `#if`: 1.2.3 is 10203.
#define SSMAX_VERSION (SSMAX_VERSION_MAJOR * 10000 + SSMAX_VERSION_MINOR * 100 + SSMAX_VERSION_PATCH)

#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "ssmax needs infinities and NaN: add -fno-finite-math-only after -Ofast or -ffast-math"
#endif

// The kernels round by adding and subtracting a large number, which takes float's and double's own precision.
// (16 changes the precision of _Float16 only.)
#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0 && __FLT_EVAL_METHOD__ != 16
#error "ssmax needs float and double in their own precision: build 32-bit x86 with -msse2 -mfpmath=sse"
#endif

#ifndef SSMAX_HAS_THREADS
#if defined(__STDCPP_THREADS__) && (!defined(__GLIBCXX__) || defined(_GLIBCXX_HAS_GTHREADS))
/// Whether the standard library has std::thread, and so whether there is a ThreadPool: 1 or 0. WASI, for one,
/// has neither.
#define SSMAX_HAS_THREADS 1
#else
#define SSMAX_HAS_THREADS 0
#endif
#endif

/// @}
/// @cond
#if defined(__GNUC__) || defined(__clang__)
#define SSMAX_INLINE [[gnu::always_inline]] inline
#define SSMAX_COLD [[gnu::cold, gnu::noinline]]
#elif defined(_MSC_VER)
#define SSMAX_INLINE __forceinline
#define SSMAX_COLD __declspec(noinline)
#else
#define SSMAX_INLINE inline
#define SSMAX_COLD
#endif

// For the names that pass between a unit and ssmax::compiled as a shared library: visible
// also under -fvisibility=hidden.
#if (defined(__GNUC__) || defined(__clang__)) && !defined(_WIN32)
#define SSMAX_VISIBLE [[gnu::visibility("default")]]
#else
#define SSMAX_VISIBLE
#endif

// Fully unrolls a loop over a few registers. GCC 12 at -O2 otherwise keeps the loop and its array in memory,
// which is 7 times slower.
#if defined(__GNUC__) || defined(__clang__)
#define SSMAX_UNROLL _Pragma("GCC unroll 16")
#else
#define SSMAX_UNROLL
#endif

/// @endcond

#ifndef SSMAX_ASSERTIONS
#ifdef NDEBUG
/// Whether View checks its indices: 1 in debug builds, 0 with NDEBUG, or as the user defines it.
/// @ingroup config
#define SSMAX_ASSERTIONS 0
#else
#define SSMAX_ASSERTIONS 1
#endif
#endif

/// @cond
#if SSMAX_ASSERTIONS
#include <cstdio>
#include <cstdlib>
#define SSMAX_ASSERT(condition)       \
  ((condition) ? static_cast<void>(0) \
               : (std::fprintf(stderr, "%s:%d: ssmax: %s\n", __FILE__, __LINE__, #condition), std::abort()))
#define SSMAX_ABI_ASSERTIONS _checked
#else
#define SSMAX_ASSERT(condition) static_cast<void>(0)
#define SSMAX_ABI_ASSERTIONS
#endif

#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define SSMAX_ABI_BASELINE _avx512vl
#elif defined(__AVX512F__)
#define SSMAX_ABI_BASELINE _avx512f
#elif defined(__AVX2__) && defined(__FMA__)
#define SSMAX_ABI_BASELINE _avx2_fma
#elif defined(__AVX2__)
#define SSMAX_ABI_BASELINE _avx2
#elif defined(__AVX__)
#define SSMAX_ABI_BASELINE _avx
#elif defined(__SSE4_1__)
#define SSMAX_ABI_BASELINE _sse4
#elif defined(__wasm_simd128__)
#define SSMAX_ABI_BASELINE _simd128
#else
#define SSMAX_ABI_BASELINE _baseline
#endif

#if defined(__cpp_exceptions)
#define SSMAX_ABI_EXCEPTIONS
#else
#define SSMAX_ABI_EXCEPTIONS _noexcept
#endif

// Where a unit's kernels are. A unit of the library itself (_library) shares no code with the library's
// users. Other units link the library's kernels (_linked) or hold their own, without those for the
// instruction sets that SSMAX_NO_AVX512, SSMAX_NO_AVX2, SSMAX_NO_NEON and SSMAX_NO_SIMD128 leave out (to
// compile faster), and without the extensions that SSMAX_NO_AVX512_BF16 (AMX with it), SSMAX_NO_AMX and
// SSMAX_NO_NEON_BF16 leave out.
#if defined(SSMAX_LIBRARY_UNIT)
#define SSMAX_ABI_KERNELS _library
#elif defined(SSMAX_COMPILED)
#define SSMAX_ABI_KERNELS _linked
#elif defined(SSMAX_NO_NEON) || defined(SSMAX_NO_SIMD128) || \
    (defined(SSMAX_NO_AVX2) && defined(SSMAX_NO_AVX512))
#define SSMAX_ABI_KERNELS _scalar
#elif defined(SSMAX_NO_AVX512)
#define SSMAX_ABI_KERNELS _no_avx512
#elif defined(SSMAX_NO_AVX2)
#define SSMAX_ABI_KERNELS _no_avx2
#else
#define SSMAX_ABI_KERNELS
#endif

#if defined(SSMAX_NO_AVX512_BF16) || defined(SSMAX_NO_NEON_BF16)
#define SSMAX_ABI_EXTENSIONS _no_bf16
#elif defined(SSMAX_NO_AMX)
#define SSMAX_ABI_EXTENSIONS _no_amx
#else
#define SSMAX_ABI_EXTENSIONS
#endif

#define SSMAX_CONCATENATE_(a, b, c, d, e, f) a##b##c##d##e##f
#define SSMAX_CONCATENATE(a, b, c, d, e, f) SSMAX_CONCATENATE_(a, b, c, d, e, f)
#define SSMAX_DATA_NAMESPACE SSMAX_CONCATENATE(v, SSMAX_VERSION_MAJOR, _, SSMAX_VERSION_MINOR, , )
#define SSMAX_CODE_NAMESPACE                                                                              \
  SSMAX_CONCATENATE(SSMAX_DATA_NAMESPACE, SSMAX_ABI_BASELINE, SSMAX_ABI_EXCEPTIONS, SSMAX_ABI_ASSERTIONS, \
                    SSMAX_ABI_KERNELS, SSMAX_ABI_EXTENSIONS)
#if defined(SSMAX_COMPILED)
#define SSMAX_COMPILED_NAMESPACE SSMAX_CONCATENATE(SSMAX_DATA_NAMESPACE, _library, , , , )
#else
#define SSMAX_COMPILED_NAMESPACE SSMAX_CODE_NAMESPACE
#endif

// SSMAX_BEGIN_… and SSMAX_END open and close the namespaces of a header. Between them, arithmetic is IEEE's whatever
// the flags of the unit, such as -Ofast -fno-finite-math-only. Exception: an SSMAX_INLINE function that is inlined into
// the user's own code takes the flags of that code. -ffinite-math-only cannot be switched off here: GCC 12 still
// compiles a < b as !(a >= b), and Clang's intrinsics still promise that no operand is NaN.
#if defined(__clang__)
// Exception: Clang warns of the pragma and ignores it where it has none for the target, WebAssembly for one.
#define SSMAX_UNWARNED(pragma)                                                               \
  _Pragma("clang diagnostic push") _Pragma("clang diagnostic ignored \"-Wignored-pragmas\"") \
      pragma _Pragma("clang diagnostic pop")
#define SSMAX_PUSH_ARITHMETIC SSMAX_UNWARNED(_Pragma("float_control(precise, on, push)"))
#define SSMAX_POP_ARITHMETIC SSMAX_UNWARNED(_Pragma("float_control(pop)"))
#elif defined(__GNUC__) && (defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || \
                            defined(__NO_SIGNED_ZEROS__) || defined(__NO_TRAPPING_MATH__))
#define SSMAX_PRAGMA(...) _Pragma(#__VA_ARGS__)
#define SSMAX_PUSH_ARITHMETIC                                                                            \
  SSMAX_PRAGMA(GCC push_options)                                                                         \
  SSMAX_PRAGMA(GCC optimize("no-unsafe-math-optimizations", "no-associative-math", "no-reciprocal-math", \
                            "signed-zeros", "trapping-math"))
#define SSMAX_POP_ARITHMETIC _Pragma("GCC pop_options")
#else
#define SSMAX_PUSH_ARITHMETIC
#define SSMAX_POP_ARITHMETIC
#endif
#define SSMAX_BEGIN_DATA                  \
  SSMAX_PUSH_ARITHMETIC namespace ssmax { \
    inline namespace SSMAX_DATA_NAMESPACE {
#define SSMAX_BEGIN_CODE                  \
  SSMAX_PUSH_ARITHMETIC namespace ssmax { \
    inline namespace SSMAX_CODE_NAMESPACE {
// The library's own parts: namespaces shared, detail and compiled, which are not for users.
#define SSMAX_BEGIN_SHARED                                             \
  SSMAX_PUSH_ARITHMETIC namespace ssmax::inline SSMAX_DATA_NAMESPACE { \
    namespace SSMAX_VISIBLE shared {
#define SSMAX_BEGIN_DETAIL                                             \
  SSMAX_PUSH_ARITHMETIC namespace ssmax::inline SSMAX_CODE_NAMESPACE { \
    namespace detail {
#define SSMAX_BEGIN_COMPILED                                               \
  SSMAX_PUSH_ARITHMETIC namespace ssmax::inline SSMAX_COMPILED_NAMESPACE { \
    namespace SSMAX_VISIBLE compiled {
#define SSMAX_END \
  }               \
  }               \
  SSMAX_POP_ARITHMETIC

// Whether this unit compiles drivers: every one does, header-only; with SSMAX_COMPILED, the library's own.
#if !defined(SSMAX_COMPILED) || defined(SSMAX_LIBRARY_UNIT)
#define SSMAX_COMPILES_DRIVERS 1
#else
#define SSMAX_COMPILES_DRIVERS 0
#endif

// In front of their functions that are not templates.
#if defined(SSMAX_COMPILED)
#define SSMAX_ONCE
#else
#define SSMAX_ONCE inline
#endif
/// @endcond

/// The library. What stands in a namespace within this one (detail, shared, compiled) is not for users.
/// @addtogroup config
/// @{
SSMAX_BEGIN_DATA

/// Extents, strides and counts. Signed, as in Eigen and std::span's difference type, so that i - 1 is safe.
using index_t = std::ptrdiff_t;

/// Data that the library's own parts hand each other.
namespace SSMAX_VISIBLE shared {}

SSMAX_END

SSMAX_BEGIN_DETAIL

using namespace shared;

SSMAX_END
/// @}
