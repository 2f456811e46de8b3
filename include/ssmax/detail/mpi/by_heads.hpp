// Computes attention by heads. A rank receives all positions of some kv heads and of their query heads. It
// computes these heads like a single process and returns the results to the ranks that own the positions.
// Each rank computes at most one kv head per round.
#pragma once

#include <array>

#include "../memory/arena.hpp"
#include "head_exchange.hpp"
#include "reserve.hpp"
#include "share.hpp"
#include "sums.hpp"

SSMAX_BEGIN_DETAIL

/// Calls f(member) for the statistics whose bits are set in `given`.
template <class A, class F>
void for_each_given(std::int64_t given, const F& f) {
  constexpr std::array all{&StatisticsOption<A>::largest, &StatisticsOption<A>::smallest,
                           &StatisticsOption<A>::sum_of_squares, &StatisticsOption<A>::entropy};
  for (std::size_t i = 0; i < all.size(); ++i) {
    if ((given >> i & 1) != 0) f(all[i]);
  }
}

/// Returns a number whose lowest bit says whether lse is given. The next bits say the same of each statistic.
template <class A>
std::int64_t given_numbers(const AttentionArguments<A>& a) {
  const RowStatistics<A> statistics = a.statistics.views();
  std::int64_t given = 0;
  for (const View<A, 3>& numbers :
       {statistics.entropy, statistics.sum_of_squares, statistics.smallest, statistics.largest, a.lse})
    given = 2 * given + (is_given(numbers) ? 1 : 0);
  return given;
}

/// The arrays of WholeHeads in addition to q, k, v and out.
struct WantedArrays {
  bool lse = false;
  std::int64_t statistics = 0;  // their bits
  bool gradients = false, dlse = false;
  index_t kept_rows = 0, sums_of_row = 0;  // of KeptSums. The rows are the queries of all rounds
};

/// All positions of one kv head and of its query heads: arguments whose tensors lie in memory of an arena.
template <class A, class Arguments>
struct WholeHeads {
  /// Tensors that are not wanted stay as given.
  template <class Call>
  WholeHeads(Arena& arena, const Call& call, const AttentionGradients<A>& gradients,
             const WantedArrays& wanted)
      : a(call.a), g(gradients), kept(arena, wanted.kept_rows, wanted.sums_of_row) {
    const QueryShape shape = call.shape();
    const index_t group = call.group();
    const auto place = [&](Rows& tensor, index_t heads) {
      const std::array<index_t, 4> extents{shape.batch, heads, shape.queries, tensor.extent(3)};
      const index_t elements = shape.batch * heads * shape.queries * tensor.extent(3);
      tensor.place(arena.take(elements, tensor.element_bytes()), extents);
    };
    const auto place_numbers = [&](auto& numbers) {
      numbers =
          View<A, 3>(arena.take<A>(shape.batch * group * shape.queries), {shape.batch, group, shape.queries});
    };
    place(a.q, group), place(a.k, 1), place(a.v, 1), place(a.out, group);
    if (wanted.lse) place_numbers(a.lse);
    if constexpr (requires { a.statistics; }) {
      a.statistics = {};
      for_each_given<A>(wanted.statistics, [&](auto member) { place_numbers(a.statistics.*member); });
    }
    if (!wanted.gradients) return;
    place(g.dout, group), place(g.dq, group), place(g.dk, 1), place(g.dv, 1);
    if (wanted.dlse) place_numbers(g.dlse);
  }

  Arguments a;
  AttentionGradients<A> g;
  KeptSums kept;  // [rounds][batch, heads per kv head, positions]
};

/// Returns one number per row as rows with one channel.
template <class X>
Rows as_rows(const View<X, 3>& numbers) {
  return {View<X, 4>(numbers.data_handle(), {numbers.extent(0), numbers.extent(1), numbers.extent(2), 1},
                     {numbers.stride(0), numbers.stride(1), numbers.stride(2), 1}),
          ElementKind::compute};
}

