// Runs a test on every target that this machine has, and puts the active one back, also when the test fails.
#pragma once

#include <ssmax/target.hpp>
#include <string>

#include "catch.hpp"

class TargetScope {
 public:
  TargetScope() = default;
  TargetScope(const TargetScope&) = delete;
  TargetScope& operator=(const TargetScope&) = delete;
  ~TargetScope() { ssmax::set_active_target(before_); }

 private:
  ssmax::Target before_ = ssmax::active_target();
};

template <class Test>
void for_each_target(Test test) {
  const TargetScope scope;
  for (const ssmax::Target target : ssmax::available_targets()) {
    ssmax::set_active_target(target);
    REQUIRE(ssmax::active_target() == target);
    test(std::string(ssmax::target_name(target)));
  }
}
