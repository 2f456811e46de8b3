// The kernels that are compiled once per instruction set: tables of function pointers, and which of them is in use.
//
// Each header in detail/kernels declares a table, KernelTable<…>::value of every target's namespace, and has
// for_each_target.inl compile its text. So a unit compiles the kernels that it calls, and no others; with SSMAX_COMPILED
// none, and the library's tables are used.
//
// Conventions of all kernels: lengths count elements and may be 0; pointers need only element alignment; `in` and `out`
// may be the same array, any other overlap is the caller's error; nothing is allocated, nothing throws.
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
#endif

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

namespace scalar {
template <class Table>
struct KernelTable;
}
namespace neon {
template <class Table>
struct KernelTable;
}
namespace avx2 {
template <class Table>
struct KernelTable;
}
namespace avx512 {
template <class Table>
struct KernelTable;
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE

inline namespace SSMAX_COMPILED_NAMESPACE {
namespace SSMAX_VISIBLE compiled {

/// The active target's table, as in kernels<RowKernels<float>>().
template <class Table>
const Table& kernels();

#if !defined(SSMAX_COMPILED)
template <class Table>
const Table& kernels() {
  switch (active_target()) {
#if defined(SSMAX_HAVE_NEON)
    case Target::neon:
      return detail::neon::KernelTable<Table>::value;
#endif
#if defined(SSMAX_HAVE_AVX2)
    case Target::avx2:
      return detail::avx2::KernelTable<Table>::value;
#endif
#if defined(SSMAX_HAVE_AVX512)
    case Target::avx512:
      return detail::avx512::KernelTable<Table>::value;
#endif
    default:
      return detail::scalar::KernelTable<Table>::value;
  }
}
#endif

}  // namespace compiled
}  // namespace SSMAX_COMPILED_NAMESPACE

inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

using compiled::kernels;

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
