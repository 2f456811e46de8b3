// Where results go: normalised to out and lse, or as a state to be merged with others.
#pragma once

#include <algorithm>
#include <span>

#include "../../../online_softmax.hpp"
#include "../../../query.hpp"
#include "../../checks/views.hpp"
#include "../../kernels/rows.hpp"
#include "../../memory/storage.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

template <class T>
struct Result {
  using A = Compute<T>;

  View<T, 4> out{};
  View<A, 3> lse{};
  std::span<const A> sinks{};
  AttentionState<A> state{};  // if given, the rest is not

  /// One query: Σ exp(c·z) = 2^shift · sum, Σ exp(c·z)·v = 2^shift · o. o is overwritten.
  void store(const Query& query, A shift, A sum, A* o, index_t dv) const {
    if (state.shift.data_handle() != nullptr) {
      state.shift(query.batch, query.head, query.index) = shift;
      state.sum(query.batch, query.head, query.index) = sum;
      std::copy_n(o, dv, row_of(state.o, query.batch, query.head, query.index));
      return;
    }
    const Normalizer normalizer = sinks.empty()
                                      ? Normalizer(shift, sum)
                                      : Normalizer(shift, sum, sinks[static_cast<std::size_t>(query.head)]);
    if (dv > 0) {
      T* to = &out(query.batch, query.head, query.index, 0);
      A* wide = staging<A>(to, o);
      kernels<RowKernels<A>>().multiply(o, dv, static_cast<A>(normalizer.factor), wide);
      narrow_to(to, dv, wide);
    }
    if (lse.data_handle() != nullptr)
      lse(query.batch, query.head, query.index) = static_cast<A>(normalizer.lse);
  }
};

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
