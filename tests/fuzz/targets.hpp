// Every case runs on every instruction set that this machine has.
#pragma once

#include <ssmax/target.hpp>
#include <string>

namespace fuzz {

template <class F>
void for_each_target(const F& f) {
  for (const ssmax::Target target : ssmax::available_targets()) {
    ssmax::set_active_target(target);
    f(std::string(ssmax::target_name(target)));
  }
}

}  // namespace fuzz
