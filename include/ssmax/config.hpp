/// @defgroup config Version and macros (config.hpp)
/// Version, required compiler features, index type, compiler macros, and the inline namespaces.
///
/// The namespace of a name decides which translation units may exchange the type or share the code:
///
/// | namespace | holds | its name carries |
/// |---|---|---|
/// | `SSMAX_DATA_NAMESPACE` | plain data that you pass through your own interfaces | version |
/// | `SSMAX_CODE_NAMESPACE` | all compiled code; classes that own tables or belong to one call | version and modes |
/// | `SSMAX_COMPILED_NAMESPACE` | kernels and drivers (the loops that call kernels) | version and layout, or modes |
///
/// **Data**: views, scalings, masks, scores, pools, workspaces, states, explanations, RopeOptions, KvCacheOptions,
/// PagedKvCacheOptions and CrossEntropyOptions. Units that you build with different -m flags can exchange them. Every
/// member function there is `SSMAX_INLINE`. So no out-of-line copy exists that the linker could take from a unit built
/// for a larger instruction set.
///
/// **Code**: Rope, KvCache, PagedKvCache, PageTable, PagedKeys, MatrixRuns, Tree, ScaleInvariant, OnlineSoftmax;
/// AttentionArguments, BackwardArguments, AttentionGradients, Keys, Plan, BackwardPlan, RowsBackward; all of mpi. Make
/// such an object in the unit that uses the object. The modes are: the baseline instruction set, exceptions,
/// assertions, and which kernels the unit holds. So the linker never merges two different bodies. The name
/// distinguishes baselines by AVX-512, AVX2, FMA, AVX, SSE4 and WebAssembly's SIMD128. Units that differ in smaller
/// steps (-msse3, -mbmi) share code, as with every other header.
///
/// **Compiled**: without `SSMAX_COMPILED`, this is the code namespace, and every unit compiles what it calls. The
/// CMake target ssmax::compiled sets `SSMAX_COMPILED`. Then headers only declare the kernels and drivers, and the
/// library compiles them once, whatever the flags of the calling units. A unit passes plain data (namespace shared)
/// to the library. The name carries the layout of this data: a unit does not link a library of another layout. You may
/// link units of both kinds into one program.
///
/// This reference omits the inline namespaces: it lists every name in namespace ssmax.
/// @{
#pragma once

#if __cplusplus <= 201703L && (!defined(_MSVC_LANG) || _MSVC_LANG <= 201703L)
// This file does not exist. GCC and Clang continue after #error and print a thousand more errors. Here they stop.
#include "ssmax needs C++20, as in -std=c++20"
#endif

#include <cstddef>

// The only place with the version. CMake reads the next three definitions. The namespaces below are made of them.
/// Increases if the interface breaks.
#define SSMAX_VERSION_MAJOR 0
/// Increases if something is added. Before 1.0, also if the interface breaks.
#define SSMAX_VERSION_MINOR 1
/// Increases for fixes.
#define SSMAX_VERSION_PATCH 0

/// The version as a number for `#if`: 1.2.3 is 10203.
#define SSMAX_VERSION (SSMAX_VERSION_MAJOR * 10000 + SSMAX_VERSION_MINOR * 100 + SSMAX_VERSION_PATCH)

#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "ssmax needs infinities and NaN: add -fno-finite-math-only after -Ofast or -ffast-math"
#endif

// The kernels round by adding and subtracting a large number. This requires that float and double are computed in
// their own precision. (The value 16 concerns _Float16 only.)
#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0 && __FLT_EVAL_METHOD__ != 16
#error "ssmax needs float and double in their own precision: build 32-bit x86 with -msse2 -mfpmath=sse"
#endif

#ifndef SSMAX_HAS_THREADS
#if defined(__STDCPP_THREADS__) && (!defined(__GLIBCXX__) || defined(_GLIBCXX_HAS_GTHREADS))
/// 1 if the standard library has std::thread, and so ThreadPool exists; 0 otherwise, for example for WASI.
#define SSMAX_HAS_THREADS 1
#else
#define SSMAX_HAS_THREADS 0
#endif
#endif

/// @}
/// @cond
#if defined(__GNUC__) || defined(__clang__)
#define SSMAX_INLINE [[gnu::always_inline]] inline
#define SSMAX_INLINE_LAMBDA __attribute__((always_inline))  // after the parameters
#define SSMAX_COLD [[gnu::cold, gnu::noinline]]
#elif defined(_MSC_VER)
#define SSMAX_INLINE __forceinline
#define SSMAX_INLINE_LAMBDA
#define SSMAX_COLD __declspec(noinline)
#else
#define SSMAX_INLINE inline
#define SSMAX_INLINE_LAMBDA
#define SSMAX_COLD
#endif

// Makes a name visible with `-fvisibility=hidden`: for names that pass between a unit and a shared ssmax::compiled.
#if (defined(__GNUC__) || defined(__clang__)) && !defined(_WIN32)
#define SSMAX_VISIBLE [[gnu::visibility("default")]]
#else
#define SSMAX_VISIBLE
#endif

