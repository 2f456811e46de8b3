// Checks a matrix with one element per query and key: a mask's matrix or a bias.
#pragma once

#include "../../query.hpp"
#include "../../view.hpp"
#include "views.hpp"

SSMAX_BEGIN_DETAIL

/// Throws unless `matrix` is [batch, heads, queries, keys] of `shape` with a last stride of 1 or 0
/// (broadcast).
template <class T>
void check_matrix(const char* function, const char* name, const View<const T, 4>& matrix,
                  const QueryShape& shape) {
  const std::array<index_t, 4> expected{shape.batch, shape.heads, shape.queries, shape.keys};
  for (int i = 0; i < 4; ++i) {
    const index_t extent = expected[static_cast<std::size_t>(i)];
    if (matrix.extent(i) != extent) {
      fail_extent(function, name, i, matrix.extent(i), "the attention", extent);
    }
  }
  if (matrix.empty()) return;
  if (matrix.data_handle() == nullptr) {
    fail_value(function, name, "is null but has size", matrix.size(), "must be", 0);
  }
  check_reach(function, name, matrix);
  const index_t stride = matrix.stride(3);
  if (shape.keys > 1 && stride != 1 && stride != 0) {
    fail_value(function, name, "has last stride", stride, "must be 0 or", 1);
  }
}

SSMAX_END
