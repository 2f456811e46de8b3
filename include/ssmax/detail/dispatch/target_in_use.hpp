// Returns the target in use. A header-only unit defines it, the compiled library defines it otherwise.
#pragma once

#include <atomic>

#include "targets.hpp"
#if !defined(SSMAX_COMPILED)
#include "active_target.hpp"
#endif

SSMAX_BEGIN_DETAIL

inline Target target_in_use() { return compiled::active_target_cell().load(std::memory_order_relaxed); }

SSMAX_END
