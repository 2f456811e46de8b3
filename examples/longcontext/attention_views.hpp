// Returns views by heads of the matrices of a sequence.
#pragma once

#include <ssmax/view.hpp>

#include "attention_layer.hpp"

namespace longcontext {

// Returns tokens [position, columns] as [1, head, position, channel]. The view starts at number `first` of
// the matrix.
inline ssmax::View<float, 4> by_heads(Matrix& tokens, const HeadShape& shape, index_t first) {
  const index_t row = tokens.cols();
  return {
      tokens.data() + first, {1, shape.heads, shape.length, shape.head_width}, {0, shape.head_width, row, 1}};
}

inline ssmax::View<float, 3> lse_view(Matrix& lse, const HeadShape& shape) {
  return {lse.data(), {1, shape.heads, shape.length}};
}

}  // namespace longcontext
