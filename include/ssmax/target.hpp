// Which instruction set the kernels use. Chosen once, at the first call: the best that this processor has, or
// the one named by the environment variable SSMAX_TARGET (scalar, avx2, avx512, neon). No compile flag is
// involved.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "config.hpp"
#include "detail/checks/error.hpp"
#include "detail/dispatch/instruction_sets.hpp"
#include "detail/dispatch/processor.hpp"

namespace ssmax {
inline namespace SSMAX_DATA_NAMESPACE {

/// In rising order of preference.
enum class Target { scalar, neon, avx2, avx512 };

}  // namespace SSMAX_DATA_NAMESPACE

inline namespace SSMAX_CODE_NAMESPACE {

/// "scalar", "neon", "avx2", "avx512".
[[nodiscard]] inline const char* target_name(Target target) {
  constexpr const char* names[] = {"scalar", "neon", "avx2", "avx512"};
  return names[static_cast<int>(target)];
}

namespace detail {

inline bool is_available(Target target) {
  switch (target) {
    case Target::scalar:
      return true;
    case Target::neon:
#if defined(SSMAX_HAVE_NEON)
      return true;
#else
      return false;
#endif
    case Target::avx2:
#if defined(SSMAX_HAVE_AVX2)
      return ask_processor().avx2_fma_f16c;
#else
      return false;
#endif
    case Target::avx512:
#if defined(SSMAX_AVX512_EMULATION)
      return true;
#elif defined(SSMAX_HAVE_AVX512)
      return ask_processor().avx512f;
#else
      return false;
#endif
  }
  return false;
}

}  // namespace detail

/// Every target that this build holds and this processor runs, in rising order of preference.
[[nodiscard]] inline std::vector<Target> available_targets() {
  std::vector<Target> targets;
  for (Target target : {Target::scalar, Target::neon, Target::avx2, Target::avx512}) {
    if (detail::is_available(target)) targets.push_back(target);
  }
  return targets;
}

namespace detail {

/// Fails with what was asked for and the names of what there is.
[[noreturn]] SSMAX_COLD inline void fail_target(const char* function, const char* wanted) {
  char names[64] = "";
  std::size_t length = 0;
  for (Target target : {Target::scalar, Target::neon, Target::avx2, Target::avx512}) {
    if (!is_available(target)) continue;
    length += static_cast<std::size_t>(std::snprintf(names + length, sizeof(names) - length, "%s%s",
                                                     length == 0 ? "" : ", ", target_name(target)));
  }
  fail_format("ssmax: %s \"%s\" is not available, this machine has %s", function, wanted, names);
}

SSMAX_COLD inline Target initial_target() {
  const char* wanted = std::getenv("SSMAX_TARGET");
  const bool any = wanted == nullptr || *wanted == '\0';
  for (Target target : {Target::avx512, Target::avx2, Target::neon, Target::scalar}) {
    if (is_available(target) && (any || std::strcmp(wanted, target_name(target)) == 0)) return target;
  }
  fail_target("SSMAX_TARGET", wanted);
}

inline std::atomic<Target>& active_target_cell() {
  static std::atomic<Target> cell{initial_target()};
  return cell;
}

}  // namespace detail

/// The target in use. Throws std::invalid_argument if SSMAX_TARGET names one that is unknown or that this
/// machine lacks.
[[nodiscard]] inline Target active_target() {
  return detail::active_target_cell().load(std::memory_order_relaxed);
}

/// Uses another target from now on, in every thread of units built with the same flags. For tests and
/// measurements. Throws std::invalid_argument if the target is not available.
inline void set_active_target(Target target) {
  if (!detail::is_available(target)) detail::fail_target("set_active_target", target_name(target));
  detail::active_target_cell().store(target, std::memory_order_relaxed);
}

}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
