// Computes the backward of attention for a sequence that is split over ranks. The queries and dq stay on
// their rank. Keys and values are sent to the ranks that need them. The sums of dk and dv return to the owner
// of the keys.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "gradient_exchange.hpp"
#include "reserve.hpp"
#include "ring_forward.hpp"
#include "sums.hpp"

SSMAX_BEGIN_DETAIL

/// Memory for sums that wait for their turn: at most this, or the keys and values of the largest rank in the type
/// of computation if they need more.
inline constexpr index_t max_sum_bytes = index_t{32} << 20;

/// The sums that a rank forms at once, and the sizes of the arrays of a rank.
struct RingBackwardSizes {
  template <class A>
  RingBackwardSizes(const BackwardOverRanks<A>& call, const AttentionGradients<A>& g, const SumOrder& order)
      : row(call.key_shape().batch * (call.a.k.extent(3) + call.a.v.extent(3))) {
    const Pieces& pieces = order.pieces();
    const index_t kv_heads = call.a.k.extent(1), bytes = static_cast<index_t>(sizeof(A));
    index_t largest = 0;
    for (int r = 0; r < pieces.ranks(); ++r) largest = std::max(largest, call.layout.count(r));
    const index_t sum = pieces.longest() * row, parts = order.max_parts() + 1,
                  max_sums = std::max(max_sum_bytes, largest * kv_heads * row * bytes) /
                             std::max<index_t>(1, sum * bytes);
    units = head_units(kv_heads, std::clamp<index_t>(max_sums / parts, 1, kv_heads));
    const index_t at_once = std::ranges::max(units, {}, &HeadUnit::count).count;
    slots = std::max(std::min(parts, max_sums / at_once), pieces.segments_of_rank() + 2);
    own_bytes = call.a.k.extent(2) * call.key_bytes();
    piece_bytes = pieces.longest() * call.key_bytes();
    slot = at_once * sum;
    wants_gradients = call.variant.wants_gradients() || !g.dsinks.empty();
    kept_rows = wants_gradients ? call.a.q.extent(0) * call.a.q.extent(1) * call.a.q.extent(2) : 0;
    sums_of_row = 1 + call.variant.parameters();
  }

  /// All ranks compute the same number of kv heads at once: as many as leave space for all sums of a piece, at
  /// least one.
  std::vector<HeadUnit> units;
  index_t row;                             // elements per key of one kv head
  index_t slots = 0, slot = 0;             // number of outgoing sums, and elements of a sum
  index_t own_bytes = 0, piece_bytes = 0;  // of the own keys and of a piece
  bool wants_gradients = false;            // of parameters
  index_t kept_rows = 0, sums_of_row = 0;  // of KeptSums
};

/// The memory of a rank in addition to its arguments.
template <class A>
struct RingBackwardMemory {
  RingBackwardMemory(Arena& arena, const RingBackwardSizes& sizes, const AttentionGradients<A>& g)
      : own(arena.take<std::byte>(sizes.own_bytes)),
        pieces(arena.take<std::byte>(2 * sizes.piece_bytes)),
        sums{arena.take<A>(sizes.slots * sizes.slot), arena.take<A>(2 * sizes.slot), sizes.slots, sizes.slot},
        dq(sums_of<A>(arena, g.dq)),
        dk(sums_of<A>(arena, g.dk)),
        dv(sums_of<A>(arena, g.dv)),
        kept(arena, sizes.kept_rows, sizes.sums_of_row) {}

  std::byte *own, *pieces;  // packed
  SumMemory<A> sums;
  View<A, 4> dq, dk, dv;
  KeptSums kept;  // per segment: [parts][units][batch, heads, queries]
};

/// The backward of attention on one rank. Requires that the arguments of the constructor outlive the object.
template <class A>
class RingBackward {
 public:
  /// Collective. Every rank throws if one rank lacks the memory.
  RingBackward(const BackwardOverRanks<A>& call, const AttentionGradients<A>& g, const Pieces& pieces)
      : call_(call),
        g_(g),
        pieces_(pieces),
        shape_(call.key_shape()),
        whole_(whole_problem(call)),
        order_(pieces, call.group()),
        sizes_(call, g, order_),
        memory_(reserve_on_all<RingBackwardMemory<A>>(call, sizes_, g)) {}

