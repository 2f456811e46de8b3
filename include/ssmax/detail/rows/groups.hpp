// Visits the rows of a [batch, head, query, key] view in groups. A group consists of neighbouring rows of one
// head that see the same keys and have the same multiplier. So a scaling is called once per group, and short
// rows can share vectors. Exception: each row is a group unless the scaling declares by_size. An executor
// with several threads divides the rows among its calls.
#pragma once

#include "../../execution.hpp"
#include "../../mask.hpp"
#include "../../row.hpp"
#include "../checks/views.hpp"

SSMAX_BEGIN_DETAIL

/// The rows of a group that are visited together: all of its rows, or the rows of one call of the executor.
struct RowGroup {
  index_t batch, head, query;  // of the first row, in the views of the call
  index_t rows;
  index_t group_rows;  // number of rows of the whole group
  KeyRange elements;   // of each row, in the views
  KeyRange keys;       // the visible elements, counted from the row's first one
  PlacedRow row;       // of the first row; if it sees no key: n = 0, no position

  /// Returns the first element of row r of the group. Requires contiguous rows.
  template <class T>
  T* first(const View<T, 4>& view, index_t r = 0) const {
    return row_of(view, batch, head, query + r) + elements.begin;
  }
};

/// Calls of an executor divide a group only at multiples of this number of rows from its beginning. So the
/// same rows share vectors as without an executor, and results are bit-identical. It is a multiple of every
/// target's vector length.
inline constexpr index_t row_cut = 64;

/// Lower bound of the logits per call of an executor: some microseconds of work.
inline constexpr index_t min_row_call = 16'384;

/// Returns the first query of the run of queries that ends at `query` and sees the same keys.
template <class M>
index_t begin_of_group(const M& mask, const Query& query, KeyRange keys) {
  if constexpr (same_keys<M>) return 0;
  Query first = query;
  for (; first.index > 0; --first.index) {
    Query before = first;
    --before.index;
    const KeyRange other = visible_keys(mask, before);
    if (other.begin != keys.begin || other.end != keys.end) break;
  }
  return first.index;
}

/// Ends the groups of a head.
template <class Visit>
void finish(Visit& visit) {
  if constexpr (requires { visit.finish(); }) visit.finish();
}

/// Divides groups into parts of row_cut rows (the last part of a group has the remaining rows). Visits the
/// parts whose first row is one of queries [begin, end) of a head. The visited parts of one group are one
/// visit. Exception: each row is a group unless the scaling declares by_size.
template <class S, class M, class Visit>
void visit_groups(const QueryShape& shape, const M& mask, index_t batch, index_t head, index_t begin,
                  index_t end, Visit& visit) {
  if (begin >= end) return;
  const auto keys_of = [&](index_t query) { return visible_keys(mask, Query{batch, head, query, shape}); };
  KeyRange next_keys = keys_of(begin);
  for (index_t query = begin, next; query < end; query = next) {
    const KeyRange keys = next_keys;
    next = query + 1;
    if constexpr (depends_on_size_only<S> && same_keys<M>) {
      next = shape.queries;
    } else {
      for (; next < shape.queries; ++next) {
        next_keys = keys_of(next);
        if (!depends_on_size_only<S> || next_keys.begin != keys.begin || next_keys.end != keys.end) break;
      }
    }
    const bool begins = !depends_on_size_only<S> || query != begin;
    const index_t group_begin = begins ? query : begin_of_group(mask, Query{batch, head, query, shape}, keys);
    const auto up_to_cut = [&](index_t at) {
      return std::min(next, group_begin + (at - group_begin + row_cut - 1) / row_cut * row_cut);
    };
    const index_t first = up_to_cut(query), last = next <= end ? next : up_to_cut(end);
    if (first >= last) continue;
    PlacedRow row{{.head = head, .n = keys.size()}, batch, first};
    if (row.n > 0) row.position = row_position(mask, Query{batch, head, query, shape});
    visit(RowGroup{batch, head, first, last - first, next - group_begin, {0, shape.keys}, keys, row});
  }
}

template <class T>
QueryShape query_shape(const View<T, 4>& rows) {
  return {rows.extent(0), rows.extent(1), rows.extent(2), rows.extent(3)};
}

/// True if M takes the place of a mask for views of this rank.
template <class M, int Rank>
struct DividesRows : std::false_type {};

/// Divides the rows of a call into groups: by a mask, or by the specialisation for RaggedRows (ragged_rows.hpp).
template <class S, class M>
class RowDivision {
  static_assert(
      !has_predicate<M>,
      "ssmax::softmax: a mask that picks single keys is for attention; write -inf to the logits instead");

 public:
  static constexpr const char* name = "logits";  // of the argument that gives the number of rows

  /// Checks the mask and the scaling.
  template <class T>
  RowDivision(const char* function, const View<T, 4>& logits, const S& scaling, const M& mask)
      : shape_(query_shape(logits)), mask_(mask) {
    check_mask(mask, shape_);
    check_scaling(function, scaling, shape_);
  }

  const QueryShape& shape() const { return shape_; }
  /// Returns true if a group of one row is collected with its neighbours.
  bool collects() const { return shape_.queries > 1; }

  /// For each call of the executor, passes its groups to the result of begin_call(), and calls finish() of the result,
  /// if it exists, after the groups of each head.
  template <class E, class BeginCall>
  void for_each_group(E& executor, const BeginCall& begin_call) const {
    const auto up = [](index_t a, index_t b) { return (a + b - 1) / b; };
    const index_t heads = shape_.batch * shape_.heads, threads = threads_of(executor);
    if (heads == 0 || shape_.queries == 0) return;
    // Divides heads into pieces, so that each thread gets four calls.
    index_t rows_of_call = heads * shape_.queries;
    if (threads > 1) {
      rows_of_call =
          std::max(up(rows_of_call, 4 * threads), up(min_row_call, std::max<index_t>(shape_.keys, 1)));
    }
    const index_t rows_of_piece = std::min(up(rows_of_call, row_cut) * row_cut, shape_.queries);
    const index_t pieces_of_head = up(shape_.queries, rows_of_piece), pieces = heads * pieces_of_head;
    const index_t pieces_of_call = up(rows_of_call, rows_of_piece);
    executor.run(up(pieces, pieces_of_call), [&](index_t call) {
      auto visit = begin_call();
      const index_t last = std::min(pieces, (call + 1) * pieces_of_call);
      for (index_t piece = call * pieces_of_call; piece < last; ++piece) {
        const index_t head = piece / pieces_of_head, begin = piece % pieces_of_head * rows_of_piece;
        const index_t end = std::min(begin + rows_of_piece, shape_.queries);
        visit_groups<S>(shape_, mask_, head / shape_.heads, head % shape_.heads, begin, end, visit);
        finish(visit);
      }
    });
  }

 private:
  QueryShape shape_;
  const M& mask_;
};

SSMAX_END
