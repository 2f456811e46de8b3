// What a case found wrong, and how results are compared with what they should be.
#pragma once

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "bounded.hpp"
#include "element.hpp"

namespace fuzz {

/// Ends a case: something is not what it should be.
struct Finding : std::runtime_error {
  using runtime_error::runtime_error;
};

inline std::string number(double value) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

/// The largest error of the run as a part of its bound: a bound that nothing comes near to would find nothing.
inline double& closest() {
  static double ratio = 0;
  return ratio;
}

/// How many times what the loops of the reference may be off by: the library adds in another order,
/// multiplies by log2 e, and rescales.
inline constexpr double allowance = 4;

/// NaN for NaN, infinity for infinity, and otherwise within `bound` and half an ulp of the stored element.
inline void check_value(const std::string& what, index_t at, double got, double expected, double bound,
                        Element stored) {
  const auto fail = [&](double over) {
    throw Finding(what + "[" + std::to_string(at) + "] is " + number(got) + ", expected " + number(expected) +
                  ", error " + number(std::abs(got - expected)) + ", bound " + number(bound) + " (" +
                  number(over) + " times it)");
  };
  if (std::isnan(expected) || std::isinf(expected)) {
    if (std::isnan(expected) ? !std::isnan(got) : got != expected) fail(infinity);
    return;
  }
  if (got == expected || std::abs(expected) + bound >= largest(stored)) return;
  // A result that was stored as it should be has no error left.
  const double error = std::max(std::abs(got - expected) - storing(stored, std::abs(expected) + bound), 0.0);
  if (!(error <= bound)) fail(error / bound);
  if (error > 0) closest() = std::max(closest(), error / bound);
}

inline void check_values(const std::string& what, const std::vector<double>& got,
                         const std::vector<Bounded>& expected, Element stored, double allowed = allowance) {
  if (got.size() != expected.size()) throw Finding(what + " has another size");
  // Products may underflow.
  const double least = is_wide(stored) ? 0x1p-1000 : 0x1p-110;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto value = static_cast<double>(expected[i].value);
    const double bound = allowed * static_cast<double>(expected[i].error) + least;
    check_value(what, static_cast<index_t>(i), got[i], value, std::isnan(bound) ? infinity : bound, stored);
  }
}

}  // namespace fuzz
