// Computes one step of the online softmax over a tile: replaces logits by weights and updates the states of the
// queries. Computes lanes that the kernels cannot handle in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../terms/statistics.hpp"
#include "scores.hpp"
#include "statistics.hpp"

SSMAX_BEGIN_DETAIL

/// A kernel that replaces logits by weights: PrefillKernels::weights, or StatisticsKernels::weights.
template <class Compute, class Operand>
using WeightsKernel = decltype(PrefillKernels<Compute, Operand>::weights);

/// Returns the kernel of a call.
template <class Compute, class Operand>
WeightsKernel<Compute, Operand> weights_kernel(const Problem<Compute>& problem,
                                               const PrefillKernels<Compute, Operand>& products) {
  if (problem.statistics == nullptr) return products.weights;
  if constexpr (std::same_as<Compute, Operand>) {
    return problem.statistics->weights();
  } else {
    return problem.statistics->bf16_weights();
  }
}

/// Returns the kernels of a call for whole groups.
template <class Compute, class Operand>
const GroupKernels<Compute, Operand>& group_kernels(const Problem<Compute>& problem,
                                                    const PrefillKernels<Compute, Operand>& products) {
  if constexpr (!std::same_as<Compute, Operand>) {
    if (problem.statistics != nullptr) return problem.statistics->bf16_group();
  }
  return products.group;
}

/// The scratch memory of one thread for the forward pass.
template <class Compute, class Operand = Compute>
struct ForwardScratch : LaneScratch<Compute, Operand> {
  using LaneScratch<Compute, Operand>::arena;
  using LaneScratch<Compute, Operand>::depth;
  using LaneScratch<Compute, Operand>::tile_lanes;
  using LaneScratch<Compute, Operand>::tiles;
  using Op = Operands<Compute, Operand>;

  /// Takes memory for `queries` queries with `a_depth` channels per product.
  ForwardScratch(Arena& an_arena, index_t queries, const Problem<Compute>& problem, index_t a_depth)
      : LaneScratch<Compute, Operand>(an_arena, queries, problem.width(), problem.value_width(), a_depth),
        products(detail::kernels<PrefillKernels<Compute, Operand>>()),
        weigh(weights_kernel(problem, products)),
        group(group_kernels(problem, products)),
        channels(round_up(problem.value_width(), products.pass)),
        block_keys(Op::block_keys(depth, channels)),
        s(arena.template take<Compute>(key_block * tile_lanes)) {
    if constexpr (Op::is_bf16) {
      this->multipliers = arena.template take<Compute>(tiles * tile_lanes);
      this->widened_row = arena.template take<Compute>(2 * problem.width());
    }
  }

  const PrefillKernels<Compute, Operand>& products;
  const WeightsKernel<Compute, Operand> weigh;
  const GroupKernels<Compute, Operand>& group;
  index_t channels;    // channels of V, rounded up to whole panels
  index_t block_keys;  // keys of a key block
  /// [block_keys][tile_lanes]: logits. Weights, in tuples, overwrite the logits of the same keys, so that both stay
  /// in the first-level cache.
  Compute* s;
};

/// Does what the kernel `weigh` does if some lanes hold NaN, +inf or a shift whose absolute value is at least
/// largest_shift. Computes these lanes in double. The kernel computes the other lanes. Shifts follow the kernel's
/// rule.
template <class Compute, class Operand>
void irregular_weights(WeightsKernel<Compute, Operand> weigh, const TileScratch<Compute>& memory, Compute* s,
                       index_t keys, const TileState<Compute>& state, Operand* weights) {
  constexpr Compute masked_logit = -std::numeric_limits<Compute>::infinity();
  constexpr bool is_bf16 = !std::same_as<Compute, Operand>;
  struct Lane {
    index_t index;
    Compute shift, sum, factor;
    LaneStatistics<Compute> statistics;
  };
  Lane irregular[64];
  index_t count = 0;
  for (index_t lane = 0; lane < memory.kernels.width; ++lane) {
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
    LaneStatistics<Compute> statistics;
    for (index_t key = 0; key < keys; ++key) {
      Compute& x = s[key * memory.tile_lanes + lane];
      const double distance = static_cast<double>(x) - static_cast<double>(raised);
      const Compute weight =
          poisoned || x == masked_logit
              ? Compute{0}
              : static_cast<Compute>(static_cast<Operand>(static_cast<Compute>(std::exp2(distance))));
      memory.transposed[count * key_block + key] = weight;
      sum += static_cast<double>(weight);
      statistics.add(static_cast<double>(x), static_cast<double>(raised), static_cast<double>(weight));
      x = masked_logit;
    }
    if (state.statistics.is_given())
      statistics.add_earlier(state.statistics.from(lane), state.sum[lane], before, raised, factor);
    irregular[count++] = {lane, poisoned ? before : raised,
                          poisoned ? std::numeric_limits<Compute>::quiet_NaN()
                                   : state.sum[lane] * factor + static_cast<Compute>(sum),
                          factor, statistics};
    state.shift[lane] = masked_logit;
  }
  weigh(s, keys, state, weights);
  for (index_t i = 0; i < count; ++i) {
    const Lane& lane = irregular[i];
    state.shift[lane.index] = lane.shift;
    state.sum[lane.index] = lane.sum;
    state.factor[lane.index] = lane.factor;
    if (state.statistics.is_given()) lane.statistics.write(state.statistics.from(lane.index));
    for (index_t key = 0; key < keys; ++key) {
      const Compute weight = memory.transposed[i * key_block + key];
      weights[tuple_at<Compute, Operand>(key, lane.index, memory.tile_lanes)] = static_cast<Operand>(weight);
    }
  }
}

