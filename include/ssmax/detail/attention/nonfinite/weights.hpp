// Computes the weights of logits that the kernels cannot handle.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../call/variant.hpp"
#include "../tile/state.hpp"

SSMAX_BEGIN_DETAIL

/// Does what kernels.weights does if some lanes hold NaN, +inf or a shift whose absolute value is at least
/// largest_shift. Computes these lanes in double. The kernel computes the other lanes. Shifts follow the kernel's
/// rule.
template <class A, class E>
void irregular_weights(const PrefillKernels<A, E>& kernels, const TileScratch<A>& memory, A* s, index_t keys,
                       const TileState<A>& state, E* weights) {
  constexpr A hidden = -std::numeric_limits<A>::infinity();
  constexpr bool is_bf16 = !std::same_as<A, E>;
  struct Lane {
    index_t index;
    A shift, sum, factor;
  };
  Lane irregular[64];
  index_t count = 0;
  for (index_t lane = 0; lane < kernels.width; ++lane) {
    A top = hidden;
    bool poisoned = false;
    for (index_t key = 0; key < keys; ++key) {
      const A x = s[key * memory.tile_lanes + lane];
      poisoned = poisoned || !(x < -hidden);
      top = std::max(top, x);
    }
    const A before = state.shift[lane], nearest = is_bf16 ? top : std::rint(top);
    const A raised = before + (is_bf16 ? 0 : raise_distance) < nearest ? nearest : before;
    if (!poisoned && (raised == hidden || std::abs(raised) < largest_shift<A>)) continue;
    // NaN or +inf sets the query's sum to NaN, and the sum stays NaN.
    const A factor = poisoned ? A{1} : shift_factor(before, raised);
    double sum = 0;
    for (index_t key = 0; key < keys; ++key) {
      A& x = s[key * memory.tile_lanes + lane];
      const double distance = static_cast<double>(x) - static_cast<double>(raised);
      const A weight = poisoned || x == hidden
                           ? A{0}
                           : static_cast<A>(static_cast<E>(static_cast<A>(std::exp2(distance))));
      memory.transposed[count * key_block + key] = weight;
      sum += static_cast<double>(weight);
      x = hidden;
    }
    irregular[count++] = {
        lane, poisoned ? before : raised,
        poisoned ? std::numeric_limits<A>::quiet_NaN() : state.sum[lane] * factor + static_cast<A>(sum),
        factor};
    state.shift[lane] = hidden;
  }
  kernels.weights(s, keys, state, weights);
  for (index_t i = 0; i < count; ++i) {
    const Lane& lane = irregular[i];
    state.shift[lane.index] = lane.shift;
    state.sum[lane.index] = lane.sum;
    state.factor[lane.index] = lane.factor;
    for (index_t key = 0; key < keys; ++key) {
      const A weight = memory.transposed[i * key_block + key];
      weights[tuple_at<A, E>(key, lane.index, memory.tile_lanes)] = static_cast<E>(weight);
    }
  }
}

SSMAX_END
