// Computes the backward of attention for a sequence that is split over ranks. The queries and dq stay on
// their rank. Keys and values are sent to the ranks that need them. The sums of dk and dv return to the owner
// of the keys.
#pragma once

#include <algorithm>
#include <vector>

#include "../../attention_backward.hpp"
#include "gradient_exchange.hpp"
#include "reserve.hpp"
#include "ring_forward.hpp"
#include "sums.hpp"

SSMAX_BEGIN_DETAIL

/// Memory for sums that wait for their turn: at most this, or the keys and values of the largest rank as
/// ComputeType<T> if they need more.
inline constexpr index_t max_sum_bytes = index_t{32} << 20;

/// The memory of a rank in addition to its arguments.
template <class T>
struct RingBackwardMemory {
  using Compute = ComputeType<T>;
  RingBackwardMemory(Arena& arena, index_t key_numbers, index_t piece_numbers, index_t outgoing_numbers,
                     index_t incoming_numbers, const AttentionGradients<T>& g, index_t kept_rows,
                     index_t sums_of_row)
      : own(arena.take<T>(key_numbers)),
        pieces(arena.take<T>(2 * piece_numbers)),
        outgoing_sums(arena.take<Compute>(outgoing_numbers)),
        incoming_sums(arena.take<Compute>(incoming_numbers)),
        dq(sums_of(arena, g.dq)),
        dk(sums_of(arena, g.dk)),
        dv(sums_of(arena, g.dv)),
        kept(arena, kept_rows, sums_of_row) {}

  T *own, *pieces;  // packed
  Compute *outgoing_sums, *incoming_sums;
  View<Compute, 4> dq, dk, dv;
  KeptSums kept;  // per segment: [parts][units][batch, heads, queries]
};

/// Adds packed rows to a view: to += from.
template <class Compute>
void add_packed(const Compute* from, const View<Compute, 4>& to) {
  const auto add_rows = kernels<PrefillBackwardKernels<Compute>>().add_rows;
  const index_t rows = to.extent(2), width = to.extent(3);
  for (index_t b = 0; b < to.extent(0); ++b) {
    for (index_t h = 0; h < to.extent(1); ++h, from += rows * width) {
      add_rows(from, width, rows, width, row_of(to, b, h, 0), to.stride(2));
    }
  }
}

