// Computes what the kernels of the backward pass cannot: gradients of logits whose lse is not regular, and products
// with rows that hold NaN or infinities.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../../kernels/prefill_backward.hpp"
#include "../operands/finite.hpp"
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
      weights[i * tile_keys + key] = static_cast<Compute>(w);
      gradients[i * tile_keys + key] =
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
      s[key * tile_lanes + i] = weights[i * tile_keys + key];
      u[key * tile_lanes + i] = gradients[i * tile_keys + key];
    }
  }
}

/// Calls run(range) for the runs of finite rows, and single(row) for each row with NaN or infinities, in order.
/// Exception: if `all` is true, calls run once with the whole range.
/// 0 · NaN and 0 · infinity must add 0 to a sum. So `single` first adds the row's finite elements, then each other
/// element whose factor is not 0. The sums of the other rows are bit-identical to a range without such rows.
template <class Run, class Single>
void for_each_finite_run(KeyRange range, const bool* is_finite, bool all, const Run& run,
                         const Single& single) {
  if (all) return run(range);
  while (range.begin < range.end) {
    index_t end = range.begin;
    while (end < range.end && is_finite[end]) ++end;
    if (end > range.begin) run(KeyRange{range.begin, end});
    if (end < range.end) single(end);
    range.begin = end + 1;
  }
}

/// Returns a copy of a row with 0 for NaN and infinities, padded with 0.
template <class Compute>
const Compute* finite_part(const LaneScratch<Compute>& memory, const Compute* row, index_t channels) {
  copy_finite(row, channels, memory.staged);
  std::fill_n(memory.staged + channels, memory.pitch - channels, Compute{0});
  return memory.staged;
}

/// Adds *factors[i] · row[c] to sums[i][c · channel_stride], for each c where row[c] is NaN or infinite and each i
/// below `count` whose factor is not 0.
template <class Compute, class Operand>
void add_nonfinite(StridedRows<const Operand> factors, index_t count, const Operand* row, index_t channels,
                   StridedRows<Compute> sums, index_t channel_stride) {
  for (index_t c = 0; c < channels; ++c) {
    const Compute value = static_cast<Compute>(row[c]);
    if (std::isfinite(value)) continue;
    for (index_t i = 0; i < count; ++i) {
      const Compute factor = static_cast<Compute>(*factors[i]);
      if (factor != 0) sums[i][c * channel_stride] += factor * value;
    }
  }
}

SSMAX_END
