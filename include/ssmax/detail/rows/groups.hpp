// Walks the rows of a [batch, head, query, key] view as runs: neighbouring rows of one head that see the same
// keys and have the same multiplier, so that a scaling is asked once per run and short rows can share
// vectors.
#pragma once

#include "../../mask.hpp"
#include "../../scaling.hpp"
#include "../checks/views.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

struct RowGroup {
  index_t batch, head, query;  // of the first row
  index_t rows;
  KeyRange keys;
  Row row;  // n = 0, and no position, where there is no key to ask the mask about
};

template <class M, class Visit>
void for_each_group(const QueryShape& shape, const M& mask, Visit visit) {
  static_assert(
      !has_predicate<M>,
      "ssmax::softmax: a mask that picks single keys is for attention; write -inf to the logits instead");
  for (index_t batch = 0; batch < shape.batch; ++batch) {
    for (index_t head = 0; head < shape.heads; ++head) {
      for (index_t query = 0; query < shape.queries;) {
        const KeyRange keys = visible_keys(mask, {batch, head, query, shape});
        index_t rows = 1;
        if constexpr (shows_same_keys<M>) {
          rows = shape.queries;
        } else {
          for (; query + rows < shape.queries; ++rows) {
            const KeyRange next = visible_keys(mask, {batch, head, query + rows, shape});
            if (next.begin != keys.begin || next.end != keys.end) break;
          }
        }
        Row row{.head = head, .n = keys.size()};
        if (row.n > 0) row.position = key_position(mask, {batch, head, query, shape}, keys.end - 1);
        visit(RowGroup{batch, head, query, rows, keys, row});
        query += rows;
      }
    }
  }
}

template <class T>
QueryShape query_shape(const View<T, 4>& rows) {
  return {rows.extent(0), rows.extent(1), rows.extent(2), rows.extent(3)};
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
