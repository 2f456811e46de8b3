// Turns a query's state into its result: out and lse, or a state to be merged.
#pragma once

#include "../../../query.hpp"
#include "../../checks/views.hpp"
#include "../../kernels/rows.hpp"
#include "../../memory/conversion.hpp"
#include "../../rows/state.hpp"
#include "../terms/problem.hpp"

SSMAX_BEGIN_DETAIL

/// Writes the result of one query, except its row of out or o. `state_row` is its row in states. The state is
/// Σ exp(c·z) = 2^shift · sum.
/// Sets `factor`: the missing row is factor · o. Returns where to write this row. Returns `scratch` if the row must
/// be converted afterwards.
template <class Compute>
SSMAX_INLINE Compute* place_result(const Result<Compute>& result, const QueryRow& seen, index_t state_row,
                                   Compute shift, Compute sum, Compute* scratch, Compute& factor) {
  const Query& query = seen.query;
  const AttentionState<Compute>& state = result.state;
  if (state.shift.data_handle() != nullptr) {
    const SoftmaxState<Compute> to = state_of(state, query.batch, query.head, state_row);
    *to.shift = shift;
    *to.sum = sum;
    factor = 1;
    return to.o;
  }
  const auto sink = [&] {
    return sink_term(result.sinks[static_cast<std::size_t>(query.head)], result.scaled_sinks, seen.multiplier,
                     seen.n > 0);
  };
  const Normalizer normalizer =
      result.sinks.empty() ? Normalizer(shift, sum) : Normalizer(shift, sum, sink());
  if (result.lse.is_given()) {
    result.lse(seen.entry(), query.head, seen.row()) = static_cast<Compute>(normalizer.lse());
  }
  factor = static_cast<Compute>(normalizer.factor);
  return result.out.stage(seen.entry(), query.head, seen.row(), scratch);
}

/// Returns whether place_result returns scratch.
template <class Compute>
bool narrows_results(const Result<Compute>& result) {
  return result.state.o.data_handle() == nullptr && result.out.kind() != ElementKind::compute;
}

/// Converts and stores a query's row, if place_result returned scratch.
template <class Compute>
void narrow_result(const Result<Compute>& result, const QueryRow& seen, const Compute* numbers) {
  if (!narrows_results(result)) return;
  result.out.store(seen.entry(), seen.query.head, seen.row(), numbers);
}

/// Writes the whole result of one query. The state is Σ exp(c·z) = 2^shift · sum and Σ exp(c·z)·v = 2^shift · o.
/// Overwrites o.
template <class Compute>
void store_result(const Result<Compute>& result, const QueryRow& seen, index_t state_row,
                  const SoftmaxState<Compute>& state, index_t dv) {
  Compute factor;
  Compute* numbers = place_result(result, seen, state_row, *state.shift, *state.sum, state.o, factor);
  kernels<RowKernels<Compute>>().multiply(state.o, dv, factor, numbers);
  narrow_result(result, seen, numbers);
}

SSMAX_END
