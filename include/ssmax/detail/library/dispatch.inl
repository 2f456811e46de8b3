// A unit of ssmax::compiled: holds the active target and selects its tables.

#define SSMAX_LIBRARY_DISPATCH
#include "../dispatch/active_target.hpp"
#include "tables.hpp"

SSMAX_BEGIN_COMPILED

using namespace shared;

#define SSMAX_INSTANTIATE(...) template const __VA_ARGS__& kernels<__VA_ARGS__>();
SSMAX_FOR_EACH_TABLE(SSMAX_INSTANTIATE)
#undef SSMAX_INSTANTIATE

SSMAX_END
