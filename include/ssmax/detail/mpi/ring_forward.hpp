// Computes attention for a sequence that is split over ranks. Queries stay on their rank, keys and values are
// sent to the ranks that need them.
#pragma once

#include <algorithm>
#include <limits>

#include "../../attention.hpp"
#include "exchange.hpp"
#include "reserve.hpp"
#include "share.hpp"

SSMAX_BEGIN_DETAIL

/// The memory of a rank in addition to its arguments: its keys, packed, two pieces, and a state per query, with
/// statistics if the rank wants them.
template <class A>
struct RingForwardMemory {
  RingForwardMemory(Arena& arena, index_t own_bytes, index_t piece_bytes, const OutputRows<A>& out,
                    bool has_statistics)
      : own(arena.take<std::byte>(own_bytes)), pieces(arena.take<std::byte>(2 * piece_bytes)) {
    const index_t batch = out.extent(0), heads = out.extent(1), local = out.extent(2);
    const auto number_of_each = [&] {
      return View<A, 3>{arena.take<A>(batch * heads * local), {batch, heads, local}};
    };
    state = {number_of_each(), number_of_each(), sums_of(arena, out)};
    if (!has_statistics) return;
    for (View<A, 3>* numbers : {&state.largest, &state.smallest, &state.distances, &state.squares})
      *numbers = number_of_each();
  }

  std::byte *own, *pieces;
  AttentionState<A> state{};
};

/// Collective. Computes out and lse of the queries of this rank.
template <class A>
void ring_forward(const AttentionOverRanks<A>& call, const Pieces& pieces) {
  const QueryShape query_shape = call.shape();
  const index_t positions = call.layout.positions(), dv = call.key_shape().value_width,
                key_bytes = call.key_bytes();
  const Problem<A> whole = whole_problem(call);
  const auto memory =
      reserve_on_all<RingForwardMemory<A>>(call, call.a.q.extent(2) * key_bytes, pieces.longest() * key_bytes,
                                           call.a.out, call.a.statistics.functions() != nullptr);
  const AttentionState<A>& state = memory.state;
  // Calls f(query, row) for each query of the rank.
  const auto for_each_row = [&](const auto& f) {
    for (const Piece& segment : pieces.segments()) {
      if (segment.rank != pieces.rank()) continue;
      for_each_query({query_shape.batch, query_shape.heads, segment.size(), positions}, [&](Query query) {
        const index_t row = segment.row + query.index;
        query.index += segment.begin;
        query.shape = query_shape;
        f(query, row);
      });
    }
  };
  for_each_row([&](const Query& query, index_t row) {
    state.shift(query.batch, query.head, row) = -std::numeric_limits<A>::infinity();
    state.sum(query.batch, query.head, row) = 0;
    std::fill_n(row_of(state.o, query.batch, query.head, row), dv, A{0});
    if (state.has_statistics()) statistics_of(state, query.batch, query.head, row).reset();
  });
  pack_share(call, pieces, whole, memory.own);
  KeyExchange exchange(call.comm, pieces, key_bytes, memory.own, memory.pieces);
  const auto poll = [&] { exchange.sent(); };
  for (const std::size_t step : exchange.steps()) {
    const Piece& piece = pieces.list()[step];
    const ViewKeys<A> keys = packed_keys(call, exchange.next(poll), piece);
    for (const Piece& segment : pieces.segments()) {
      if (segment.rank != pieces.rank() || !pieces.sees(segment, piece)) continue;
      const index_t first = segment.row, count = segment.size();
      const AttentionState<A> part{
          rows_of(state.shift, first, count),    rows_of(state.sum, first, count),
          rows_of(state.o, first, count),        rows_of(state.largest, first, count),
          rows_of(state.smallest, first, count), rows_of(state.distances, first, count),
          rows_of(state.squares, first, count)};
      call.a.q.functions()->run(part_of_problem(whole, segment, keys), call.variant,
                                make_state_result(part, true), &call.comm.scratch(), call.executor);
      poll();
    }
  }
  const Result<A> result = make_result<A>(call.a.out, call.a.lse, call.a);
  for_each_row([&](const Query& query, index_t row) {
    const Sequence own{.batch = query.batch, .entry = query.batch, .row_shift = row - query.index};
    store_complete(result, complete_row(result, call.variant, query, own), row, state, dv);
  });
  exchange.finish();
}

SSMAX_END
