// The kernels that are compiled once per instruction set: tables of function pointers, and the choice of one.
//
// Each header in detail/kernels declares a table, KernelTable<…>::value of every target's namespace, and
// has for_each_target.inl compile its text. So a unit compiles the kernels that it calls, and no others. With
// SSMAX_COMPILED it compiles none and uses the library's tables.
//
// Conventions of all kernels: lengths count elements and may be 0; pointers need only element
// alignment; `in` and `out` may be the same array, any other overlap is the caller's error; nothing is
// allocated, nothing throws.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "../../half.hpp"
#include "../../target.hpp"
#include "instruction_sets.hpp"

#if defined(SSMAX_AVX512_EMULATION) && defined(SSMAX_COMPILES_AVX512)
#include SSMAX_AVX512_EMULATION
#elif defined(SSMAX_COMPILES_AVX2) || defined(SSMAX_COMPILES_AVX512)
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
#elif defined(SSMAX_COMPILES_NEON)
#include <arm_neon.h>
#elif defined(SSMAX_COMPILES_SIMD128)
#include <wasm_simd128.h>
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

/// Tables of which an extension of an instruction set has its own. It shares all others with its base.
template <class Table>
inline constexpr bool has_extensions = false;

SSMAX_END

SSMAX_BEGIN_COMPILED

/// A target's table: every unit has its own, or the library has it in the unit of that target.
template <Target target, class Table>
const Table& kernel_table();

/// The active target's table, as in kernels<RowKernels<float>>().
template <class Table>
const Table& kernels();

#if !defined(SSMAX_COMPILED) || defined(SSMAX_LIBRARY_TARGET)
template <Target target, class Table>
const Table& kernel_table() {
#define SSMAX_TABLE_OF(name, NAME) \
  if constexpr (target == Target::name) return detail::name::KernelTable<Table>::value;
  SSMAX_TARGETS(SSMAX_TABLE_OF)
#undef SSMAX_TABLE_OF
}
#endif

#if !defined(SSMAX_COMPILED) || defined(SSMAX_LIBRARY_DISPATCH)
template <class Table>
const Table& kernels() {
  switch (active_target()) {
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
