// A query's state becomes its result.
#pragma once

#include <algorithm>

#include "../../../query.hpp"
#include "../../checks/views.hpp"
#include "../../kernels/rows.hpp"
#include "../../memory/conversion.hpp"
#include "../result.hpp"
#include "../state.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// One query, Σ exp(c·z) = 2^shift · sum: writes everything but its row, which is factor · o. Returns where to
/// put that: `scratch`, if it is then to be narrowed.
template <class T, class A = Compute<T>>
A* place_result(const Result<T>& result, const Query& query, A shift, A sum, A* scratch, A& factor) {
  const AttentionState<A>& state = result.state;
  if (state.shift.data_handle() != nullptr) {
    state.shift(query.batch, query.head, query.index) = shift;
    state.sum(query.batch, query.head, query.index) = sum;
    factor = 1;
    return row_of(state.o, query.batch, query.head, query.index);
  }
  const Normalizer normalizer =
      result.sinks.empty() ? Normalizer(shift, sum)
                           : Normalizer(shift, sum, result.sinks[static_cast<std::size_t>(query.head)]);
  if (result.lse.data_handle() != nullptr) {
    result.lse(query.batch, query.head, query.index) = static_cast<A>(normalizer.lse());
  }
  factor = static_cast<A>(normalizer.factor);
  return staging<A>(row_of(result.out, query.batch, query.head, query.index), scratch);
}

/// Narrows a query's row, which place_result sent to scratch.
template <class T, class A = Compute<T>>
void narrow_result(const Result<T>& result, const Query& query, const A* row, index_t dv) {
  if (result.state.o.data_handle() != nullptr) return;
  narrow_to(row_of(result.out, query.batch, query.head, query.index), dv, row);
}

/// The same with Σ exp(c·z)·v = 2^shift · o, the row included. o is overwritten.
template <class T, class A = Compute<T>>
void store_result(const Result<T>& result, const Query& query, A shift, A sum, A* o, index_t dv) {
  A factor;
  A* row = place_result(result, query, shift, sum, o, factor);
  kernels<RowKernels<A>>().multiply(o, dv, factor, row);
  narrow_result(result, query, row, dv);
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
