/// @defgroup target Instruction sets (target.hpp)
/// Which instruction set the kernels use. Chosen once, at the first call: the best that this processor has,
/// or the one named by the environment variable `SSMAX_TARGET` (scalar, avx2, avx512, avx512_bf16, amx, neon,
/// neon_bf16, simd128). No compile flag is involved, but for WebAssembly's -msimd128. On Intel's processors
/// avx512_bf16 has to be named: it came out slower than avx512 there.
#pragma once

#include <atomic>
#include <cstdio>
#include <vector>

#include "config.hpp"
#include "detail/checks/error.hpp"
#include "detail/dispatch/instruction_sets.hpp"

/// @addtogroup target
/// @{
SSMAX_BEGIN_COMPILED

/// This build holds the target's kernels, and this processor runs them.
SSMAX_ONCE bool is_available(Target target);
/// The target in use: at first the best that is available, or what SSMAX_TARGET names.
SSMAX_ONCE std::atomic<Target>& active_target_cell();

SSMAX_END

SSMAX_BEGIN_CODE

namespace detail {

inline constexpr Target all_targets[] = {
#define SSMAX_ELEMENT(name, NAME) Target::name,
    SSMAX_TARGETS(SSMAX_ELEMENT)
#undef SSMAX_ELEMENT
};

}  // namespace detail

/// "scalar", "neon", "neon_bf16", "simd128", "avx2", "avx512", "avx512_bf16", "amx".
[[nodiscard]] inline const char* target_name(Target target) {
  constexpr const char* names[] = {
#define SSMAX_ELEMENT(name, NAME) #name,
      SSMAX_TARGETS(SSMAX_ELEMENT)
#undef SSMAX_ELEMENT
  };
  return names[static_cast<int>(target)];
}

/// Every target that this build holds and this processor runs, in rising order of preference.
[[nodiscard]] inline std::vector<Target> available_targets() {
  std::vector<Target> targets;
  for (Target target : detail::all_targets) {
    if (compiled::is_available(target)) targets.push_back(target);
  }
  return targets;
}

namespace detail {

/// Fails with what was asked for and the names of what there is.
[[noreturn]] SSMAX_COLD inline void fail_target(const char* function, const char* wanted) {
  char names[96] = "";
  std::size_t length = 0;
  for (Target target : all_targets) {
    if (!compiled::is_available(target)) continue;
    length += static_cast<std::size_t>(std::snprintf(names + length, sizeof(names) - length, "%s%s",
                                                     length == 0 ? "" : ", ", target_name(target)));
  }
  fail_format("ssmax: %s \"%s\" is not available, this machine has %s", function, wanted, names);
}

}  // namespace detail

/// The target in use. Throws std::invalid_argument if SSMAX_TARGET names one that is unknown or that this
/// machine lacks.
[[nodiscard]] inline Target active_target() {
  return compiled::active_target_cell().load(std::memory_order_relaxed);
}

/// Uses another target from now on, in every thread, of units built with the same flags (header-only) or of
/// all units that link ssmax::compiled. For tests and measurements. Throws std::invalid_argument if the
/// target is not available.
inline void set_active_target(Target target) {
  if (!compiled::is_available(target)) detail::fail_target("set_active_target", target_name(target));
  compiled::active_target_cell().store(target, std::memory_order_relaxed);
}

SSMAX_END
/// @}

#if !defined(SSMAX_COMPILED)
#include "detail/dispatch/active_target.hpp"
#endif
