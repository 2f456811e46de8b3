// Computes attention by heads. A rank receives all positions of some kv heads and of their query heads. It
// computes these heads like a single process and returns the results to the ranks that own the positions.
// Each rank computes at most one kv head per round.
#pragma once

#include <array>
#include <type_traits>

#include "../memory/arena.hpp"
#include "head_exchange.hpp"
#include "reserve.hpp"
#include "share.hpp"
#include "sums.hpp"

SSMAX_BEGIN_DETAIL

/// The arrays of WholeHeads in addition to q, k, v and out.
struct WantedArrays {
  bool lse = false, gradients = false, dlse = false;
  index_t kept_rows = 0, sums_of_row = 0;  // of KeptSums. The rows are the queries of all rounds
};

/// The memory for all positions of one kv head and of its query heads.
template <class T>
struct WholeHeads {
  /// Takes the memory of the views from the arena. The views have the extents of all queries and keys. Views
  /// that are not wanted are empty.
  WholeHeads(Arena& arena, const QueryShape& shape, const KeySourceShape& keys, const WantedArrays& wanted)
      : kept(arena, wanted.kept_rows, wanted.sums_of_row) {
    const index_t group = shape.heads / keys.kv_heads;
    const auto rows = [&](auto& view, bool is_wanted, index_t heads, index_t channels) {
      using X = std::remove_pointer_t<decltype(view.data_handle())>;
      const index_t count = is_wanted ? shape.queries : 0;
      view = {arena.take<X>(shape.batch * heads * count * channels), {shape.batch, heads, count, channels}};
    };
    rows(q, true, group, keys.width);
    rows(k, true, 1, keys.width);
    rows(v, true, 1, keys.value_width);
    rows(out, true, group, keys.value_width);
    rows(lse, wanted.lse, group, 1);
    rows(dout, wanted.gradients, group, keys.value_width);
    rows(dlse, wanted.dlse, group, 1);
    rows(dq, wanted.gradients, group, keys.width);
    rows(dk, wanted.gradients, 1, keys.width);
    rows(dv, wanted.gradients, 1, keys.value_width);
  }

  View<T, 4> q, k, v, out, dout, dq, dk, dv;
  View<ComputeType<T>, 4> lse, dlse;
  KeptSums kept;  // [rounds][batch, heads per kv head, positions]
};

/// Returns a view of one number per row as rows with one channel.
template <class Compute>
View<Compute, 4> as_rows(const View<Compute, 3>& numbers) {
  return {numbers.data_handle(),
          {numbers.extent(0), numbers.extent(1), numbers.extent(2), 1},
          {numbers.stride(0), numbers.stride(1), numbers.stride(2), 1}};
}
template <class Compute>
View<Compute, 3> as_numbers(const View<Compute, 4>& rows) {
  if (rows.size() == 0) return {};
  return {rows.data_handle(), {rows.extent(0), rows.extent(1), rows.extent(2)}};
}

/// Returns the problem of the heads from `first` on that `whole` holds. `keys` are those of `whole`.
template <class T, class A, class V>
Problem<ComputeType<T>> problem_of_heads(const RankCall<T, A, V>& call, const WholeHeads<T>& whole,
                                         const ViewKeys<ComputeType<T>>& keys, index_t first) {
  const InputRows<ComputeType<T>> q{View<const T, 4>(whole.q)};
  return heads_among(
      make_problem(call.function, q, AnyKeys<ComputeType<T>>(keys), call.options),
      first, call.shape().heads);
}

