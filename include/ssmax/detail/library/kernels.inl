// A unit of ssmax::compiled: holds the kernels for one instruction set, SSMAX_LIBRARY_TARGET. The build also
// defines SSMAX_LIBRARY_ followed by the name in capitals. The unit is empty on platforms without that
// instruction set.

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
