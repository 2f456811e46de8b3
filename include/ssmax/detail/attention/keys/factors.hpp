// Reads the factors of a key run, whose stride a source chooses (KeyRun).
#pragma once

#include <algorithm>

#include "../../../config.hpp"

SSMAX_BEGIN_DETAIL

/// Calls f(first key, factors, count) with contiguous factors: in place if the stride is 1, else with copies of up to
/// 256 factors.
template <class F>
void for_contiguous_factors(const float* factors, index_t stride, index_t keys, const F& f) {
  if (stride == 1) return f(index_t{0}, factors, keys);
  constexpr index_t most = 256;
  float copies[most];
  if (stride == 0) std::fill_n(copies, std::min(most, keys), *factors);
  for (index_t key = 0; key < keys; key += most) {
    const index_t count = std::min(most, keys - key);
    for (index_t i = 0; stride != 0 && i < count; ++i) copies[i] = factors[(key + i) * stride];
    f(key, static_cast<const float*>(copies), count);
  }
}

SSMAX_END
