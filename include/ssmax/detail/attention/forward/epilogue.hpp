// Turns a query's state into its result: out and lse, or a state to be merged.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "../../../query.hpp"
#include "../../checks/views.hpp"
#include "../../kernels/rows.hpp"
#include "../../memory/conversion.hpp"
#include "../../rows/state.hpp"
#include "../terms/problem.hpp"

SSMAX_BEGIN_DETAIL

/// Returns the normalizer of a query's state, with the query's sink.
template <class Compute>
SSMAX_INLINE Normalizer normalizer_of(const Result<Compute>& result, const QueryRow& seen, Compute shift,
                                      Compute sum) {
  if (result.sinks.empty()) return {shift, sum};
  return {shift, sum,
          sink_term(result.sinks[static_cast<std::size_t>(seen.query.head)], result.scaled_sinks,
                    seen.multiplier, seen.n > 0)};
}

/// Writes lse of one query. Sets `factor`: its row of out is factor · o. Returns where to write this row. Returns
/// `scratch` if the row must be converted afterwards.
template <class Compute>
SSMAX_INLINE Compute* place_output(const Result<Compute>& result, const QueryRow& seen,
                                   const Normalizer& normalizer, Compute* scratch, Compute& factor) {
  if (result.lse.is_given()) {
    result.lse(seen.entry(), seen.query.head, seen.row()) = static_cast<Compute>(normalizer.lse());
  }
  factor = static_cast<Compute>(normalizer.factor);
  return result.out.stage(seen.entry(), seen.query.head, seen.row(), scratch);
}

/// Writes the result of one query, except its row of out or o. `state_row` is its row in states. The state is
/// Σ exp(c·z) = 2^shift · sum. Otherwise as place_output, with o in place of out for a state.
template <class Compute>
SSMAX_INLINE Compute* place_result(const Result<Compute>& result, const QueryRow& seen, index_t state_row,
                                   Compute shift, Compute sum, Compute* scratch, Compute& factor) {
  const AttentionState<Compute>& state = result.state;
  if (state.shift.data_handle() == nullptr)
    return place_output(result, seen, normalizer_of(result, seen, shift, sum), scratch, factor);
  const SoftmaxState<Compute> to = state_of(state, seen.query.batch, seen.query.head, state_row);
  *to.shift = shift;
  *to.sum = sum;
  factor = 1;
  return to.o;
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

/// Writes out, lse and the statistics of one query. The bounds in `statistics` are those of z. Overwrites o.
template <class Compute>
void store_output(const Result<Compute>& result, const QueryRow& seen, const SoftmaxState<Compute>& state,
                  const TileStatistics<Compute>& statistics, index_t dv) {
  const Normalizer normalizer = normalizer_of(result, seen, *state.shift, *state.sum);
  write_statistics(result.statistics, {seen.entry(), seen.query.head - result.out.first_head(), seen.row()},
                   normalizer.factor, *state.sum, statistics);
  Compute factor;
  Compute* numbers = place_output(result, seen, normalizer, state.o, factor);
  kernels<RowKernels<Compute>>().multiply(state.o, dv, factor, numbers);
  narrow_result(result, seen, numbers);
}

/// The multiplier that replaces a c of 0 in a call with statistics, which divide by it. It is so small that every
/// weight is 1, and so large that logits are normal numbers.
inline constexpr double multiplier_for_0 = 0x1p-100;

/// Writes the whole result of one query and its statistics. Overwrites o. x is z·unit. The bounds of a state that
/// continues are merged as z: division is monotone, so they are bit-identical to one call.
template <class Compute>
void store_with_statistics(const Result<Compute>& result, const QueryRow& row, index_t state_row,
                           const SoftmaxState<Compute>& state, index_t dv) {
  QueryRow seen = row;
  const Query& query = seen.query;
  const double unit = seen.multiplier * std::numbers::log2e;
  if (seen.multiplier == multiplier_for_0) {
    seen.multiplier = 0;
    if (std::isfinite(*state.shift)) *state.shift = 0;
  }
  const TileStatistics<Compute>& of = state.statistics;
  Compute largest = static_cast<Compute>(*of.largest / unit),
          smallest = static_cast<Compute>(*of.smallest / unit);
  if (unit < 0) std::swap(largest, smallest);
  if (result.state.shift.data_handle() == nullptr) {
    return store_output(result, seen, state, {&largest, &smallest, of.distances, of.squares}, dv);
  }
  const TileStatistics<Compute> to = statistics_of(result.state, query.batch, query.head, state_row);
  if (!result.continues() || !seen.sequence->has_start) to.reset();
  *to.largest = std::max(*to.largest, largest);
  *to.smallest = std::min(*to.smallest, smallest);
  *to.distances = *of.distances;
  *to.squares = *of.squares;
  store_result(result, seen, state_row, state, dv);
}

SSMAX_END
