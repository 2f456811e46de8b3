// Memory that refused calls leave as it was.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "catch.hpp"
#include "refusal.hpp"

namespace untouched_memory {

inline constexpr float untouched = -1234.5F;

struct Memory {
  std::vector<float> inputs = std::vector<float>(4096, 1.0F), outputs = std::vector<float>(4096, untouched);
  float* const in = inputs.data();
  float* const to = outputs.data();

  /// The call is refused with a message that has all of the words, and nothing is written.
  template <class F>
  void refused(std::initializer_list<std::string_view> words, const F& call) const {
    check_refused(words, call);
    CHECK(std::ranges::all_of(outputs, [](float value) { return value == untouched; }));
    CHECK(std::ranges::all_of(inputs, [](float value) { return value == 1; }));
  }
};

/// Checks that a valid call is refused after one change.
template <class Call>
constexpr auto refuses = [](std::initializer_list<std::string_view> words, const auto& change) {
  Call call;
  change(call);
  call.refuses(words);
};

}  // namespace untouched_memory
