// Which instruction set the kernels use. Chosen once, at the first call: the best that this processor has, or
// the one named by the environment variable SSMAX_TARGET (scalar, avx2, avx512, neon). No compile flag is
// involved.
#pragma once

#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

#include "config.hpp"
#include "detail/error.hpp"
#include "detail/targets.hpp"

#if defined(SSMAX_HAVE_AVX2)
#include <cpuid.h>
#endif

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

#if defined(SSMAX_HAVE_AVX2)
inline bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

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
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
#else
      return false;
#endif
    case Target::avx512:
#if defined(SSMAX_AVX512_EMULATION)
      return true;
#elif defined(SSMAX_HAVE_AVX512)
      return __builtin_cpu_supports("avx512f");
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

inline std::string available_target_names() {
  std::string names;
  for (Target target : available_targets())
    names += (names.empty() ? "" : ", ") + std::string(target_name(target));
  return names;
}

inline Target initial_target() {
  const char* wanted = std::getenv("SSMAX_TARGET");
  if (wanted == nullptr || *wanted == '\0') return available_targets().back();
  for (Target target : available_targets()) {
    if (wanted == std::string(target_name(target))) return target;
  }
  fail("ssmax: SSMAX_TARGET is \"" + std::string(wanted) + "\", this machine has " +
       available_target_names());
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
  if (!detail::is_available(target)) {
    detail::fail("ssmax::set_active_target: " + std::string(target_name(target)) +
                 " is not available, this machine has " + detail::available_target_names());
  }
  detail::active_target_cell().store(target, std::memory_order_relaxed);
}

namespace detail {

template <class T>
const Leaves<T>& leaves() {
  constexpr bool is_float = sizeof(T) == sizeof(float);
  const auto pick = [](const auto& f32, const auto& f64) -> const Leaves<T>& {
    if constexpr (is_float) {
      return f32;
    } else {
      return f64;
    }
  };
  switch (active_target()) {
#if defined(SSMAX_HAVE_NEON)
    case Target::neon:
      return pick(neon::leaves_of<neon::F32>, neon::leaves_of<neon::F64>);
#endif
#if defined(SSMAX_HAVE_AVX2)
    case Target::avx2:
      return pick(avx2::leaves_of<avx2::F32>, avx2::leaves_of<avx2::F64>);
#endif
#if defined(SSMAX_HAVE_AVX512)
    case Target::avx512:
      return pick(avx512::leaves_of<avx512::F32>, avx512::leaves_of<avx512::F64>);
#endif
    default:
      return pick(scalar::leaves_of<scalar::F32>, scalar::leaves_of<scalar::F64>);
  }
}

inline const Conversions& conversions() {
  switch (active_target()) {
#if defined(SSMAX_HAVE_NEON)
    case Target::neon:
      return neon::conversions;
#endif
#if defined(SSMAX_HAVE_AVX2)
    case Target::avx2:
      return avx2::conversions;
#endif
#if defined(SSMAX_HAVE_AVX512)
    case Target::avx512:
      return avx512::conversions;
#endif
    default:
      return scalar::conversions;
  }
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
