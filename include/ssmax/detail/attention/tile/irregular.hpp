// Computes the weights of logits that the kernels cannot handle.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../../rows/state.hpp"
#include "../terms/variant.hpp"

SSMAX_BEGIN_DETAIL

/// Does what kernels.weights does if some lanes hold NaN, +inf or a shift whose absolute value is at least
/// largest_shift. Computes these lanes in double. The kernel computes the other lanes. Shifts follow the kernel's
/// rule.
template <class Compute, class Operand>
void irregular_weights(const PrefillKernels<Compute, Operand>& kernels, const TileScratch<Compute>& memory,
                       Compute* s, index_t keys, const TileState<Compute>& state, Operand* weights) {
  constexpr Compute masked_logit = -std::numeric_limits<Compute>::infinity();
  constexpr bool is_bf16 = !std::same_as<Compute, Operand>;
  struct Lane {
    index_t index;
    Compute shift, sum, factor;
  };
  Lane irregular[64];
  index_t count = 0;
  for (index_t lane = 0; lane < kernels.width; ++lane) {
    Compute top = masked_logit;
    bool poisoned = false;
    for (index_t key = 0; key < keys; ++key) {
      const Compute x = s[key * memory.tile_lanes + lane];
      poisoned = poisoned || !(x < -masked_logit);
      top = std::max(top, x);
    }
    const Compute before = state.shift[lane], nearest = is_bf16 ? top : std::rint(top);
    const Compute raised = before + (is_bf16 ? 0 : raise_distance) < nearest ? nearest : before;
    if (!poisoned && (raised == masked_logit || std::abs(raised) < largest_shift<Compute>)) continue;
    // NaN or +inf sets the query's sum to NaN, and the sum stays NaN.
    const Compute factor = poisoned ? Compute{1} : shift_factor(before, raised);
    double sum = 0;
    for (index_t key = 0; key < keys; ++key) {
      Compute& x = s[key * memory.tile_lanes + lane];
      const double distance = static_cast<double>(x) - static_cast<double>(raised);
      const Compute weight =
          poisoned || x == masked_logit
              ? Compute{0}
              : static_cast<Compute>(static_cast<Operand>(static_cast<Compute>(std::exp2(distance))));
      memory.transposed[count * key_block + key] = weight;
      sum += static_cast<double>(weight);
      x = masked_logit;
    }
    irregular[count++] = {lane, poisoned ? before : raised,
                          poisoned ? std::numeric_limits<Compute>::quiet_NaN()
                                   : state.sum[lane] * factor + static_cast<Compute>(sum),
                          factor};
    state.shift[lane] = masked_logit;
  }
  kernels.weights(s, keys, state, weights);
  for (index_t i = 0; i < count; ++i) {
    const Lane& lane = irregular[i];
    state.shift[lane.index] = lane.shift;
    state.sum[lane.index] = lane.sum;
    state.factor[lane.index] = lane.factor;
    for (index_t key = 0; key < keys; ++key) {
      const Compute weight = memory.transposed[i * key_block + key];
      weights[tuple_at<Compute, Operand>(key, lane.index, memory.tile_lanes)] = static_cast<Operand>(weight);
    }
  }
}

SSMAX_END
