// Checks a matrix with one element per query and key: a mask's matrix or a bias.
#pragma once

#include "../../query.hpp"
#include "../../view.hpp"
#include "views.hpp"

SSMAX_BEGIN_DETAIL

/// Returns the matrix, of `matrices`, that a head reads. A division takes longer than the branch.
SSMAX_INLINE constexpr index_t matrix_of_head(index_t head, index_t matrices) {
  return head < matrices ? head : head % matrices;
}

/// Returns whether every head has a matrix, of `matrices`, and every matrix a head.
constexpr bool fits_heads(index_t matrices, index_t heads, HeadsOfMatrix kind) {
  return matrices == heads || (kind == HeadsOfMatrix::modulo && matrices > 0 && heads % matrices == 0);
}

/// Throws unless `matrix` is [batch, heads, queries, keys] of `shape` with a last stride of 1 or 0 (broadcast). With
/// HeadsOfMatrix::modulo, the extent of heads may also divide the number of heads.
inline void check_matrix(const char* function, const char* name, const AnyView& matrix,
                         const QueryShape& shape, HeadsOfMatrix heads) {
  const index_t matrices = matrix.extent(1);
  const bool is_modulo = heads == HeadsOfMatrix::modulo;
  if (is_modulo && !fits_heads(matrices, shape.heads, heads)) {
    fail_format("ssmax::%s: %s has extent %td in dimension 1, must divide the heads of the attention, %td",
                function, name, matrices, shape.heads);
  }
  const index_t extents[] = {shape.batch, is_modulo ? matrices : shape.heads, shape.queries, shape.keys};
  check_fits_attention(function, name, matrix, extents);
  const index_t stride = matrix.stride(3);
  if (!matrix.empty() && shape.keys > 1 && stride != 1 && stride != 0) {
    fail_value(function, name, "has last stride", stride, "must be 0 or", 1);
  }
}

SSMAX_END
