// Computes attention by heads. A rank receives all positions of some kv heads and of their query heads. It
// computes these heads like a single process and returns the results to the ranks that own the positions.
// Each rank computes at most one kv head per round.
#pragma once

#include <array>
#include <type_traits>

#include "../../attention_backward.hpp"
#include "../memory/arena.hpp"
#include "head_exchange.hpp"
#include "reserve.hpp"
#include "share.hpp"
#include "sums.hpp"

SSMAX_BEGIN_DETAIL

/// The memory for all positions of one kv head and of its query heads.
template <class T>
struct WholeHeads {
  /// Takes the memory of the views from the arena. The views have the extents of all queries and keys. Views
  /// that are not wanted are empty. `kept_rows` is the number of queries, over all rounds, whose sums are
  /// kept.
  WholeHeads(Arena& arena, const QueryShape& shape, const KeySourceShape& keys, bool has_lse,
             bool has_gradients, bool has_dlse, index_t kept_rows, index_t sums_of_row)
      : kept(arena, kept_rows, sums_of_row) {
    const index_t group = shape.heads / keys.kv_heads;
    const auto rows = [&](auto& view, bool wanted, index_t heads, index_t channels) {
      using X = std::remove_pointer_t<decltype(view.data_handle())>;
      const index_t count = wanted ? shape.queries : 0;
      view = {arena.take<X>(shape.batch * heads * count * channels), {shape.batch, heads, count, channels}};
    };
    rows(q, true, group, keys.width);
    rows(k, true, 1, keys.width);
    rows(v, true, 1, keys.value_width);
    rows(out, true, group, keys.value_width);
    rows(lse, has_lse, group, 1);
    rows(dout, has_gradients, group, keys.value_width);
    rows(dlse, has_dlse, group, 1);
    rows(dq, has_gradients, group, keys.width);
    rows(dk, has_gradients, 1, keys.width);
    rows(dv, has_gradients, 1, keys.value_width);
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

template <class T>
void forward_by_heads(mpi::Communicator& comm, const mpi::Layout& layout, const AttentionArguments<T>& a,
                      bool has_lse, const Variant<ComputeType<T>>& variant,
                      const AttentionOptions<T>& options, const AnyExecutor& executor) {
  const index_t n = layout.positions(), kv_heads = a.k.extent(1), group = a.q.extent(1) / kv_heads;
  const QueryShape shape{a.q.extent(0), a.q.extent(1), n, n};
  const KeySourceShape keys_shape{shape.batch, kv_heads, a.k.extent(3), a.v.extent(3)};
  const auto whole = reserve_on_all<WholeHeads<T>>(comm, "mpi::attention", options.workspace, shape,
                                                   keys_shape, has_lse, false, false, 0, 0);
  HeadExchange exchange(comm, layout, kv_heads);
  for (index_t round = 0; round < exchange.rounds(); ++round) {
    exchange.gather(a.q, whole.q, round);
    exchange.gather(a.k, whole.k, round);
    exchange.gather(a.v, whole.v, round);
    if (exchange.has_head(comm.rank(), round)) {
      const index_t first = (exchange.first_of(comm.rank()) + round) * group;
      const KeyShare<T> keys = keys_in<T, T>(whole.k, whole.v, n);
      const auto problem = heads_among(
          called_by("mpi::attention", options,
                    for_forward<T>(make_problem<T, T>(whole.q, AnyKeys<ComputeType<T>>(keys), options))),
          first, shape.heads);
      const Result<ComputeType<T>> result = make_result(whole.out, as_numbers(whole.lse), options, first);
      compiled::run_attention<OperandsOf<T>>(problem, variant, result, &comm.scratch(), executor);
    }
    exchange.scatter(whole.out, a.out, round);
    if (has_lse) exchange.scatter(whole.lse, as_rows(a.lse), round);
  }
}

template <class T>
void backward_by_heads(mpi::Communicator& comm, const mpi::Layout& layout, const BackwardArguments<T>& a,
                       const AttentionGradients<T>& g, bool has_dlse,
                       const GradientVariant<ComputeType<T>>& variant, const AttentionOptions<T>& options,
                       const AnyExecutor& executor) {
  const index_t n = layout.positions(), kv_heads = a.k.extent(1), group = a.q.extent(1) / kv_heads;
  const QueryShape shape{a.q.extent(0), a.q.extent(1), n, n};
  const KeySourceShape keys_shape{shape.batch, kv_heads, a.k.extent(3), a.v.extent(3)};
  const bool wants_gradients = variant.wants_gradients() || !g.dsinks.empty();
  HeadExchange exchange(comm, layout, kv_heads);
  const index_t rows = shape.batch * group * n;  // per round
  const auto whole = reserve_on_all<WholeHeads<T>>(
      comm, "mpi::attention_backward", options.workspace, shape, keys_shape, true, true, has_dlse,
      wants_gradients ? exchange.rounds() * rows : 0, 1 + variant.parameters());
  for (index_t round = 0; round < exchange.rounds(); ++round) {
    exchange.gather(a.q, whole.q, round);
    exchange.gather(a.k, whole.k, round);
    exchange.gather(a.v, whole.v, round);
    exchange.gather(a.out, whole.out, round);
    exchange.gather(as_rows(a.lse), whole.lse, round);
    exchange.gather(g.dout, whole.dout, round);
    if (has_dlse) exchange.gather(as_rows(g.dlse), whole.dlse, round);
    if (exchange.has_head(comm.rank(), round)) {
      const index_t first = (exchange.first_of(comm.rank()) + round) * group;
      const KeyShare<T> keys = keys_in<T, T>(whole.k, whole.v, n);
      const BackwardProblem<ComputeType<T>> problem = make_backward_problem<T>(
          heads_among(called_by("mpi::attention_backward", options,
                                make_problem<T, T>(whole.q, AnyKeys<ComputeType<T>>(keys), options)),
                      first, shape.heads),
          {.out = whole.out, .lse = as_numbers(whole.lse)},
          {.dout = whole.dout,
           .dlse = as_numbers(whole.dlse),
           .dq = whole.dq,
           .dk = whole.dk,
           .dv = whole.dv,
           .dsinks = g.dsinks},
          options, {.kept = whole.kept.from(round * rows)});
      compiled::run_backward<OperandsOf<T>>(problem, variant, &comm.scratch(), executor);
    }
    exchange.scatter(whole.dq, g.dq, round);
    exchange.scatter(whole.dk, g.dk, round);
    exchange.scatter(whole.dv, g.dv, round);
  }
  if (!wants_gradients) return;
  hand_over_all(comm, variant, shape, g.dsinks, [&](index_t batch, index_t head) {
    const int owner = exchange.rank_of(head / group);
    CallSums sums{};
    if (owner == comm.rank()) {
      const index_t round = head / group - exchange.first_of(owner);
      sums = whole.kept.from(round * rows + (batch * group + head % group) * n);
    }
    return std::array{KeptQueries{{0, n, owner}, sums}};
  });
}

SSMAX_END