// Ends the declaration of a function that stands for a mistake: every call is an error. Clang prints the text, other
// compilers the function with its template arguments.
#if defined(__clang__)
#define SSMAX_REFUSE(text)                                                              \
  _Pragma("clang diagnostic push") _Pragma("clang diagnostic ignored \"-Wgcc-compat\"") \
      __attribute__((diagnose_if(true, text, "error"))) _Pragma("clang diagnostic pop")
// The same for a constructor, which braces may call: there, Clang ignores the attribute.
#define SSMAX_REFUSE_BRACES(text) \
  { static_assert(std::is_void_v<Mistake>, text); }
#else
#define SSMAX_REFUSE(text) = delete
#define SSMAX_REFUSE_BRACES(text) = delete
#endif

// Fully unrolls a loop over a few registers. Without it, GCC 12 at -O2 keeps the loop and its array in memory, which
// is 7 times slower.
#if defined(__GNUC__) || defined(__clang__)
#define SSMAX_UNROLL _Pragma("GCC unroll 16")
#else
#define SSMAX_UNROLL
#endif

/// @endcond

#ifndef SSMAX_ASSERTIONS
#ifdef NDEBUG
/// 1 if View checks its indices, 0 otherwise. By default 1 in debug builds and 0 with NDEBUG. You may define it.
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

// Where the kernels of a unit are. Units of the library (_library) share no code with users of the library. Units
// with SSMAX_COMPILED link the library's kernels (_linked). Other units hold kernels of their own. To compile faster,
// SSMAX_NO_AVX512, SSMAX_NO_AVX2, SSMAX_NO_NEON and SSMAX_NO_SIMD128 omit the kernels of an instruction set.
// SSMAX_NO_AVX512_BF16 (which includes AMX), SSMAX_NO_AMX and SSMAX_NO_NEON_BF16 omit an extension.
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

// Names the layout of the data that a unit passes to the library. tests/layout.py writes it.
#define SSMAX_LAYOUT x72905eb6

#define SSMAX_CONCATENATE_(a, b, c, d, e, f) a##b##c##d##e##f
#define SSMAX_CONCATENATE(a, b, c, d, e, f) SSMAX_CONCATENATE_(a, b, c, d, e, f)
#define SSMAX_DATA_NAMESPACE SSMAX_CONCATENATE(v, SSMAX_VERSION_MAJOR, _, SSMAX_VERSION_MINOR, , )
#define SSMAX_CODE_NAMESPACE                                                                              \
  SSMAX_CONCATENATE(SSMAX_DATA_NAMESPACE, SSMAX_ABI_BASELINE, SSMAX_ABI_EXCEPTIONS, SSMAX_ABI_ASSERTIONS, \
                    SSMAX_ABI_KERNELS, SSMAX_ABI_EXTENSIONS)
#if defined(SSMAX_COMPILED)
#define SSMAX_COMPILED_NAMESPACE SSMAX_CONCATENATE(SSMAX_DATA_NAMESPACE, _library_, SSMAX_LAYOUT, , , )
#else
#define SSMAX_COMPILED_NAMESPACE SSMAX_CODE_NAMESPACE
#endif

// SSMAX_BEGIN_… and SSMAX_END open and close the namespaces of a header. Between them, arithmetic follows IEEE 754
// for all flags of the unit, such as -Ofast -fno-finite-math-only. Exception: an SSMAX_INLINE function that is
// inlined into your code takes the flags of that code. A pragma cannot switch off -ffinite-math-only. GCC 12 still
// compiles a < b as !(a >= b), and Clang's intrinsics still promise that no operand is NaN.
#if defined(__clang__)
// Exception: Clang ignores the pragma, with a warning, for targets that lack it, such as WebAssembly.
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
// Namespaces of the library's own parts: shared, detail and compiled. They are not for users.
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

// 1 if this unit compiles drivers: every unit without SSMAX_COMPILED, and the units of the library.
#if !defined(SSMAX_COMPILED) || defined(SSMAX_LIBRARY_UNIT)
#define SSMAX_COMPILES_DRIVERS 1
#else
#define SSMAX_COMPILES_DRIVERS 0
#endif

// Precedes functions of the drivers that are not templates.
#if defined(SSMAX_COMPILED)
#define SSMAX_ONCE
#else
#define SSMAX_ONCE inline
#endif
/// @endcond

/// The library. The namespaces detail, shared and compiled are internal.
/// @addtogroup config
/// @{
SSMAX_BEGIN_DATA

/// The type of extents, strides and counts. Signed, as in Eigen and std::span's difference type, so that i - 1 is
/// safe.
using index_t = std::ptrdiff_t;

/// Data that the library's parts pass to each other.
namespace SSMAX_VISIBLE shared {}

SSMAX_END

SSMAX_BEGIN_DETAIL

using namespace shared;

SSMAX_END
/// @}
