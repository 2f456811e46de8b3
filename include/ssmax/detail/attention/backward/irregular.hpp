// Computes the gradients of logits whose weights the kernel cannot compute.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../../kernels/prefill_backward.hpp"
#include "scratch.hpp"

SSMAX_BEGIN_DETAIL

/// Does what the kernel `gradients` does if the lse of some lanes is NaN, infinite or too large for an
/// integer in Compute. Computes these lanes in double. The kernel computes the other lanes.
template <class Compute, class Operand>
void irregular_gradients(const BackwardScratch<Compute, Operand>& memory, index_t lane, index_t keys,
                         Compute* s, Compute* u) {
  constexpr Compute infinity = std::numeric_limits<Compute>::infinity();
  const index_t tile_lanes = memory.tile_lanes, width = memory.kernels.width;
  Compute *weights = memory.transposed, *gradients = memory.transposed_gradients;
  for (index_t i = 0; i < width; ++i) {
    if (memory.regular[lane + i]) continue;
    for (index_t key = 0; key < keys; ++key) {
      Compute& x = s[key * tile_lanes + i];
      // The rounding error of a huge lse may exceed 1, but a weight is at most 1. std::min keeps NaN.
      const double base = memory.base[lane + i];
      const double w = x == -infinity ? 0 : std::min(std::exp2(static_cast<double>(x) - base), 1.0);
      weights[i * key_block + key] = static_cast<Compute>(w);
      gradients[i * key_block + key] =
          w == 0 ? Compute{0} : static_cast<Compute>(w) * (u[key * tile_lanes + i] - memory.delta[lane + i]);
      x = -infinity;
    }
  }
  const Compute *shift = memory.shift + lane, *delta = memory.delta + lane;
  if constexpr (std::same_as<Compute, Operand>) {
    kernels<PrefillBackwardKernels<Compute>>().gradients(s, u, keys, shift, delta);
  } else {
    kernels<RoundedBackwardKernels<Compute, Operand>>().gradients(s, u, keys, shift, delta);
  }
  for (index_t i = 0; i < width; ++i) {
    if (memory.regular[lane + i]) continue;
    for (index_t key = 0; key < keys; ++key) {
      s[key * tile_lanes + i] = weights[i * key_block + key];
      u[key * tile_lanes + i] = gradients[i * key_block + key];
    }
  }
}

SSMAX_END
