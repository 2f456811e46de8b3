// Queries into lanes and results out of them. Included once per target.

/// v[r] = row r becomes v[c] = column c: each stage takes pairs apart as a fold does, and keeps both halves.
template <class S, int stage = 0>
SSMAX_INLINE void transpose_block(typename S::V* v) {
  constexpr int width = static_cast<int>(S::width);
  if constexpr ((1 << stage) < width) {
    constexpr int half = width >> (stage + 1);  // pairs of what each earlier choice of halves has left
    typename S::V next[S::width];
    SSMAX_UNROLL
    for (int path = 0; path < (1 << stage); ++path) {
      SSMAX_UNROLL
      for (int i = 0; i < half; ++i) {
        const int from = path * 2 * half + 2 * i;
        S::template fold_inputs<stage>(v[from], v[from + 1], next[path * 2 * half + i],
                                       next[(path * 2 + 1) * half + i]);
      }
    }
    SSMAX_UNROLL
    for (int i = 0; i < width; ++i) v[i] = next[i];
    transpose_block<S, stage + 1>(v);
  }
}

/// Where transpose_block leaves the column that comes at place `path`: bit by bit, the first stage's highest.
template <class S>
constexpr int transposed_column(int path) {
  int column = 0;
  for (int stage = 0; (1 << stage) < static_cast<int>(S::width); ++stage) {
    const int bit = static_cast<int>(S::width) >> (stage + 1);
    if ((path & bit) != 0) column += S::fold_step[stage];
  }
  return column;
}

/// out[c][r] = in[r][c] for up to a vector's width of rows and any number of columns; with
/// a factor per row if given.
template <class S>
void transpose(const typename S::Value* const* in, index_t rows, index_t columns,
               const typename S::Value* factor, typename S::Value* out, index_t out_stride) {
  using V = typename S::V;
  constexpr index_t w = S::width;
  for (index_t c = 0; c < columns; c += w) {
    V v[w];
    if (rows == w && c + w <= columns) {
      SSMAX_UNROLL
      for (index_t r = 0; r < w; ++r) v[r] = S::load(in[r] + c);
    } else {
      for (index_t r = 0; r < w; ++r) v[r] = r < rows ? load_up_to<S>(in[r] + c, columns - c, 0) : S::set(0);
    }
    if (factor != nullptr) {
      SSMAX_UNROLL
      for (index_t r = 0; r < w; ++r) v[r] = S::mul(v[r], S::set(factor[r]));
    }
    transpose_block<S>(v);
    SSMAX_UNROLL
    for (int i = 0; i < static_cast<int>(w); ++i) {
      const index_t column = c + transposed_column<S>(i);
      if (column < columns) store_up_to<S>(out + column * out_stride, v[i], rows);
    }
  }
}