  /// Collective. Computes all gradients.
  void run() {
    pack_share(call_, pieces_, whole_, memory_.own);
    const QueryShape own_keys{shape_.batch, shape_.kv_heads, call_.a.k.extent(2)};
    for_each_query(own_keys, [&](const Query& key) {
      std::fill_n(row_of(memory_.dk, key.batch, key.head, key.index), shape_.width, A{0});
      std::fill_n(row_of(memory_.dv, key.batch, key.head, key.index), shape_.value_width, A{0});
    });
    add_up_pieces();
    if (whole_.has_rope()) rotate_back();
    for_each_query(own_keys, [&](const Query& key) {
      const index_t b = key.batch, h = key.head, i = key.index;
      g_.dk.store(b, h, i, row_of(memory_.dk, b, h, i));
      g_.dv.store(b, h, i, row_of(memory_.dv, b, h, i));
    });
    if (sizes_.wants_gradients) hand_over();
  }

 private:
  /// Computes the gradients against one piece after another. Sends the sums of dk and dv, and adds those that arrive.
  void add_up_pieces() {
    KeyExchange exchange(call_.comm, pieces_, call_.key_bytes(), memory_.own, memory_.pieces);
    GradientExchange<A> gradients(call_.comm, order_, sizes_.units, sizes_.row, memory_.sums);
    const auto add = [&](std::size_t piece, std::size_t unit, const A* sum) {
      add_to_own(pieces_.list()[piece], sizes_.units[unit], sum);
    };
    const auto poll = [&] {
      exchange.sent();
      gradients.poll(add);
    };
    attend_without_keys({.first = true, .last = false});
    for (const std::size_t step : exchange.steps()) {
      const Piece& piece = pieces_.list()[step];
      const ViewKeys<A> keys = packed_keys(call_, exchange.next(poll), piece);
      const std::vector<SumPart> parts = order_.parts(piece);
      for (std::size_t u = 0; u < sizes_.units.size(); ++u) {
        for (const SumPart& part : parts) {
          A* sum = gradients.room(part, step, u, add);
          attend(part.queries, sizes_.units[u], keys, sum,
                 {.first = false, .last = false, .continues = part.from >= 0});
          gradients.send(part, step, u);
          poll();
        }
      }
    }
    attend_without_keys({.first = false, .last = true});
    gradients.finish(add);
    exchange.finish();
  }

  /// Adds a sum to dk and dv of own keys.
  void add_to_own(const Piece& piece, const HeadUnit& unit, const A* sum) const {
    const auto add_rows = kernels<PrefillBackwardKernels<A>>().add_rows;
    const index_t rows = piece.size();
    for (const View<A, 4>& to : {memory_.dk, memory_.dv}) {
      const index_t width = to.extent(3);
      for (index_t b = 0; b < shape_.batch; ++b) {
        for (index_t h = unit.first; h < unit.first + unit.count; ++h, sum += rows * width) {
          add_rows(sum, width, rows, width, row_of(to, b, h, piece.row), to.stride(2));
        }
      }
    }
  }

  /// Returns the kept sums of queries from row `row` of the unit on. Empty for queries of other ranks.
  [[nodiscard]] CallSums kept_of(const Piece& queries, const HeadUnit& unit, index_t row) const {
    if (queries.rank != pieces_.rank()) return {};
    const index_t before = queries.row * call_.a.q.extent(1) + unit.first * call_.group() * queries.size();
    return memory_.kept.from(shape_.batch * before + row);
  }

