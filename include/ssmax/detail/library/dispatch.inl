// A unit of ssmax::compiled: which target is in use, and its tables.

#include "../dispatch/active_target.hpp"
#include "tables.hpp"

namespace ssmax {
inline namespace SSMAX_COMPILED_NAMESPACE {
namespace SSMAX_VISIBLE compiled {

using namespace shared;

template <class Table>
const Table& kernels() {
  switch (active_target()) {
#if defined(SSMAX_HAVE_NEON)
    case Target::neon:
      return kernel_table<Target::neon, Table>();
#endif
#if defined(SSMAX_HAVE_AVX2)
    case Target::avx2:
      return kernel_table<Target::avx2, Table>();
#endif
#if defined(SSMAX_HAVE_AVX512)
    case Target::avx512:
      return kernel_table<Target::avx512, Table>();
#endif
    default:
      return kernel_table<Target::scalar, Table>();
  }
}

#define SSMAX_INSTANTIATE(...) template const __VA_ARGS__& kernels<__VA_ARGS__>();
SSMAX_FOR_EACH_TABLE(SSMAX_INSTANTIATE)
#undef SSMAX_INSTANTIATE

}  // namespace compiled
}  // namespace SSMAX_COMPILED_NAMESPACE
}  // namespace ssmax
