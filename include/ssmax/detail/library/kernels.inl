// A unit of ssmax::compiled: the kernels for one instruction set, which SSMAX_LIBRARY_TARGET names.
// (SSMAX_LIBRARY_ with the name in capitals behind it is defined as well.) Empty where the platform does
// not know it.

#include "tables.hpp"

#if defined(SSMAX_COMPILES_KERNELS)
SSMAX_BEGIN_COMPILED

using namespace shared;

#define SSMAX_INSTANTIATE(...) \
  template const __VA_ARGS__& kernel_table<Target::SSMAX_LIBRARY_TARGET, __VA_ARGS__>();
#if defined(SSMAX_LIBRARY_NEON_BF16) || defined(SSMAX_LIBRARY_AVX512_BF16) || defined(SSMAX_LIBRARY_AMX)
SSMAX_EXTENSION_TABLES(SSMAX_INSTANTIATE)
#else
SSMAX_FOR_EACH_TABLE(SSMAX_INSTANTIATE)
#endif
#undef SSMAX_INSTANTIATE

SSMAX_END
#endif