  /// Calls a stage of every query of the rank that has no keys: the first or the last one.
  void attend_without_keys(const BackwardStage& stage) const {
    const ViewKeys<A> none = packed_keys(call_, memory_.own, Piece{});
    for (const Piece& segment : pieces_.segments()) {
      if (segment.rank != pieces_.rank()) continue;
      for_each_part(segment, order_.queries(), [&](const Piece& queries) {
        for (const HeadUnit& unit : sizes_.units) attend(queries, unit, none, memory_.sums.outgoing, stage);
      });
    }
  }
  /// Computes the gradients of queries against `keys`, and adds the gradients of the keys to `sum`.
  void attend(const Piece& queries, const HeadUnit& unit, ViewKeys<A> keys, A* sum,
              BackwardStage stage) const {
    const index_t first = unit.first * call_.group(), count = unit.count * call_.group(),
                  length = keys.k.extent(2);
    const auto rows = [&](const auto& view) {
      return heads_of(rows_of(view, queries.row, queries.size()), first, count);
    };
    keys.k = heads_of(keys.k, unit.first, unit.count);
    keys.v = heads_of(keys.v, unit.first, unit.count);
    stage.kept = kept_of(queries, unit, 0);
    const View<A, 4> dk{sum, {shape_.batch, unit.count, length, shape_.width}},
        dv{sum + dk.size(), {shape_.batch, unit.count, length, shape_.value_width}};
    AttentionGradients<A> gradients{.dout = rows(g_.dout),
                                    .dlse = rows(g_.dlse),
                                    .dq = rows(g_.dq),
                                    .dk = g_.dk,
                                    .dv = g_.dv,
                                    .dsinks = g_.dsinks};
    // Gradients of 16 bits are sums until the last stage. No stage writes dk and dv of 16 bits.
    const bool holds_sums = g_.dq.kind() == ElementKind::compute;
    gradients.dk.place(holds_sums ? sum : nullptr, dk.extents());
    gradients.dv.place(holds_sums ? sum + dk.size() : nullptr, dv.extents());
    StageSums<A> sums{};
    if (!holds_sums)
      sums = {from_head(OutputRows<A>(rows(memory_.dq)), first), addressable(dk), addressable(dv)};
    const BackwardProblem<A> problem = make_backward_problem<A>(
        with_heads(part_of_problem(whole_, queries, keys), first, count),
        {.out = rows(call_.a.out), .lse = rows(call_.a.lse)}, gradients, call_.a, stage, sums);
    g_.dout.functions()->run(problem, call_.variant, &call_.comm.scratch(), call_.executor);
  }

  /// Rotates dk of own keys back.
  void rotate_back() const {
    for (const Piece& piece : pieces_.list()) {
      if (piece.rank != pieces_.rank()) continue;
      for_each_query({shape_.batch, shape_.kv_heads, piece.size()}, [&](const Query& key) {
        const Query query{key.batch, key.head * call_.group(), 0, call_.shape()};
        const index_t position =
            whole_.key_position + call_.variant.key_position(query, piece.begin + key.index);
        A* dk = row_of(memory_.dk, key.batch, key.head, piece.row + key.index);
        rotate(whole_.rope, {dk, shape_.width}, {dk, shape_.width}, 1, shape_.width, {position, key.batch},
               true);
      });
    }
  }
  /// Collective. Passes the gradients of the parameters to every rank.
  void hand_over() const {
    const index_t group = call_.group();
    hand_over_all(call_.comm, call_.variant, call_.shape(), g_.dsinks, [&](index_t batch, index_t head) {
      const HeadUnit& unit = *std::ranges::find_if(
          sizes_.units, [&](const HeadUnit& any) { return head / group < any.first + any.count; });
      const index_t head_of_unit = (batch * unit.count - unit.first) * group + head;
      std::vector<KeptQueries> all;
      for (const Piece& segment : pieces_.segments()) {
        for_each_part(segment, order_.queries(), [&](const Piece& queries) {
          all.push_back({queries, kept_of(queries, unit, head_of_unit * queries.size())});
        });
      }
      return all;
    });
  }

  const BackwardOverRanks<A>& call_;
  const AttentionGradients<A>& g_;
  const Pieces& pieces_;
  const KeySourceShape shape_;
  const Problem<A> whole_;
  const SumOrder order_;
  const RingBackwardSizes sizes_;
  const RingBackwardMemory<A> memory_;
};

SSMAX_END
