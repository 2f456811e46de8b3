// Defines RankCall, a call on one of several ranks. The steps of a call take it in place of a list of parameters.
#pragma once

#include "../../decode.hpp"
#include "../../mpi_communicator.hpp"
#include "../../mpi_layout.hpp"
#include "../attention/terms/gradient_variant.hpp"
#include "../threads/any_executor.hpp"

SSMAX_BEGIN_DETAIL

/// A call over ranks. A is the type of the public function's arguments, V is Variant or GradientVariant. The objects
/// that it refers to must outlive it.
template <class T, class A, class V>
struct RankCall {
  const char* function;  // name in messages
  mpi::Communicator& comm;
  const mpi::Layout& layout;
  const A& a;  // of this rank
  const AttentionOptions<T>& options;
  const V& variant;
  const AnyExecutor& executor;

  /// Returns the shape of the queries of the whole sequence.
  [[nodiscard]] QueryShape shape() const {
    return {a.q.extent(0), a.q.extent(1), layout.positions(), layout.positions()};
  }
  [[nodiscard]] KeySourceShape key_shape() const {
    return {a.k.extent(0), a.k.extent(1), a.k.extent(3), a.v.extent(3)};
  }
  /// Returns the number of query heads per kv head.
  [[nodiscard]] index_t group() const { return a.q.extent(1) / std::max<index_t>(1, a.k.extent(1)); }
  /// Returns a source of the keys of the whole sequence that has no data.
  [[nodiscard]] KeyShare<T> keys_without_data() const {
    return {.k = {}, .v = {}, .keys = layout.positions()};
  }
};

template <class T>
using AttentionOverRanks = RankCall<T, AttentionArguments<T>, Variant<ComputeType<T>>>;
template <class T>
using BackwardOverRanks = RankCall<T, BackwardArguments<T>, GradientVariant<ComputeType<T>>>;
template <class T>
using DecodeOverRanks = RankCall<T, DecodeArguments<T>, Variant<ComputeType<T>>>;

/// Returns the problem of all rows of this rank. `keys` describes the whole sequence and has no data:
/// with_keys replaces it later.
template <class T, class A, class V>
Problem<ComputeType<T>> whole_problem(const RankCall<T, A, V>& call, const KeyShare<T>& keys) {
  check_no_lengths(call.function, call.options.lengths);
  return queries_among(called_by(call.function, call.options,
                                 make_problem(call.a.q, AnyKeys<ComputeType<T>>(keys), call.options)),
                       0, call.layout.positions());
}

SSMAX_END
