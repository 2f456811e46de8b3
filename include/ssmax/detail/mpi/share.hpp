// Defines RankCall, a call on one of several ranks, and builds the rank's share of it: its rows, its packed keys, and
// its queries against a piece of keys.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "../../attention_backward.hpp"
#include "../attention/forward/epilogue.hpp"
#include "../attention/operands/load.hpp"
#include "../attention/terms/keys.hpp"
#include "../memory/arena.hpp"
#include "build.hpp"
#include "pieces.hpp"

SSMAX_BEGIN_DETAIL

/// A call over ranks. Arguments is the type of the public function's arguments, V is Variant or GradientVariant. The
/// objects that it refers to must outlive it.
template <class A, class Arguments, class V>
struct RankCall {
  const char* function;  // name in messages
  mpi::Communicator& comm;
  const mpi::Layout& layout;
  const Arguments& a;  // of this rank
  const V& variant;
  const AnyExecutor executor;
  const ViewKeys<A> own_keys = keys_in(a.k, a.v, layout.positions());

  /// Returns the shape of the queries of the whole sequence.
  [[nodiscard]] QueryShape shape() const {
    return {a.q.extent(0), a.q.extent(1), layout.positions(), layout.positions()};
  }
  [[nodiscard]] KeySourceShape key_shape() const {
    return {a.k.extent(0), a.k.extent(1), a.k.extent(3), a.v.extent(3)};
  }
  /// Returns the bytes of a key and its value, of all kv heads and batch entries.
  [[nodiscard]] index_t key_bytes() const {
    return a.k.extent(0) * a.k.extent(1) * (a.k.extent(3) + a.v.extent(3)) * a.k.element_bytes();
  }
  /// Returns the number of query heads per kv head.
  [[nodiscard]] index_t group() const { return a.q.extent(1) / std::max<index_t>(1, a.k.extent(1)); }
};

template <class A>
using AttentionOverRanks = RankCall<A, AttentionArguments<A>, Variant<A>>;
template <class A>
using BackwardOverRanks = RankCall<A, BackwardArguments<A>, GradientVariant<A>>;

/// Returns the problem of all queries of this rank. Its keys are those of this rank: with_keys replaces them later.
template <class A, class Arguments, class V>
Problem<A> whole_problem(const RankCall<A, Arguments, V>& call) {
  const AnyKeys<A> keys(call.own_keys);
  return queries_among(make_problem<A>(call.function, call.a.q, keys, call.a), 0, call.layout.positions());
}

/// Returns keys [first, first + count) of this rank, from `position` of the sequence on.
template <class A, class Arguments, class V>
ViewKeys<A> keys_from(const RankCall<A, Arguments, V>& call, index_t first, index_t count, index_t position) {
  return keys_in(rows_of(call.a.k, first, count), rows_of(call.a.v, first, count), call.layout.positions(),
                 position);
}

/// Returns the packed keys of a piece, in the layout of KeyExchange.
template <class A, class Arguments, class V>
ViewKeys<A> packed_keys(const RankCall<A, Arguments, V>& call, const std::byte* packed, const Piece& piece) {
  StoredTensor<A> k = call.a.k, v = call.a.v;
  const KeySourceShape shape = call.key_shape();
  const index_t count = piece.size(), heads = shape.batch * shape.kv_heads;
  k.place(packed, {shape.batch, shape.kv_heads, count, shape.width});
  v.place(packed + heads * count * shape.width * k.element_bytes(),
          {shape.batch, shape.kv_heads, count, shape.value_width});
  return keys_in(k, v, call.layout.positions(), piece.begin);
}

/// True if the owner rotates its keys before it sends them. The receiver rotates 16-bit keys, as a single
/// process does after loading them: a rotated key has more bits and would have to be sent as floats.
inline bool owner_rotates(const Rows& k) { return k.kind() == ElementKind::compute; }

/// Returns the given rows of each head, contiguous: [batch, heads, rows, channels].
template <class T>
std::vector<T> gathered_rows(const View<const T, 4>& view, const std::vector<index_t>& rows) {
  std::vector<T> result;
  for (index_t b = 0; b < view.extent(0); ++b) {
    for (index_t h = 0; h < view.extent(1); ++h) {
      for (const index_t row : rows) {
        const T* first = row_of(view, b, h, row);
        result.insert(result.end(), first, first + view.extent(3));
      }
    }
  }
  return result;
}

/// Packs the own keys and values of a piece. Rotates the keys if owner_rotates is true.
template <class A, class Arguments, class V>
void pack_piece(const RankCall<A, Arguments, V>& call, const Problem<A>& whole, const Piece& piece,
                std::byte* out) {
  const index_t count = piece.size();
  const ViewKeys<A> keys = keys_from(call, piece.row, count, piece.begin);
  const KeyRange range{piece.begin, piece.end};
  const auto for_each_head = [&](const auto& f) {
    for (index_t b = 0; b < keys.k.extent(0); ++b) {
      for (index_t h = 0; h < keys.k.extent(1); ++h) f(b, h);
    }
  };
  if (owner_rotates(keys.k)) {
    const Problem<A> problem = with_keys(whole, keys);
    const index_t d = keys.k.extent(3), dv = keys.v.extent(3);
    A* to = reinterpret_cast<A*>(out);
    for_each_head([&](index_t b, index_t h) {
      load_keys(problem, call.variant, sequence_of(problem, b).shape, {b, h, range}, {to, d}),
          to += count * d;
    });
    for_each_head([&](index_t b, index_t h) {
      load_values(problem.keys, {b, h, range}, {to, dv}), to += count * dv;
    });
    return;
  }
  for (const Rows& rows : {keys.k, keys.v}) {
    const index_t bytes = rows.extent(3) * rows.element_bytes();
    for_each_head([&](index_t b, index_t h) {
      for (index_t i = 0; i < count; ++i) {
        out = std::copy_n(static_cast<const std::byte*>(rows.row(b, h, i)), bytes, out);
      }
    });
  }
}

