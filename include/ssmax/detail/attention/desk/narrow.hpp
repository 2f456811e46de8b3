// Narrows a Problem to some of its queries or heads, or replaces its keys.
#pragma once

#include <array>

#include "../terms/problem.hpp"

SSMAX_BEGIN_DETAIL

/// Returns indices [first, first + count) of one dimension of [batch, heads, positions, …].
template <int dimension, class T, int Rank>
View<T, Rank> range_of(const View<T, Rank>& view, index_t first, index_t count) {
  if (view.data_handle() == nullptr) return view;
  std::array<index_t, Rank> extents, strides;
  for (int i = 0; i < Rank; ++i) {
    extents[static_cast<std::size_t>(i)] = i == dimension ? count : view.extent(i);
    strides[static_cast<std::size_t>(i)] = view.stride(i);
  }
  return addressable(View<T, Rank>(view.data_handle() + first * view.stride(dimension), extents, strides));
}

template <class T, int Rank>
View<T, Rank> rows_of(const View<T, Rank>& view, index_t first, index_t count) {
  return range_of<2>(view, first, count);
}
template <class T, int Rank>
View<T, Rank> heads_of(const View<T, Rank>& view, index_t first, index_t count) {
  return range_of<1>(view, first, count);
}

/// Does the same for rows of any storage type.
template <class R>
requires std::derived_from<R, Rows> R rows_of(R rows, index_t first, index_t count) {
  rows.keep(2, first, count);
  return rows;
}
template <class R>
requires std::derived_from<R, Rows> R heads_of(R rows, index_t first, index_t count) {
  rows.keep(1, first, count);
  return rows;
}

/// Returns the problem of the same queries with other keys. The keys must outlive the result.
template <class Compute, class K>
Problem<Compute> with_keys(Problem<Compute> problem, const K& keys) {
  problem.keys = AnyKeys<Compute>(keys);
  return problem;
}

/// Returns the problem of the same queries with other keys, which are already rotated.
template <class Compute, class K>
Problem<Compute> with_rotated_keys(Problem<Compute> problem, const K& keys) {
  if (problem.has_rope()) problem.rotation = Rotation::stored_by_mask;
  problem.in_cache = true;
  return with_keys(problem, keys);
}

/// Returns the problem with the positions of its queries: q holds queries [first, first + q.extent(2)) of `queries`.
template <class Compute>
Problem<Compute> queries_among(Problem<Compute> problem, index_t first, index_t queries) {
  problem.first_query = first;
  problem.queries_after = queries - first - problem.q.extent(2);
  return problem;
}

/// Returns the problem with the positions of its heads: q holds heads [first, first + q.extent(1)) of `heads`.
template <class Compute>
Problem<Compute> heads_among(Problem<Compute> problem, index_t first, index_t heads) {
  problem.q.set_first_head(first);
  problem.heads_after = heads - problem.q.end_head();
  return problem;
}

/// Returns the problem of heads [first, first + count). Requires a problem whose q holds all heads.
template <class Compute>
Problem<Compute> with_heads(Problem<Compute> problem, index_t first, index_t count) {
  const index_t heads = problem.q.extent(1);
  problem.q.keep(1, first, count);
  return heads_among(problem, first, heads);
}

/// Returns the problem of rows [row, row + count) of q, which hold queries [first, first + count) of `queries`.
template <class Compute>
Problem<Compute> with_queries(Problem<Compute> problem, index_t row, index_t count, index_t first,
                              index_t queries) {
  problem.q.keep(2, row, count);
  return queries_among(problem, first, queries);
}

SSMAX_END
