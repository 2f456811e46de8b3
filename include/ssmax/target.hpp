/// @defgroup target Instruction sets (target.hpp)
/// Targets: the instruction sets of the kernels. At the first call, the library selects the best target of this
/// processor. Exception: the environment variable `SSMAX_TARGET` selects another target (scalar, avx2, avx512,
/// avx512_bf16, amx, neon, neon_bf16, simd128). You need no compile flag. Exception: WebAssembly needs -msimd128. On
/// Intel's processors the library does not select avx512_bf16, because avx512 was faster there.
#pragma once

#include <atomic>
#include <vector>

#include "detail/dispatch/target_in_use.hpp"

/// @addtogroup target
/// @{
SSMAX_BEGIN_CODE

/// Returns the name: "scalar", "neon", "neon_bf16", "simd128", "avx2", "avx512", "avx512_bf16" or "amx".
[[nodiscard]] inline const char* target_name(Target target) {
  return detail::target_names[static_cast<int>(target)];
}

/// Returns every target that this build has and this processor runs, in increasing order of preference.
[[nodiscard]] inline std::vector<Target> available_targets() {
  std::vector<Target> targets;
  for (Target target : detail::all_targets) {
    if (compiled::is_available(target)) targets.push_back(target);
  }
  return targets;
}

/// Returns the target in use. Throws std::invalid_argument if SSMAX_TARGET has an unknown name or a target that is
/// not available.
[[nodiscard]] inline Target active_target() { return detail::target_in_use(); }

/// Selects another target for all later calls of every thread. The selection applies to all units that are built with
/// the same flags (header-only) or to all units that link ssmax::compiled. No other thread may be in a call of the
/// library: such a call could mix kernels of both targets. Throws std::invalid_argument if the
/// target is not available.
inline void set_active_target(Target target) {
  if (!compiled::is_available(target))
    detail::fail_target("set_active_target", target_name(target), compiled::is_available);
  compiled::active_target_cell().store(target, std::memory_order_relaxed);
}

SSMAX_END
/// @}