/// Packs all keys and values of this rank.
template <class A, class Arguments, class V>
void pack_share(const RankCall<A, Arguments, V>& call, const Pieces& pieces, const Problem<A>& whole,
                std::byte* out) {
  for (const Piece& piece : pieces.list()) {
    if (piece.rank == pieces.rank()) pack_piece(call, whole, piece, out + piece.row * call.key_bytes());
  }
}

/// Returns the array that adds up a result: the result itself, or a separate array of floats for 16-bit
/// results.
template <class A>
View<A, 4> sums_of(Arena& arena, const OutputRows<A>& result) {
  std::array<index_t, 4> extents, strides;
  for (int i = 0; i < 4; ++i) {
    extents[static_cast<std::size_t>(i)] = result.extent(i);
    strides[static_cast<std::size_t>(i)] = result.stride(i);
  }
  if (result.kind() == ElementKind::compute) {
    return addressable(View<A, 4>(result.in_place(0, 0, 0), extents, strides));
  }
  return addressable(View<A, 4>(arena.take<A>(AnyView(result).size()), extents));
}

/// Returns the problem of a segment's queries against packed keys. `whole` is the problem of all queries of this
/// rank.
template <class A>
Problem<A> part_of_problem(const Problem<A>& whole, const Piece& segment, const ViewKeys<A>& keys) {
  const Problem<A> queries = with_queries(whole, segment.row, segment.size(), segment.begin, keys.keys);
  return owner_rotates(keys.k) ? with_rotated_keys(queries, keys) : with_keys(queries, keys);
}

/// Returns the row of a query whose state is complete, for store_result. `sequence` says where its result lies, and
/// must outlive the row.
/// The row has a multiplier if sinks are scaled.
template <class Compute>
QueryRow complete_row(const Result<Compute>& result, const Variant<Compute>& variant, const Query& query,
                      const Sequence& sequence) {
  QueryRow complete =
      result.scaled_sinks ? variant.row(query, {0, query.shape.keys}) : QueryRow{.query = query};
  complete.sequence = &sequence;
  return complete;
}

/// Stores the result of a query whose state is complete, with its statistics. `row` is its row in the state and in the
/// result. Overwrites o.
template <class Compute>
void store_complete(const Result<Compute>& result, const QueryRow& seen, index_t row,
                    const AttentionState<Compute>& state, index_t dv) {
  const index_t batch = seen.query.batch, head = seen.query.head;
  const SoftmaxState<Compute> own = state_of(state, batch, head, row);
  if (!state.has_statistics()) return store_result(result, seen, row, own, dv);
  store_output(result, seen, own, statistics_of(state, batch, head, row), dv);
}

/// Returns the blocks of keys that queries [begin, end) may see. Exception: if the mask's runs are not known,
/// all blocks of a query's range count as seen.
template <class V>
SeenBlocks blocks_seen(const V& variant, const QueryShape& shape, index_t begin, index_t end) {
  const index_t count = (shape.keys + travel_keys - 1) / travel_keys;
  SeenBlocks seen(static_cast<std::size_t>(count));
  index_t first_unseen = 0;
  for (Query query{0, 0, 0, shape}; query.batch < shape.batch; ++query.batch) {
    for (query.head = 0; query.head < shape.heads; ++query.head) {
      for (query.index = begin; query.index < end; ++query.index) {
        const KeyRange keys = visible_keys(variant.mask, query);
        for (index_t block = first_unseen; block < count;) {
          if (seen[static_cast<std::size_t>(block)] != 0) {
            ++block;
            continue;
          }
          const index_t from = std::max(keys.begin, block * travel_keys);
          const KeyRange next = from < keys.end ? next_run(variant.mask, query, from) : KeyRange{};
          const KeyRange run{std::max(next.begin, from), std::min(next.end, keys.end)};
          if (run.size() <= 0) break;
          const index_t last = (run.end - 1) / travel_keys;
          for (block = run.begin / travel_keys; block <= last; ++block)
            seen[static_cast<std::size_t>(block)] = 1;
        }
        while (first_unseen < count && seen[static_cast<std::size_t>(first_unseen)] != 0) ++first_unseen;
        if (first_unseen == count) return seen;
      }
    }
  }
  return seen;
}

/// Returns blocks_seen of each segment of a rank.
template <class V>
std::vector<SeenBlocks> blocks_seen_by(const V& variant, const QueryShape& shape, const mpi::Layout& layout,
                                       int rank) {
  std::vector<SeenBlocks> seen;
  for (const mpi::Segment& segment : layout.segments()) {
    if (segment.rank == rank) seen.push_back(blocks_seen(variant, shape, segment.begin, segment.end));
  }
  return seen;
}

SSMAX_END
