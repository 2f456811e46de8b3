// One step of the online softmax over a tile: logits become weights, and the states of the queries are updated.
#pragma once

#include "../nonfinite/weights.hpp"
#include "scores.hpp"
#include "state.hpp"

SSMAX_BEGIN_DETAIL

/// Turns the logits of one vector of queries into weights and updates shift and sum. Writes to `state.factor` what
/// earlier sums must be multiplied by. Returns whether one of the factors is not 1, that is, some shift was raised.
template <class A, class E, class V>
bool update_states(const Scores<A, E, V>& scores, const PrefillKernels<A, E>& products,
                   const TileScratch<A>& memory, Logits<A>& logits, TileState<A> state, E* weights) {
  state.multiplier = logits.multiplier;
  const TileChange change = products.weights(logits.s, logits.keys.size(), state, weights);
  if (change == TileChange::irregular) {
    scores.apply_multiplier(logits);
    state.multiplier = nullptr;
    irregular_weights(products, memory, logits.s, logits.keys.size(), state, weights);
  }
  return change != TileChange::none;
}

/// Merges the states of a tile's queries; o is [channels][tile_lanes].
template <class A, class E>
void merge_states(const PrefillKernels<A, E>& products, const TileScratch<A>& memory, index_t channels,
                  const SoftmaxState<A>& total, const SoftmaxState<A>& chunk) {
  A *factor = memory.lane.rescale, *chunk_factor = memory.lane.chunk_rescale;
  for (index_t i = 0; i < memory.tile_lanes; ++i) {
    merge_sums(total.shift[i], total.sum[i], chunk.shift[i], chunk.sum[i], factor[i], chunk_factor[i]);
  }
  products.merge(total.o, chunk.o, channels, factor, chunk_factor);
}

SSMAX_END