/// Collective. `has_lse` must be equal on all ranks.
template <class T>
void forward_by_heads(const AttentionOverRanks<T>& call, bool has_lse) {
  const auto whole =
      reserve_on_all<WholeHeads<T>>(call, call.shape(), call.key_shape(), WantedArrays{.lse = has_lse});
  HeadExchange exchange(call.comm, call.layout, call.key_shape().kv_heads);
  for (index_t round = 0; round < exchange.rounds(); ++round) {
    exchange.gather(call.a.q, whole.q, round);
    exchange.gather(call.a.k, whole.k, round);
    exchange.gather(call.a.v, whole.v, round);
    if (exchange.has_head(call.comm.rank(), round)) {
      const index_t first = (exchange.first_of(call.comm.rank()) + round) * call.group();
      const auto keys = keys_in<ComputeType<T>>(whole.k, whole.v, call.layout.positions());
      compiled::run_attention<OperandOf<T, ComputeType<T>>>(
          problem_of_heads(call, whole, keys, first), call.variant,
          make_result<ComputeType<T>>(whole.out, as_numbers(whole.lse), call.options, first), &call.comm.scratch(),
          call.executor);
    }
    exchange.scatter(whole.out, call.a.out, round);
    if (has_lse) exchange.scatter(whole.lse, as_rows(call.a.lse), round);
  }
}

/// Collective. `has_dlse` must be equal on all ranks.
template <class T>
void backward_by_heads(const BackwardOverRanks<T>& call, const mpi::AttentionGradients<T>& g, bool has_dlse) {
  const QueryShape shape = call.shape();
  const index_t n = shape.queries, group = call.group(), rows = shape.batch * group * n;  // per round
  const bool wants_gradients = call.variant.wants_gradients() || !g.dsinks.empty();
  HeadExchange exchange(call.comm, call.layout, call.key_shape().kv_heads);
  const auto whole =
      reserve_on_all<WholeHeads<T>>(call, shape, call.key_shape(),
                                    WantedArrays{.lse = true,
                                                 .gradients = true,
                                                 .dlse = has_dlse,
                                                 .kept_rows = wants_gradients ? exchange.rounds() * rows : 0,
                                                 .sums_of_row = 1 + call.variant.parameters()});
  for (index_t round = 0; round < exchange.rounds(); ++round) {
    exchange.gather(call.a.q, whole.q, round);
    exchange.gather(call.a.k, whole.k, round);
    exchange.gather(call.a.v, whole.v, round);
    exchange.gather(call.a.out, whole.out, round);
    exchange.gather(as_rows(call.a.lse), whole.lse, round);
    exchange.gather(g.dout, whole.dout, round);
    if (has_dlse) exchange.gather(as_rows(g.dlse), whole.dlse, round);
    if (exchange.has_head(call.comm.rank(), round)) {
      const index_t first = (exchange.first_of(call.comm.rank()) + round) * group;
      const auto keys = keys_in<ComputeType<T>>(whole.k, whole.v, n);
      const BackwardProblem<ComputeType<T>> problem = make_backward_problem<ComputeType<T>>(
          problem_of_heads(call, whole, keys, first), {.out = whole.out, .lse = as_numbers(whole.lse)},
          {.dout = whole.dout,
           .dlse = as_numbers(whole.dlse),
           .dq = whole.dq,
           .dk = whole.dk,
           .dv = whole.dv,
           .dsinks = g.dsinks},
          call.options, {.kept = whole.kept.from(round * rows)});
      compiled::run_backward<OperandOf<T, ComputeType<T>>>(problem, call.variant, &call.comm.scratch(), call.executor);
    }
    exchange.scatter(whole.dq, g.dq, round);
    exchange.scatter(whole.dk, g.dk, round);
    exchange.scatter(whole.dv, g.dv, round);
  }
  if (!wants_gradients) return;
  hand_over_all(call.comm, call.variant, shape, g.dsinks, [&](index_t batch, index_t head) {
    const int owner = exchange.rank_of(head / group);
    CallSums sums{};
    if (owner == call.comm.rank()) {
      const index_t round = head / group - exchange.first_of(owner);
      sums = whole.kept.from(round * rows + (batch * group + head % group) * n);
    }
    return std::array{KeptQueries{{0, n, owner}, sums}};
  });
}

SSMAX_END
