// Attention, forward, of a sequence that is split over ranks: the queries stay, the keys come by.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "../../attention.hpp"
#include "../attention/forward/epilogue.hpp"
#include "exchange.hpp"
#include "share.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// Own keys, packed, and room for `extra` arrays of the longest piece and `more` elements.
template <class T>
T* pack_share(mpi::Communicator& comm, const RingPlan& plan, const Problem<T, T>& whole,
              const Variant<Compute<T>>& variant, const View<const T, 4>& k, const View<const T, 4>& v,
              index_t extra, index_t more = 0) {
  const index_t row = k.extent(0) * k.extent(1) * (k.extent(3) + v.extent(3));
  const index_t elements = (k.extent(2) + extra * plan.longest_piece()) * row + more;
  T* share = reinterpret_cast<T*>(comm.buffers().reserve(static_cast<std::size_t>(elements) * sizeof(T)));
  for (const Piece& piece : plan.pieces()) {
    if (piece.keys.rank == plan.rank()) pack_piece<T>(whole, variant, k, v, piece, share + piece.row * row);
  }
  return share;
}

template <class T>
void ring_forward(mpi::Communicator& comm, const RingPlan& plan, const AttentionArguments<T>& a,
                  const Problem<T, T>& whole, const Variant<Compute<T>>& variant,
                  const AttentionOptions<T>& options, index_t positions, const AnyExecutor& executor) {
  using A = Compute<T>;
  constexpr bool in_place = std::same_as<T, A>;  // out holds Σ exp(c·z)·v until it is divided by the sum
  const index_t batch = a.q.extent(0), heads = a.q.extent(1), local = a.q.extent(2), dv = a.v.extent(3);
  const auto rows = static_cast<std::size_t>(batch * heads * local);
  std::vector<A> shift(rows, -std::numeric_limits<A>::infinity()), sum(rows),
      wide(in_place ? 0 : rows * static_cast<std::size_t>(dv));
  AttentionState<A> state{{shift.data(), {batch, heads, local}}, {sum.data(), {batch, heads, local}}};
  if constexpr (in_place) {
    state.o = addressable(a.out);
  } else {
    state.o = {wide.data(), {batch, heads, local, dv}};
  }
  const auto for_each_row = [&](const auto& f) {
    for (index_t b = 0; b < batch; ++b) {
      for (index_t h = 0; h < heads; ++h) {
        for (index_t i = 0; i < local; ++i) f(b, h, i);
      }
    }
  };
  for_each_row([&](index_t b, index_t h, index_t i) { std::fill_n(row_of(state.o, b, h, i), dv, A{0}); });

  const KeySourceShape shape{a.k.extent(0), a.k.extent(1), a.k.extent(3), dv};
  const index_t row = shape.batch * shape.kv_heads * (shape.width + dv);
  T* own = pack_share<T>(comm, plan, whole, variant, a.k, a.v, 2);
  KeyExchange<T> exchange(comm, plan, row, own, own + a.k.extent(2) * row);
  const auto poll = [&] { exchange.sent(); };
  for (const std::size_t step : exchange.steps()) {
    const Piece& piece = plan.pieces()[step];
    const KeyShare<T> keys = key_share(exchange.next(poll), piece, shape, positions);
    for (std::size_t i = 0; i < plan.shares().size(); ++i) {
      const Share& share = plan.shares()[i];
      if (share.segment.rank != plan.rank() || !plan.sees(i, piece)) continue;
      const index_t count = share.segment.size();
      const Result<T> result{
          .state = {rows_of(state.shift, share.row, count), rows_of(state.sum, share.row, count),
                    rows_of(state.o, share.row, count)},
          .continues = true};
      compiled::run_attention(part_of_problem(whole, share, positions, keys), variant, result,
                              options.workspace, executor);
      poll();
    }
  }
  const Result<T> result{.out = addressable(a.out), .lse = a.lse, .sinks = options.sinks};
  for_each_row([&](index_t b, index_t h, index_t i) {
    store_result(result, {Query{b, h, i, {}}}, i, state.shift(b, h, i), state.sum(b, h, i),
                 row_of(state.o, b, h, i), dv);
  });
  exchange.finish([] {});
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
