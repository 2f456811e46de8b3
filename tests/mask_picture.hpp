// What a mask shows, drawn: a letter per key of each query.
#pragma once

#include "reference.hpp"
#include "test.hpp"

namespace mask_picture {

using namespace ssmax;

/// What check says against it, or nothing.
template <class M>
std::string refusal(const M& mask, const QueryShape& shape) {
  try {
    ssmax::detail::check_mask(mask, shape);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

template <class Visit>
void for_each_query(const QueryShape& shape, Visit visit) {
  reference::for_each_index({shape.batch, shape.heads, shape.queries}, [&](auto... at) {
    visit(Query{at..., shape});
  });
}

/// Calls visit with shapes of no, one and few queries and keys, as many of both or more of either.
template <class Visit>
void for_each_shape(Visit visit) {
  for (const index_t queries : {0, 1, 2, 5, 8}) {
    for (const index_t keys : {0, 1, 2, 3, 5, 8, 11}) visit(QueryShape{2, 3, queries, keys});
  }
}

/// One letter per key of each query: 'x' where it is seen. Checks the range and n on the way.
template <class M>
std::string picture(const M& mask, const QueryShape& shape) {
  std::string result;
  for_each_query(shape, [&](const Query& query) {
    const KeyRange range = mask.keys(query);
    const bool is_within = 0 <= range.begin && range.begin <= range.end && range.end <= shape.keys;
    if (!is_within) FAIL("keys " << range.begin << " to " << range.end << " of " << shape.keys);
    std::string row(static_cast<std::size_t>(shape.keys), '.');
    for (index_t key = range.begin; key < range.end; ++key) {
      if (ssmax::detail::sees(mask, query, key)) row[static_cast<std::size_t>(key)] = 'x';
    }
    const index_t n = ssmax::detail::visible_count(mask, query, ssmax::detail::visible_keys(mask, query));
    if (n != std::ranges::count(row, 'x')) FAIL("n is " << n << " of " << row);
    result += row + '\n';
  });
  return result;
}

template <class Sees>
std::string expected_picture(const QueryShape& shape, Sees sees) {
  std::string result;
  for_each_query(shape, [&](const Query& query) {
    for (index_t key = 0; key < shape.keys; ++key) result += sees(query, key) ? 'x' : '.';
    result += '\n';
  });
  return result;
}

}  // namespace mask_picture
