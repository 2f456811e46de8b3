// Defines which targets are available and which one is active: in every unit, or once in the compiled
// library.
#pragma once

#include <cstdlib>
#include <cstring>
#include <iterator>

#include "processor.hpp"
#include "targets.hpp"

SSMAX_BEGIN_COMPILED

SSMAX_ONCE bool is_available(Target target) {
  switch (target) {
#define SSMAX_CASE(name, NAME) \
  case Target::name:           \
    return SSMAX_HAVE_##NAME != 0 && detail::processor_runs(target);
    SSMAX_TARGETS(SSMAX_CASE)
#undef SSMAX_CASE
  }
  return false;
}

SSMAX_COLD SSMAX_ONCE Target initial_target() {
  const char* wanted = std::getenv("SSMAX_TARGET");
  const bool any = wanted == nullptr || *wanted == '\0';
  for (std::size_t i = std::size(detail::all_targets); i-- > 0;) {
    const Target target = detail::all_targets[i];
    if (!is_available(target)) continue;
    if (any ? detail::is_worth_it(target)
            : std::strcmp(wanted, detail::target_names[static_cast<int>(target)]) == 0)
      return target;
  }
  detail::fail_target("SSMAX_TARGET", wanted, is_available);
}

SSMAX_ONCE std::atomic<Target>& active_target_cell() {
  static std::atomic<Target> cell{initial_target()};
  return cell;
}

SSMAX_END
