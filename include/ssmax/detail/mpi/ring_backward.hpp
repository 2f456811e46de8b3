// Attention's backward of a sequence that is split over ranks: the queries and dq stay, the keys come by, and what
// they are given goes home.
#pragma once

#include <utility>
#include <vector>

#include "../../attention_backward.hpp"
#include "gradient_exchange.hpp"
#include "ring_forward.hpp"
#include "sums.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// to += from
template <class T>
void add_rows(const View<T, 4>& to, const View<const T, 4>& from) {
  for (index_t b = 0; b < to.extent(0); ++b) {
    for (index_t h = 0; h < to.extent(1); ++h) {
      for (index_t i = 0; i < to.extent(2); ++i) {
        T* sums = row_of(to, b, h, i);
        const T* terms = row_of(from, b, h, i);
        for (index_t c = 0; c < to.extent(3); ++c) sums[c] += terms[c];
      }
    }
  }
}

template <class T>
void ring_backward(mpi::Communicator& comm, const RingPlan& plan, const BackwardArguments<T>& a,
                   const AttentionGradients<T>& g, const Problem<T, T>& whole,
                   const GradientVariant<T>& variant, const AttentionOptions<T>& options, index_t positions,
                   const AnyExecutor& executor) {
  const index_t local = a.q.extent(2);
  const QueryShape query_shape{a.q.extent(0), a.q.extent(1), positions, positions};
  const KeySourceShape shape{a.k.extent(0), a.k.extent(1), a.k.extent(3), a.v.extent(3)};
  const index_t row = shape.batch * shape.kv_heads * (shape.width + shape.value_width);
  const index_t piece_size = plan.longest_piece() * row;
  const bool learns = variant.learns() || !g.dsinks.empty();

  T* own = pack_share<T, T>(comm, plan, whole, variant, a.k, a.v, 7);
  T* buffers = own + local * row;
  T* apart = buffers + 6 * piece_size;  // what a further segment of this rank gives
  KeyExchange<T> exchange(comm, plan, row, own, buffers);
  GradientExchange<T> gradients(comm, plan, row, buffers + 2 * piece_size);
  const auto of_piece = [&](T* packed, const Piece& piece) {
    const index_t count = piece.keys.size(), heads = shape.batch * shape.kv_heads;
    return std::pair{addressable(View<T, 4>{packed, {shape.batch, shape.kv_heads, count, shape.width}}),
                     addressable(View<T, 4>{packed + heads * count * shape.width,
                                            {shape.batch, shape.kv_heads, count, shape.value_width}})};
  };
  const auto own_piece = [&](const Piece& piece) {
    return std::pair{rows_of(g.dk, piece.row, piece.keys.size()),
                     rows_of(g.dv, piece.row, piece.keys.size())};
  };
  const auto add_to_own = [&](std::size_t i, T* contribution) {
    const Piece& piece = plan.pieces()[i];
    const auto [dk, dv] = own_piece(piece);
    const auto [more_dk, more_dv] = of_piece(contribution, piece);
    add_rows<T>(dk, more_dk);
    add_rows<T>(dv, more_dv);
  };
  const auto poll = [&] {
    exchange.sent();
    gradients.poll(add_to_own);
  };

  std::vector<KeptSums> kept_of;  // [shares], those of this rank's
  for (const Share& share : plan.shares()) {
    const bool mine = share.segment.rank == plan.rank();
    kept_of.emplace_back(learns && mine, query_shape.batch * query_shape.heads * share.segment.size(),
                         1 + variant.parameters());
  }
  const auto attend = [&](std::size_t i, const KeyShare<T>& keys, const View<T, 4>& dk, const View<T, 4>& dv,
                          bool first, bool last) {
    const Share& share = plan.shares()[i];
    const index_t count = share.segment.size();
    const auto rows = [&](const auto& view) { return rows_of(view, share.row, count); };
    const BackwardProblem<T> problem{.forward = part_of_problem(whole, share, positions, keys),
                                     .out = rows(a.out),
                                     .dout = rows(g.dout),
                                     .lse = rows(a.lse),
                                     .dlse = rows(g.dlse),
                                     .dq = rows(g.dq),
                                     .dk = dk,
                                     .dv = dv,
                                     .sinks = options.sinks,
                                     .dsinks = g.dsinks,
                                     .stage = {first, last, kept_of[i].from(0)}};
    compiled::run_backward(problem, variant, options.workspace, executor);
  };
  const auto without_keys = [&](bool first, bool last) {
    const Piece none{};
    const auto [dk, dv] = of_piece(own, none);
    for (std::size_t i = 0; i < plan.shares().size(); ++i) {
      if (plan.shares()[i].segment.rank == plan.rank()) {
        attend(i, key_share<T>(own, none, shape, positions), dk, dv, first, last);
      }
    }
  };
  const auto clear = [&](const View<T, 4>& view) {
    for (index_t b = 0; b < view.extent(0); ++b) {
      for (index_t h = 0; h < view.extent(1); ++h) {
        for (index_t i = 0; i < view.extent(2); ++i) std::fill_n(row_of(view, b, h, i), view.extent(3), T{0});
      }
    }
  };
  clear(addressable(g.dk));
  clear(addressable(g.dv));

  without_keys(true, false);
  for (const std::size_t step : exchange.steps()) {
    const Piece& piece = plan.pieces()[step];
    const KeyShare<T> keys = key_share<T>(exchange.next(poll), piece, shape, positions);
    const bool mine = piece.keys.rank == plan.rank();
    const auto [dk, dv] = mine ? own_piece(piece) : of_piece(gradients.room(add_to_own), piece);
    const auto [apart_dk, apart_dv] = of_piece(apart, piece);
    bool is_first = true;
    for (std::size_t i = 0; i < plan.shares().size(); ++i) {
      if (plan.shares()[i].segment.rank != plan.rank() || !plan.sees(i, piece)) continue;
      attend(i, keys, is_first ? dk : apart_dk, is_first ? dv : apart_dv, false, false);
      if (!is_first) {
        add_rows<T>(dk, apart_dk);
        add_rows<T>(dv, apart_dv);
      }
      is_first = false;
      poll();
    }
    if (mine) {
      gradients.own_is_done(step);
    } else {
      gradients.send(step);
    }
  }
  without_keys(false, true);
  gradients.finish(add_to_own);
  exchange.finish([] {});

  if (whole.has_rope()) {
    for (const Piece& piece : plan.pieces()) {
      if (piece.keys.rank != plan.rank()) continue;
      for (index_t b = 0; b < shape.batch; ++b) {
        for (index_t h = 0; h < shape.kv_heads; ++h) {
          const Query query{b, h * (query_shape.heads / shape.kv_heads), 0, query_shape};
          for (index_t i = 0; i < piece.keys.size(); ++i) {
            T* dk = row_of(g.dk, b, h, piece.row + i);
            const index_t position = whole.key_position + variant.key_position(query, piece.keys.begin + i);
            rotate(whole.rope, dk, shape.width, dk, shape.width, 1, shape.width, position, true);
          }
        }
      }
    }
  }
  if (!learns) return;
  hand_over_all(comm, variant, query_shape, g.dsinks, [&](index_t batch, index_t head) {
    std::vector<KeptQueries> kept;
    for (std::size_t i = 0; i < kept_of.size(); ++i) {
      const mpi::Segment& segment = plan.shares()[i].segment;
      kept.push_back({segment, kept_of[i].from((batch * query_shape.heads + head) * segment.size())});
    }
    return kept;
  });
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
