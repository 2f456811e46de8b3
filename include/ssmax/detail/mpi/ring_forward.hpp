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

template <class T>
void ring_forward(mpi::Communicator& comm, const Pieces& pieces, const AttentionArguments<T>& a,
                  const Problem<ComputeType<T>>& whole, const Variant<ComputeType<T>>& variant,
                  const AttentionOptions<T>& options, index_t positions, const AnyExecutor& executor) {
  using Compute = ComputeType<T>;
  const index_t batch = a.q.extent(0), heads = a.q.extent(1), local = a.q.extent(2), dv = a.v.extent(3);
  const KeySourceShape shape{batch, a.k.extent(1), a.k.extent(3), dv};
  const index_t key_size = shape.batch * shape.kv_heads * (shape.width + dv);
  const auto memory = reserve_on_all<RingForwardMemory<T>>(
      comm, "mpi::attention", options.workspace, local * key_size, pieces.longest() * key_size, a.out);
  const AttentionState<Compute>& state = memory.state;
  const QueryShape query_shape{batch, heads, positions, positions};
  // Calls f(query, row) for each query of the rank.
  const auto for_each_row = [&](const auto& f) {
    for (const Share& share : pieces.shares()) {
      if (share.segment.rank != pieces.rank()) continue;
      for (index_t b = 0; b < batch; ++b) {
        for (index_t h = 0; h < heads; ++h) {
          for (index_t i = 0; i < share.segment.size(); ++i) {
            f(Query{b, h, share.segment.begin + i, query_shape}, share.row + i);
          }
        }
      }
    }
  };
  for_each_row([&](const Query& query, index_t row) {
    state.shift(query.batch, query.head, row) = -std::numeric_limits<Compute>::infinity();
    state.sum(query.batch, query.head, row) = 0;
    std::fill_n(row_of(state.o, query.batch, query.head, row), dv, Compute{0});
  });
  pack_share(pieces, whole, variant, a.k, a.v, memory.own);
  KeyExchange<T> exchange(comm, pieces, key_size, memory.own, memory.pieces);
  const auto poll = [&] { exchange.sent(); };
  for (const std::size_t step : exchange.steps()) {
    const Piece& piece = pieces.list()[step];
    const KeyShare<T> keys = key_share(exchange.next(poll), piece, shape, positions);
    for (std::size_t i = 0; i < pieces.shares().size(); ++i) {
      const Share& share = pieces.shares()[i];
      if (share.segment.rank != pieces.rank() || !pieces.sees(i, piece)) continue;
      const index_t count = share.segment.size();
      const AttentionState<Compute> part{rows_of(state.shift, share.row, count),
                                         rows_of(state.sum, share.row, count),
                                         rows_of(state.o, share.row, count)};
      compiled::run_attention<OperandsOf<T>>(for_forward<T>(part_of_problem(whole, share, positions, keys)),
                                             variant, make_state_result(part, true), &comm.scratch(),
                                             executor);
      poll();
    }
  }
  const Result<ComputeType<T>> result = make_result(a, options);
  for_each_row([&](const Query& query, index_t row) {
    store_result(result, complete_row(result, variant, query), row, state.shift(query.batch, query.head, row),
                 state.sum(query.batch, query.head, row), row_of(state.o, query.batch, query.head, row), dv);
  });
  exchange.finish([] {});
}

SSMAX_END