/// Returns the problem of the heads from `first` on that `whole` holds. `keys` are those of `whole`.
template <class A, class Arguments, class V>
Problem<A> problem_of_heads(const RankCall<A, Arguments, V>& call, const WholeHeads<A, Arguments>& whole,
                            const ViewKeys<A>& keys, index_t first) {
  return heads_among(make_problem<A>(call.function, whole.a.q, AnyKeys<A>(keys), whole.a), first,
                     call.shape().heads);
}

/// Collective. `numbers`, as given_numbers returns them, must be equal on all ranks.
template <class A>
void forward_by_heads(const AttentionOverRanks<A>& call, std::int64_t numbers) {
  using Whole = WholeHeads<A, AttentionArguments<A>>;
  const bool has_lse = (numbers & 1) != 0;
  const std::int64_t statistics = numbers / 2;
  const auto whole = reserve_on_all<Whole>(call, call, AttentionGradients<A>(),
                                           WantedArrays{.lse = has_lse, .statistics = statistics});
  HeadExchange exchange(call.comm, call.layout, call.key_shape().kv_heads);
  for (index_t round = 0; round < exchange.rounds(); ++round) {
    exchange.gather(call.a.q, whole.a.q, round);
    exchange.gather(call.a.k, whole.a.k, round);
    exchange.gather(call.a.v, whole.a.v, round);
    if (exchange.has_head(call.comm.rank(), round)) {
      const index_t first = (exchange.first_of(call.comm.rank()) + round) * call.group();
      const ViewKeys<A> keys = keys_in(whole.a.k, whole.a.v, call.layout.positions());
      call.a.q.functions()->run(
          problem_of_heads(call, whole, keys, first), call.variant,
          make_result<A>(whole.a.out, has_lse ? whole.a.lse : View<A, 3>(), whole.a, first),
          &call.comm.scratch(), call.executor);
    }
    exchange.scatter(whole.a.out, call.a.out, round);
    if (has_lse) exchange.scatter(as_rows(whole.a.lse), as_rows(call.a.lse), round);
    for_each_given<A>(statistics, [&](auto member) {
      exchange.scatter(as_rows(whole.a.statistics.*member), as_rows(call.a.statistics.*member), round);
    });
  }
}

/// Collective. `has_dlse` must be equal on all ranks.
template <class A>
void backward_by_heads(const BackwardOverRanks<A>& call, const AttentionGradients<A>& g, bool has_dlse) {
  const QueryShape shape = call.shape();
  const index_t n = shape.queries, group = call.group(), rows = shape.batch * group * n;  // per round
  const bool wants_gradients = call.variant.wants_gradients() || !g.dsinks.empty();
  HeadExchange exchange(call.comm, call.layout, call.key_shape().kv_heads);
  const auto whole = reserve_on_all<WholeHeads<A, BackwardArguments<A>>>(
      call, call, g,
      WantedArrays{.lse = true,
                   .gradients = true,
                   .dlse = has_dlse,
                   .kept_rows = wants_gradients ? exchange.rounds() * rows : 0,
                   .sums_of_row = 1 + call.variant.parameters()});
  for (index_t round = 0; round < exchange.rounds(); ++round) {
    exchange.gather(call.a.q, whole.a.q, round);
    exchange.gather(call.a.k, whole.a.k, round);
    exchange.gather(call.a.v, whole.a.v, round);
    exchange.gather(call.a.out, whole.a.out, round);
    exchange.gather(as_rows(call.a.lse), as_rows(whole.a.lse), round);
    exchange.gather(g.dout, whole.g.dout, round);
    if (has_dlse) exchange.gather(as_rows(g.dlse), as_rows(whole.g.dlse), round);
    if (exchange.has_head(call.comm.rank(), round)) {
      const index_t first = (exchange.first_of(call.comm.rank()) + round) * group;
      const ViewKeys<A> keys = keys_in(whole.a.k, whole.a.v, n);
      const BackwardProblem<A> problem =
          make_backward_problem<A>(problem_of_heads(call, whole, keys, first), whole.a, whole.g, call.a,
                                   {.kept = whole.kept.from(round * rows)});
      g.dout.functions()->run(problem, call.variant, &call.comm.scratch(), call.executor);
    }
    exchange.scatter(whole.g.dq, g.dq, round);
    exchange.scatter(whole.g.dk, g.dk, round);
    exchange.scatter(whole.g.dv, g.dv, round);
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
