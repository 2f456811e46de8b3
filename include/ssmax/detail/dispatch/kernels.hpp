// Selects the kernels that are compiled once per instruction set: tables of function pointers.
//
// Each header in detail/kernels declares a table, KernelTable<…>::value in every target's namespace, and
// compiles its text with for_each_target.inl. A unit therefore compiles only the kernels that it calls. With
// SSMAX_COMPILED a unit uses the library's tables instead.
//
// Conventions of all kernels:
// - Lengths count elements and may be 0.
// - Pointers need only the alignment of an element.
// - `in` and `out` may be the same array. The caller must exclude any other overlap.
// - Kernels never allocate or throw.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "../../eight_bit.hpp"
#include "../../half.hpp"
#include "instruction_sets.hpp"
#include "target_in_use.hpp"

#if defined(SSMAX_AVX512_EMULATION) && defined(SSMAX_COMPILES_AVX512)
#include SSMAX_AVX512_EMULATION
#elif defined(SSMAX_COMPILES_AVX2) || defined(SSMAX_COMPILES_AVX512)
#if !defined(__clang__)
// GCC 12 warns about its own _mm512_undefined_ps() after inlining it (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#elif defined(SSMAX_COMPILES_NEON)
#include <arm_neon.h>
#elif defined(SSMAX_COMPILES_SIMD128)
#include <wasm_simd128.h>
#endif

// Begin and end a region that is compiled for features of x86-64. Both are empty for an emulation.
#define SSMAX_TARGET_PRAGMA(...) _Pragma(#__VA_ARGS__)
#if defined(SSMAX_AVX512_EMULATION)
#define SSMAX_BEGIN_TARGET(features)
#define SSMAX_END_TARGET
#elif defined(__clang__)
#define SSMAX_BEGIN_TARGET(features) \
  SSMAX_TARGET_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define SSMAX_END_TARGET _Pragma("clang attribute pop")
#else
#define SSMAX_BEGIN_TARGET(features) \
  _Pragma("GCC push_options") SSMAX_TARGET_PRAGMA(GCC target(features, "tune=generic"))
#define SSMAX_END_TARGET _Pragma("GCC pop_options")
#endif

SSMAX_BEGIN_DETAIL

#define SSMAX_DECLARE(name, NAME) \
  namespace name {                \
  template <class Table>          \
  struct KernelTable;             \
  }
SSMAX_TARGETS(SSMAX_DECLARE)
#undef SSMAX_DECLARE

SSMAX_END

SSMAX_BEGIN_SHARED

/// True for tables that an extension defines itself. An extension shares all other tables with its base.
template <class Table>
inline constexpr bool has_extensions = false;

SSMAX_END

SSMAX_BEGIN_COMPILED

/// Returns a target's table. Each unit compiles its own table, or the library's unit of that target holds it.
template <Target target, class Table>
const Table& kernel_table();

/// Returns the active target's table. Example: kernels<RowKernels<float>>().
template <class Table>
const Table& kernels();

#if SSMAX_COMPILES_ALL || defined(SSMAX_LIBRARY_TARGET)
template <Target target, class Table>
const Table& kernel_table() {
#define SSMAX_TABLE_OF(name, NAME) \
  if constexpr (target == Target::name) return detail::name::KernelTable<Table>::value;
  SSMAX_TARGETS(SSMAX_TABLE_OF)
#undef SSMAX_TABLE_OF
}
#endif

#if SSMAX_COMPILES_ALL || defined(SSMAX_LIBRARY_DISPATCH)
template <class Table>
const Table& kernels() {
  switch (detail::target_in_use()) {
#define SSMAX_CASE(name, NAME)                                                                        \
  case Target::name:                                                                                  \
    if constexpr (SSMAX_HAVE_##NAME != 0) {                                                           \
      using namespace shared;                                                                         \
      return kernel_table < has_extensions<Table> ? Target::name : base_of(Target::name), Table > (); \
    }                                                                                                 \
    break;
    SSMAX_TARGETS(SSMAX_CASE)
#undef SSMAX_CASE
  }
  return kernel_table<Target::scalar, Table>();
}
#endif

SSMAX_END

SSMAX_BEGIN_DETAIL

using compiled::kernels;

SSMAX_END
