// A unit of ssmax::compiled: the kernels for one instruction set, the one that SSMAX_LIBRARY_SCALAR, _NEON, _AVX2 or
// _AVX512 names. Empty where the platform does not know it.

#include "tables.hpp"

#if defined(SSMAX_COMPILES_SCALAR)
#define SSMAX_LIBRARY_TARGET scalar
#elif defined(SSMAX_COMPILES_NEON)
#define SSMAX_LIBRARY_TARGET neon
#elif defined(SSMAX_COMPILES_AVX2)
#define SSMAX_LIBRARY_TARGET avx2
#elif defined(SSMAX_COMPILES_AVX512)
#define SSMAX_LIBRARY_TARGET avx512
#endif

#if defined(SSMAX_LIBRARY_TARGET)
namespace ssmax {
inline namespace SSMAX_COMPILED_NAMESPACE {
namespace SSMAX_VISIBLE compiled {

using namespace shared;

template <Target target, class Table>
const Table& kernel_table() {
  return detail::SSMAX_LIBRARY_TARGET::KernelTable<Table>::value;
}

#define SSMAX_INSTANTIATE(...) \
  template const __VA_ARGS__& kernel_table<Target::SSMAX_LIBRARY_TARGET, __VA_ARGS__>();
SSMAX_FOR_EACH_TABLE(SSMAX_INSTANTIATE)
#undef SSMAX_INSTANTIATE

}  // namespace compiled
}  // namespace SSMAX_COMPILED_NAMESPACE
}  // namespace ssmax
#endif
