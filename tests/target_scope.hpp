// Runs a test on the targets that this machine has, and puts the active one back, also when the test fails.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <random>
#include <ssmax/half.hpp>
#include <ssmax/target.hpp>
#include <string>
#include <type_traits>
#include <utility>

#include "catch.hpp"
#include "emulation.hpp"

class TargetScope {
 public:
  TargetScope() = default;
  TargetScope(const TargetScope&) = delete;
  TargetScope& operator=(const TargetScope&) = delete;
  ~TargetScope() { ssmax::set_active_target(before_); }

 private:
  ssmax::Target before_ = ssmax::active_target();
};

namespace target_scope {

/// Emulation visits the targets that it emulates: those with products of bfloat16, else avx512. A test case for the
/// products leaves its other element types to the native run.
inline bool emulates(ssmax::Target target, bool with_extensions) {
  if (!with_extensions) return target == ssmax::Target::avx512 && !emulation::has_to_meet;
  return ssmax::shared::base_of(target) != target;
}

/// Returns true in the first call of a test case, and in about one of three later calls: always in the same ones. The
/// scalar kernels are the slowest. The test ssmax_tests.scalar_attention visits them in every call.
inline bool takes_scalar() {
  static std::string test;
  static std::minstd_rand random;
  const std::string current = Catch::getResultCapture().getCurrentTestName();
  if (current != test) random.seed();
  return std::exchange(test, current) != current || random() % 3 == 0;
}

/// A run for one target (SSMAX_TARGET names it) leaves the others to their own runs. SSMAX_TEST_TARGETS, if set, names
/// the targets to visit. What fails is reported with the target's name.
template <class Test>
void for_each(bool with_extensions, Test test) {
  const TargetScope scope;
  const bool is_for_one = std::getenv("SSMAX_TARGET") != nullptr;
  const char* const named = std::getenv("SSMAX_TEST_TARGETS");
  const ssmax::Target base = ssmax::shared::base_of(ssmax::active_target());
  const auto targets = ssmax::available_targets();
  const auto is_named = [&](ssmax::Target target) {
    const std::string name = std::string(ssmax::target_name(target)) + ',';
    return named == nullptr || (std::string(named) + ',').find(name) != std::string::npos;
  };
  REQUIRE(std::any_of(targets.begin(), targets.end(), is_named));
  const bool with_scalar = is_for_one || targets.size() == 1 || takes_scalar();
  for (const ssmax::Target target : targets) {
    if (!with_scalar && target == ssmax::Target::scalar) continue;
    if (!with_extensions && ssmax::shared::base_of(target) != target) continue;
    if (is_for_one && ssmax::shared::base_of(target) != base) continue;
    if (emulation::is_emulated && !emulates(target, with_extensions)) continue;
    const std::string name(ssmax::target_name(target));
    if (!is_named(target)) continue;
    ssmax::set_active_target(target);
    REQUIRE(ssmax::active_target() == target);
    INFO(name);
    test(name);
  }
}

}  // namespace target_scope

/// Without those that extend another one by products of bfloat16: all else has the same kernels there.
template <class Test>
void for_each_target(Test test) {
  target_scope::for_each(false, test);
}

/// What attends over elements of type T: with them where T is bfloat16.
template <class T, class Test>
void for_each_target_of(Test test) {
  target_scope::for_each(std::is_same_v<T, ssmax::bfloat16>, test);
}
