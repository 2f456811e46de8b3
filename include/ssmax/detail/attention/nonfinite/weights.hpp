// Weights of logits that the kernel refuses.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../call/variant.hpp"
#include "../tile/state.hpp"

SSMAX_BEGIN_DETAIL

/// kernels.weights, where some lanes have NaN, +inf or |shift| >= 2^20. Those lanes are computed here, in
/// double, the others by the kernel. Shifts are raised by the kernel's own rule.
template <class A, class E>
void irregular_weights(const PrefillKernels<A, E>& kernels, const ColumnScratch<A>& memory, A* s,
                       index_t keys, const TileState<A>& state, E* weights) {
  constexpr A hidden = -std::numeric_limits<A>::infinity();
  constexpr bool in_16_bits = !std::same_as<A, E>;
  struct Lane {
    index_t index;
    A shift, sum, factor;
  };
  Lane apart[64];
  index_t count = 0;
  for (index_t lane = 0; lane < kernels.width; ++lane) {
    A top = hidden;
    bool poisoned = false;
    for (index_t key = 0; key < keys; ++key) {
      const A x = s[key * memory.group + lane];
      poisoned = poisoned || !(x < -hidden);
      top = std::max(top, x);
    }
    const A before = state.shift[lane], nearest = in_16_bits ? top : std::rint(top);
    const A raised = before + (in_16_bits ? 0 : raise_distance) < nearest ? nearest : before;
    if (!poisoned && (raised == hidden || std::abs(raised) < largest_shift<A>)) continue;
    // NaN and +inf poison the query's sum for good.
    const A factor = poisoned ? A{1} : shift_factor(before, raised);
    double sum = 0;
    for (index_t key = 0; key < keys; ++key) {
      A& x = s[key * memory.group + lane];
      const double distance = static_cast<double>(x) - static_cast<double>(raised);
      const A weight = poisoned || x == hidden
                           ? A{0}
                           : static_cast<A>(static_cast<E>(static_cast<A>(std::exp2(distance))));
      memory.apart[count * key_block + key] = weight;
      sum += static_cast<double>(weight);
      x = hidden;
    }
    apart[count++] = {
        lane, poisoned ? before : raised,
        poisoned ? std::numeric_limits<A>::quiet_NaN() : state.sum[lane] * factor + static_cast<A>(sum),
        factor};
    state.shift[lane] = hidden;
  }
  kernels.weights(s, keys, state, weights);
  for (index_t i = 0; i < count; ++i) {
    const Lane& lane = apart[i];
    state.shift[lane.index] = lane.shift;
    state.sum[lane.index] = lane.sum;
    state.factor[lane.index] = lane.factor;
    for (index_t key = 0; key < keys; ++key) {
      const A weight = memory.apart[i * key_block + key];
      weights[tuple_at<A, E>(key, lane.index, memory.group)] = static_cast<E>(weight);
    }
  }
}

SSMAX_END
