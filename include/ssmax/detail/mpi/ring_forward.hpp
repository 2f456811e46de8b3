// Computes attention for a sequence that is split over ranks. Queries stay on their rank, keys and values are
// sent to the ranks that need them.
#pragma once

#include <algorithm>
#include <limits>

#include "../../attention.hpp"
#include "../attention/forward/epilogue.hpp"
#include "exchange.hpp"
#include "reserve.hpp"
#include "share.hpp"

SSMAX_BEGIN_DETAIL

/// The memory of a rank in addition to its arguments: its keys, packed, two pieces, and a state per query.
template <class T>
struct RingForwardMemory {
  using Compute = ComputeType<T>;
  RingForwardMemory(Arena& arena, index_t key_numbers, index_t piece_numbers, const View<T, 4>& out)
      : own(arena.take<T>(key_numbers)), pieces(arena.take<T>(2 * piece_numbers)) {
    const index_t batch = out.extent(0), heads = out.extent(1), local = out.extent(2);
    const auto number_of_each = [&] {
      return View<Compute, 3>{arena.take<Compute>(batch * heads * local), {batch, heads, local}};
    };
    state = {number_of_each(), number_of_each(), sums_of(arena, out)};
  }

  T *own, *pieces;
  AttentionState<Compute> state{};
};

/// Collective. Computes out and lse of the queries of this rank.
template <class T>
void ring_forward(const AttentionOverRanks<T>& call, const Pieces& pieces) {
  using Compute = ComputeType<T>;
  const QueryShape query_shape = call.shape();
  const KeySourceShape shape = call.key_shape();
  const index_t positions = call.layout.positions(), dv = shape.value_width,
                key_size = shape.batch * shape.kv_heads * (shape.width + dv);
  const Problem<Compute> whole = whole_problem(call);
  const auto memory = reserve_on_all<RingForwardMemory<T>>(call, call.a.q.extent(2) * key_size,
                                                           pieces.longest() * key_size, call.a.out);
  const AttentionState<Compute>& state = memory.state;
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
    state.shift(query.batch, query.head, row) = -std::numeric_limits<Compute>::infinity();
    state.sum(query.batch, query.head, row) = 0;
    std::fill_n(row_of(state.o, query.batch, query.head, row), dv, Compute{0});
  });
  pack_share(call, pieces, whole, memory.own);
  KeyExchange<T> exchange(call.comm, pieces, key_size, memory.own, memory.pieces);
  const auto poll = [&] { exchange.sent(); };
  for (const std::size_t step : exchange.steps()) {
    const Piece& piece = pieces.list()[step];
    const ViewKeys<Compute> keys = key_share(exchange.next(poll), piece, shape, positions).source();
    for (const Piece& segment : pieces.segments()) {
      if (segment.rank != pieces.rank() || !pieces.sees(segment, piece)) continue;
      const index_t first = segment.row, count = segment.size();
      const AttentionState<Compute> part{rows_of(state.shift, first, count), rows_of(state.sum, first, count),
                                         rows_of(state.o, first, count)};
      compiled::run_attention<OperandOf<T, Compute>>(part_of_problem<T>(whole, segment, positions, keys),
                                             call.variant, make_state_result(part, true),
                                             &call.comm.scratch(), call.executor);
      poll();
    }
  }
  const Result<ComputeType<T>> result = make_result<ComputeType<T>>(call.a.out, call.a.lse, call.options);
  for_each_row([&](const Query& query, index_t row) {
    const Sequence own{.batch = query.batch, .entry = query.batch, .row_shift = row - query.index};
    store_result(result, complete_row(result, call.variant, query, own), row,
                 state_of(state, query.batch, query.head, row), dv);
  });
  exchange.finish();
}

SSMAX_END