template <class T>
void ring_backward(mpi::Communicator& comm, const Pieces& pieces, const BackwardArguments<T>& a,
                   const AttentionGradients<T>& g, const Problem<ComputeType<T>>& whole,
                   const GradientVariant<ComputeType<T>>& variant, const AttentionOptions<T>& options,
                   index_t positions, const AnyExecutor& executor) {
  using Compute = ComputeType<T>;
  const index_t local = a.q.extent(2), group = a.q.extent(1) / a.k.extent(1);
  const QueryShape query_shape{a.q.extent(0), a.q.extent(1), positions, positions};
  const KeySourceShape shape{a.k.extent(0), a.k.extent(1), a.k.extent(3), a.v.extent(3)};
  const index_t row = shape.batch * (shape.width + shape.value_width);  // elements per key of one kv head
  const bool wants_gradients = variant.wants_gradients() || !g.dsinks.empty();

  // All ranks compute the same number of kv heads at once: as many as leave space for all sums of a piece, at
  // least one.
  const SumOrder sums(pieces, group);
  index_t largest = 0;
  for (int r = 0; r < pieces.ranks(); ++r) largest = std::max(largest, pieces.count(r));
  const index_t sum_size = pieces.longest() * row, bytes = static_cast<index_t>(sizeof(Compute)),
                max_sums = std::max(max_sum_bytes, largest * shape.kv_heads * row * bytes) /
                           std::max<index_t>(1, sum_size * bytes),
                parts = sums.max_parts() + 1;
  const std::vector<HeadUnit> units =
      head_units(shape.kv_heads, std::clamp<index_t>(max_sums / parts, 1, shape.kv_heads));
  const index_t at_once = std::ranges::max(units, {}, &HeadUnit::count).count;
  const index_t slots = std::max(std::min(parts, max_sums / at_once), pieces.segments_of_rank() + 2);

  const auto memory = reserve_on_all<RingBackwardMemory<T>>(
      comm, "mpi::attention_backward", options.workspace, local * shape.kv_heads * row,
      shape.kv_heads * sum_size, slots * at_once * sum_size, 2 * at_once * sum_size, g,
      wants_gradients ? query_shape.batch * query_shape.heads * local : 0, 1 + variant.parameters());
  pack_share(pieces, whole, variant, a.k, a.v, memory.own);
  KeyExchange<T> exchange(comm, pieces, shape.kv_heads * row, memory.own, memory.pieces);
  GradientExchange<Compute> gradients(comm, pieces, sums, units, row, memory.outgoing_sums, slots,
                                      memory.incoming_sums);
  const auto add_to_own = [&](std::size_t i, std::size_t u, const Compute* sum) {
    const Piece& piece = pieces.list()[i];
    const HeadUnit& unit = units[u];
    const auto own_part = [&](const View<Compute, 4>& view) {
      return heads_of(rows_of(view, piece.row, piece.keys.size()), unit.first, unit.count);
    };
    add_packed(sum, own_part(memory.dk));
    add_packed(sum + shape.batch * unit.count * piece.keys.size() * shape.width, own_part(memory.dv));
  };
  const auto poll = [&] {
    exchange.sent();
    gradients.poll(add_to_own);
  };

  const auto kept_of = [&](const Share& share, KeyRange queries, const HeadUnit& unit, index_t further) {
    if (share.segment.rank != pieces.rank()) return CallSums{};
    const index_t first = share.row + queries.begin - share.segment.begin;
    return memory.kept.from(
        query_shape.batch * (first * query_shape.heads + unit.first * group * queries.size()) + further);
  };
  // Computes the gradients of the queries of a part against `keys`, and adds the gradients of the keys to
  // `sum`.
  const auto attend = [&](std::size_t i, KeyRange queries, const HeadUnit& unit, const KeyShare<T>& keys,
                          Compute* sum, BackwardStage stage) {
    const Share& share = pieces.shares()[i];
    const Share part{{queries.begin, queries.end, pieces.rank()},
                     share.row + queries.begin - share.segment.begin};
    const index_t first = unit.first * group, count = unit.count * group, length = keys.k.extent(2);
    const auto rows = [&](const auto& view) {
      return heads_of(rows_of(view, part.row, queries.size()), first, count);
    };
    const KeyShare<T> own_keys = keys_in(heads_of(keys.k, unit.first, unit.count),
                                         heads_of(keys.v, unit.first, unit.count), keys.keys, keys.first);
    stage.kept = kept_of(share, queries, unit, 0);
    const View<Compute, 4> dk{sum, {shape.batch, unit.count, length, shape.width}},
        dv{sum + dk.size(), {shape.batch, unit.count, length, shape.value_width}};
    AttentionGradients<T> gradients_here{
        .dout = rows(g.dout), .dlse = rows(g.dlse), .dq = rows(g.dq), .dsinks = g.dsinks};
    StageSums<Compute> sums_here{};
    if constexpr (std::same_as<T, Compute>) {
      gradients_here.dk = dk;
      gradients_here.dv = dv;
    } else {
      gradients_here.dk = {nullptr, {shape.batch, unit.count, length, shape.width}};
      gradients_here.dv = {nullptr, {shape.batch, unit.count, length, shape.value_width}};
      sums_here = {{rows(memory.dq), first}, addressable(dk), addressable(dv)};
    }
    const BackwardProblem<ComputeType<T>> problem = make_backward_problem<T>(
        with_heads(part_of_problem(whole, part, positions, own_keys), first, count),
        {.out = rows(a.out), .lse = rows(a.lse)}, gradients_here, options, stage, sums_here);
    compiled::run_backward<OperandsOf<T>>(problem, variant, &comm.scratch(), executor);
  };
  const auto without_keys = [&](bool first, bool last) {
    const KeyShare<T> none = key_share<T>(memory.own, Piece{}, shape, positions);
    for (std::size_t i = 0; i < pieces.shares().size(); ++i) {
      if (pieces.shares()[i].segment.rank != pieces.rank()) continue;
      sums.for_each_part(pieces.shares()[i], [&](KeyRange queries) {
        for (const HeadUnit& unit : units)
          attend(i, queries, unit, none, memory.outgoing_sums, {first, last});
      });
    }
  };
  // Calls f(b, h, i) for each key of the rank.
  const auto for_each_key = [&](const auto& f) {
    for (index_t b = 0; b < shape.batch; ++b) {
      for (index_t h = 0; h < shape.kv_heads; ++h) {
        for (index_t i = 0; i < local; ++i) f(b, h, i);
      }
    }
  };
  for_each_key([&](index_t b, index_t h, index_t i) {
    std::fill_n(row_of(memory.dk, b, h, i), shape.width, Compute{0});
    std::fill_n(row_of(memory.dv, b, h, i), shape.value_width, Compute{0});
  });

  without_keys(true, false);
  for (const std::size_t step : exchange.steps()) {
    const Piece& piece = pieces.list()[step];
    const KeyShare<T> keys = key_share<T>(exchange.next(poll), piece, shape, positions);
    const std::vector<SumPart> parts_here = sums.parts(piece);
    for (std::size_t u = 0; u < units.size(); ++u) {
      for (const SumPart& part : parts_here) {
        Compute* sum = gradients.room(part, step, u, add_to_own);
        attend(part.share, part.queries, units[u], keys, sum,
               {.first = false, .last = false, .continues = part.from >= 0});
        gradients.send(part, step, u);
        poll();
      }
    }
  }
  without_keys(false, true);
  gradients.finish(add_to_own);
  exchange.finish([] {});

  if (whole.has_rope()) {
    for (const Piece& piece : pieces.list()) {
      if (piece.keys.rank != pieces.rank()) continue;
      for (index_t b = 0; b < shape.batch; ++b) {
        for (index_t h = 0; h < shape.kv_heads; ++h) {
          const Query query{b, h * (query_shape.heads / shape.kv_heads), 0, query_shape};
          for (index_t i = 0; i < piece.keys.size(); ++i) {
            Compute* dk = row_of(memory.dk, b, h, piece.row + i);
            const index_t position = whole.key_position + variant.key_position(query, piece.keys.begin + i);
            rotate(whole.rope, dk, shape.width, dk, shape.width, 1, shape.width, position, true);
          }
        }
      }
    }
  }
  if constexpr (!std::same_as<T, Compute>) {
    for_each_key([&](index_t b, index_t h, index_t i) {
      narrow_to(row_of(g.dk, b, h, i), shape.width, row_of(memory.dk, b, h, i));
      narrow_to(row_of(g.dv, b, h, i), shape.value_width, row_of(memory.dv, b, h, i));
    });
  }
  if (!wants_gradients) return;
  hand_over_all(comm, variant, query_shape, g.dsinks, [&](index_t batch, index_t head) {
    const index_t kv_head = head / group;
    const HeadUnit& unit =
        *std::ranges::find_if(units, [&](const HeadUnit& any) { return kv_head < any.first + any.count; });
    std::vector<KeptQueries> all;
    for (const Share& share : pieces.shares()) {
      sums.for_each_part(share, [&](KeyRange queries) {
        const index_t row_of_head = (batch * unit.count * group + head - unit.first * group) * queries.size();
        all.push_back(
            {{queries.begin, queries.end, share.segment.rank}, kept_of(share, queries, unit, row_of_head)});
      });
    }
    return all;
  });
}

SSMAX_END
