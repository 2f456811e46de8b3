// Checks a matrix with one element per query and key: a mask's matrix or a bias.
#pragma once

#include "../../query.hpp"
#include "../../view.hpp"
#include "views.hpp"

SSMAX_BEGIN_DETAIL

/// Throws unless `matrix` is [batch, heads, queries, keys] of `shape` with a last stride of 1 or 0
/// (broadcast).
inline void check_matrix(const char* function, const char* name, const AnyView& matrix,
                         const QueryShape& shape) {
  const index_t extents[] = {shape.batch, shape.heads, shape.queries, shape.keys};
  check_fits_attention(function, name, matrix, extents);
  const index_t stride = matrix.stride(3);
  if (!matrix.empty() && shape.keys > 1 && stride != 1 && stride != 0) {
    fail_value(function, name, "has last stride", stride, "must be 0 or", 1);
  }
}

SSMAX_END
