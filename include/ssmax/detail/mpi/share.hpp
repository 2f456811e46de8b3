// Defines RankCall, a call on one of several ranks, and builds the rank's share of it: its rows, its packed keys, and
// its queries against a piece of keys.
#pragma once

#include <vector>

#include "../../attention_backward.hpp"
#include "../../mpi_arguments.hpp"
#include "../attention/desk/build.hpp"
#include "../attention/operands/load.hpp"
#include "../attention/terms/keys.hpp"
#include "../memory/arena.hpp"
#include "pieces.hpp"

SSMAX_BEGIN_DETAIL

/// Keys [first, first + k.extent(2)) of `keys`, in views of one type.
template <class T>
struct KeyShare {
  View<const T, 4> k, v;
  index_t keys = 0;
  index_t first = 0;

  /// Returns the source of these keys. It must outlive a problem with it.
  ViewKeys<ComputeType<T>> source() const {
    return keys_in<ComputeType<T>>(k, v, keys, first);
  }
};

/// A call over ranks. A is the type of the public function's arguments, V is Variant or GradientVariant. The objects
/// that it refers to must outlive it.
template <class T, class A, class V>
struct RankCall {
  const char* function;  // name in messages
  mpi::Communicator& comm;
  const mpi::Layout& layout;
  const A& a;  // of this rank
  const mpi::AttentionOptions<T>& options;
  const V& variant;
  const AnyExecutor executor;
  const ViewKeys<ComputeType<T>> whole_keys = KeyShare<T>{{}, {}, layout.positions()}.source();  // without data

  /// Returns the shape of the queries of the whole sequence.
  [[nodiscard]] QueryShape shape() const {
    return {a.q.extent(0), a.q.extent(1), layout.positions(), layout.positions()};
  }
  [[nodiscard]] KeySourceShape key_shape() const {
    return {a.k.extent(0), a.k.extent(1), a.k.extent(3), a.v.extent(3)};
  }
  /// Returns the number of query heads per kv head.
  [[nodiscard]] index_t group() const { return a.q.extent(1) / std::max<index_t>(1, a.k.extent(1)); }
};

template <class T>
using AttentionOverRanks = RankCall<T, mpi::AttentionArguments<T>, Variant<ComputeType<T>>>;
template <class T>
using BackwardOverRanks = RankCall<T, mpi::BackwardArguments<T>, GradientVariant<ComputeType<T>>>;
template <class T>
using DecodeOverRanks = RankCall<T, mpi::DecodeArguments<T>, Variant<ComputeType<T>>>;

/// Returns the problem of all rows of this rank. It refers to keys of the call that have no data: with_keys replaces
/// them later.
template <class T, class A, class V>
Problem<ComputeType<T>> whole_problem(const RankCall<T, A, V>& call) {
  check_no_lengths(call.function, call.options.lengths);
  const AnyKeys<ComputeType<T>> keys(call.whole_keys);
  const InputRows<ComputeType<T>> q(call.a.q);
  return queries_among(make_problem(call.function, q, keys, call.options), 0,
                       call.layout.positions());
}

/// True if the owner rotates its keys before it sends them. The receiver rotates 16-bit keys, as a single
/// process does after loading them: a rotated key has more bits and would have to be sent as floats.
template <class T>
inline constexpr bool owner_rotates = std::same_as<T, ComputeType<T>>;

/// Returns the packed keys of a piece, in the layout of KeyExchange.
template <class T>
KeyShare<T> key_share(const T* packed, const Piece& piece, const KeySourceShape& shape, index_t keys) {
  const index_t count = piece.size();
  const T* v = packed + shape.batch * shape.kv_heads * count * shape.width;
  return {{packed, {shape.batch, shape.kv_heads, count, shape.width}},
          {v, {shape.batch, shape.kv_heads, count, shape.value_width}},
          keys,
          piece.begin};
}

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
template <class T>
void pack_piece(const Problem<ComputeType<T>>& whole, const Variant<ComputeType<T>>& variant,
                const View<const T, 4>& k, const View<const T, 4>& v, const Piece& piece, T* out) {
  const index_t count = piece.size(), d = k.extent(3), dv = v.extent(3);
  const KeyShare<T> keys{rows_of(k, piece.row, count), rows_of(v, piece.row, count), whole.keys.length(0),
                         piece.begin};
  const ViewKeys<ComputeType<T>> source = keys.source();
  const Problem<ComputeType<T>> problem = with_keys(whole, source);
  const KeyRange range{piece.begin, piece.end};
  const auto for_each_head = [&](const auto& f) {
    for (index_t b = 0; b < k.extent(0); ++b) {
      for (index_t h = 0; h < k.extent(1); ++h) f(b, h);
    }
  };
  if constexpr (owner_rotates<T>) {
    for_each_head([&](index_t b, index_t h) {
      load_keys(problem, variant, sequence_of(problem, b).shape, {b, h, range}, {out, d}), out += count * d;
    });
    for_each_head([&](index_t b, index_t h) {
      load_values(problem.keys, {b, h, range}, {out, dv}), out += count * dv;
    });
  } else {
    const auto copy = [&](const View<const T, 4>& view, index_t channels) {
      for_each_head([&](index_t b, index_t h) {
        for (index_t i = 0; i < count; ++i) out = std::copy_n(row_of(view, b, h, i), channels, out);
      });
    };
    copy(keys.k, d);
    copy(keys.v, dv);
  }
}

/// Packs all keys and values of this rank.
template <class T, class A, class V>
void pack_share(const RankCall<T, A, V>& call, const Pieces& pieces, const Problem<ComputeType<T>>& whole,
                T* out) {
  const KeySourceShape shape = call.key_shape();
  const index_t row = shape.batch * shape.kv_heads * (shape.width + shape.value_width);
  for (const Piece& piece : pieces.list()) {
    if (piece.rank == pieces.rank())
      pack_piece(whole, call.variant, call.a.k, call.a.v, piece, out + piece.row * row);
  }
}

/// Returns the array that adds up a result: the result itself, or a separate array of floats for 16-bit
/// results.
template <class T>
View<ComputeType<T>, 4> sums_of(Arena& arena, const View<T, 4>& result) {
  if constexpr (std::same_as<T, ComputeType<T>>) return addressable(result);
  return addressable(
      View<ComputeType<T>, 4>{arena.take<ComputeType<T>>(result.size()),
                              {result.extent(0), result.extent(1), result.extent(2), result.extent(3)}});
}

/// Returns the problem of a segment's queries against packed keys. `whole` is the problem of all rows of this
/// rank.
template <class T>
Problem<ComputeType<T>> part_of_problem(const Problem<ComputeType<T>>& whole, const Piece& segment,
                                        index_t positions, const ViewKeys<ComputeType<T>>& keys) {
  const Problem<ComputeType<T>> queries =
      with_queries(whole, segment.row, segment.size(), segment.begin, positions);
  return owner_rotates<T> ? with_rotated_keys(queries, keys) : with_keys(queries, keys);
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