/// Replaces the logits of one vector of queries by weights and updates shift and sum. Writes the factors of the
/// earlier sums to `state.factor`. Returns whether a shift was raised, that is, whether a factor is not 1.
template <class Compute, class Operand, class V>
bool update_states(const Scores<Compute, Operand, V>& scores, WeightsKernel<Compute, Operand> weigh,
                   const TileScratch<Compute>& memory, Logits<Compute>& logits, TileState<Compute> state,
                   Operand* weights) {
  state.multiplier = logits.multiplier;
  const index_t keys = logits.keys.size();
  const TileChange change = weigh(logits.s, keys, state, weights);
  if (change == TileChange::irregular) {
    scores.apply_multiplier(logits);
    state.multiplier = nullptr;
    irregular_weights(weigh, memory, logits.s, keys, state, weights);
  }
  return change != TileChange::none;
}

/// Returns the address of the weight of a key and a lane. Weights, in tuples, overwrite the logits memory.s.
template <class Compute, class Operand>
Operand* weights_of(const ForwardScratch<Compute, Operand>& memory, index_t key, index_t lane) {
  return reinterpret_cast<Operand*>(memory.s) + tuple_at<Compute, Operand>(key, lane, memory.tile_lanes);
}

/// Returns whether all vectors of a tile need the same keys of a block, and their logits are plain.
template <class Compute, class Operand, class V>
bool takes_vectors_at_once(const Scores<Compute, Operand, V>& scores, const NeededKeys& needed) {
  if (!scores.are_plain() || needed.of[0].size() == 0) return false;
  const index_t first = needed.block.begin;
  const KeyRange keys{first + needed.of[0].begin, first + needed.of[0].end};
  for (index_t v = 0; v < needed.vectors; ++v) {
    const bool is_same = needed.of[v].begin == needed.of[0].begin && needed.of[v].end == needed.of[0].end;
    if (!is_same || needed.hulls[v].masks(keys)) return false;
  }
  return true;
}

/// Replaces the logits memory.s of a tile and a key block by weights, and updates the tile's state. `length` is the
/// number of keys of the sequence. Returns whether earlier sums must be multiplied by memory.lane.rescale.
template <class Compute, class Operand, class V>
bool form_weights(const Scores<Compute, Operand, V>& scores, const ForwardScratch<Compute, Operand>& memory,
                  index_t tile, index_t length, const NeededKeys& needed,
                  const SoftmaxState<Compute>& state) {
  constexpr bool is_bf16 = Operands<Compute, Operand>::is_bf16;
  const PrefillKernels<Compute, Operand>& products = memory.products;
  const index_t tile_lanes = memory.tile_lanes;
  Compute* rescale = memory.lane.rescale;
  std::fill_n(rescale, tile_lanes, Compute{1});
  if constexpr (is_bf16) {
    const KeyRange all = needed.of[0];
    if (takes_vectors_at_once(scores, needed)) {
      const TileChange change = memory.group.weights[needed.vectors - 1](
          memory.s + all.begin * tile_lanes, all.size(),
          {state.shift, state.sum, rescale, memory.multipliers + tile * tile_lanes, state.statistics},
          weights_of(memory, all.begin, 0));
      if (change != TileChange::irregular) return change == TileChange::raised;
    }
  }
  bool raised = false;
  for (index_t v = 0; v < needed.vectors; ++v) {
    const KeyRange part = needed.of[v];
    if (part.size() == 0) continue;
    const index_t lane = v * products.width;
    Logits<Compute> logits{.s = memory.s + part.begin * tile_lanes + lane,
                           .keys = {needed.block.begin + part.begin, needed.block.begin + part.end},
                           .rows = memory.rows + tile * tile_lanes + lane,
                           .length = length};
    if constexpr (is_bf16) logits.multiplier = memory.multipliers + tile * tile_lanes + lane;
    scores.form(logits, needed.hulls[v]);
    const TileState<Compute> of_vector{state.shift + lane, state.sum + lane, rescale + lane, nullptr,
                                       state.statistics.from(lane)};
    raised |=
        update_states(scores, memory.weigh, memory, logits, of_vector, weights_of(memory, part.begin, lane));
  }
  return raised;
}

SSMAX_END
