// Computes one step of the online softmax over a tile: replaces logits by weights and updates the states of the
// queries.
#pragma once

#include "../nonfinite/weights.hpp"
#include "scores.hpp"
#include "state.hpp"

SSMAX_BEGIN_DETAIL

/// Replaces the logits of one vector of queries by weights and updates shift and sum. Writes the factors of the
/// earlier sums to `state.factor`. Returns whether a shift was raised, that is, whether a factor is not 1.
template <class Compute, class Operand, class V>
bool update_states(const Scores<Compute, Operand, V>& scores,
                   const PrefillKernels<Compute, Operand>& products, const TileScratch<Compute>& memory,
                   Logits<Compute>& logits, TileState<Compute> state, Operand* weights) {
  state.multiplier = logits.multiplier;
  const TileChange change = products.weights(logits.s, logits.keys.size(), state, weights);
  if (change == TileChange::irregular) {
    scores.apply_multiplier(logits);
    state.multiplier = nullptr;
    irregular_weights(products, memory, logits.s, logits.keys.size(), state, weights);
  }
  return change != TileChange::none;
}

/// Merges the states of a tile's queries: adds `chunk` to `total`. o is [channels][tile_lanes].
template <class Compute, class Operand>
void merge_states(const PrefillKernels<Compute, Operand>& products, const TileScratch<Compute>& memory,
                  index_t channels, const SoftmaxState<Compute>& total, const SoftmaxState<Compute>& chunk) {
  Compute *factor = memory.lane.rescale, *chunk_factor = memory.lane.chunk_rescale;
  for (index_t i = 0; i < memory.tile_lanes; ++i) {
    merge_sums(total.shift[i], total.sum[i], chunk.shift[i], chunk.sum[i], factor[i], chunk_factor[i]);
  }
  products.merge(total.o, chunk.o, channels, factor, chunk_factor);
}

SSMAX_END
