// A small call of attention that tests spoil.
#pragma once

#include "refusal.hpp"
#include "test.hpp"

namespace small_call {

using ssmax::View;

/// A call of attention on little memory; tests give one view other extents or strides.
struct Call {
  std::vector<float> in = std::vector<float>(64, 1), to = std::vector<float>(64, -7);
  View<const float, 4> q{in.data(), {1, 2, 2, 4}}, k{in.data(), {1, 2, 3, 4}}, v{in.data(), {1, 2, 3, 4}};
  View<float, 4> out{to.data(), {1, 2, 2, 4}};
  View<float, 3> lse{to.data() + 32, {1, 2, 2}};

  void refuses(std::initializer_list<std::string_view> words) const {
    check_refused(words, [&] { ssmax::attention({.q = q, .k = k, .v = v, .out = out, .lse = lse}); });
    CHECK(std::ranges::count(to, -7.0F) == 64);
  }
};

}  // namespace small_call
