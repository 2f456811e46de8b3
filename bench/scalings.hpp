// Defines the parameters and multipliers of the timed scalings.
#pragma once

#include <cmath>

#include "data.hpp"

namespace ssmax_bench {

// The s of Figure 1 in the paper: the multiplier for some thousand keys is about 3.
inline constexpr float s = 0.43F;
inline constexpr float b = 0.2F;

inline double softmax_multiplier(index_t) { return 1.0; }
inline double ssmax_multiplier(index_t n) {
  return static_cast<double>(s) * std::log(static_cast<double>(n));
}
inline double ssmax_bias_multiplier(index_t n) { return ssmax_multiplier(n) + static_cast<double>(b); }

}  // namespace ssmax_bench
