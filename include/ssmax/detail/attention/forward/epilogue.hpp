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

/// One query, row `row` of its head: Σ exp(c·z) = 2^shift · sum, Σ exp(c·z)·v = 2^shift · o. o is overwritten.
template <class T, class A = Compute<T>>
void store_result(const Result<T>& result, const Query& query, index_t row, A shift, A sum, A* o,
                  index_t dv) {
  const AttentionState<A>& state = result.state;
  if (state.shift.data_handle() != nullptr) {
    state.shift(query.batch, query.head, row) = shift;
    state.sum(query.batch, query.head, row) = sum;
    std::copy_n(o, dv, row_of(state.o, query.batch, query.head, row));
    return;
  }
  const Normalizer normalizer =
      result.sinks.empty() ? Normalizer(shift, sum)
                           : Normalizer(shift, sum, result.sinks[static_cast<std::size_t>(query.head)]);
  if (dv > 0) {
    T* to = &result.out(query.batch, query.head, row, 0);
    A* wide = staging<A>(to, o);
    kernels<RowKernels<A>>().multiply(o, dv, static_cast<A>(normalizer.factor), wide);
    narrow_to(to, dv, wide);
  }
  if (result.lse.data_handle() != nullptr) {
    result.lse(query.batch, query.head, row) = static_cast<A>(normalizer.lse);
  }
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
