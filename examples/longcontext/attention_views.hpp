// The matrices of a sequence as the library takes them: views by heads.
#pragma once

#include <ssmax/view.hpp>

#include "attention_layer.hpp"

namespace longcontext {

// Tokens [position, columns] as [1, head, position, channel], the first of these numbers being number `first` of the matrix.
inline ssmax::View<float, 4> by_heads(Matrix& tokens, const HeadShape& shape, index_t first) {
  const index_t row = tokens.cols();
  return {
      tokens.data() + first, {1, shape.heads, shape.length, shape.head_width}, {0, shape.head_width, row, 1}};
}

inline ssmax::View<float, 3> lse_view(Matrix& lse, const HeadShape& shape) {
  return {lse.data(), {1, shape.heads, shape.length}};
}

}  // namespace longcontext
