// Lists the targets and their names, and declares which ones are available and which one is active.
#pragma once

#include <atomic>
#include <cstdio>

#include "../checks/error.hpp"
#include "instruction_sets.hpp"

SSMAX_BEGIN_COMPILED

/// Returns true if this build has the target's kernels and this processor runs them.
SSMAX_ONCE bool is_available(Target target);
/// Returns the target in use: at first the best one that is available, or the one in SSMAX_TARGET.
SSMAX_ONCE std::atomic<Target>& active_target_cell();

SSMAX_END

SSMAX_BEGIN_DETAIL

inline constexpr Target all_targets[] = {
#define SSMAX_ELEMENT(name, NAME) Target::name,
    SSMAX_TARGETS(SSMAX_ELEMENT)
#undef SSMAX_ELEMENT
};
inline constexpr const char* target_names[] = {
#define SSMAX_ELEMENT(name, NAME) #name,
    SSMAX_TARGETS(SSMAX_ELEMENT)
#undef SSMAX_ELEMENT
};

/// Throws with the name of the target and the names of the available targets.
[[noreturn]] SSMAX_COLD inline void fail_target(const char* function, const char* wanted,
                                                bool (*is_offered)(Target)) {
  char names[96] = "";
  std::size_t length = 0;
  for (Target target : all_targets) {
    if (!is_offered(target)) continue;
    length += static_cast<std::size_t>(std::snprintf(names + length, sizeof(names) - length, "%s%s",
                                                     length == 0 ? "" : ", ",
                                                     target_names[static_cast<int>(target)]));
  }
  fail_format("ssmax: %s \"%s\" is not available, this machine has %s", function, wanted, names);
}

SSMAX_END
