// Implements what all kernels use: vectors with unused lanes, reductions and transposition. Included once per
// target.

template <class T>
using Simd = std::conditional_t<sizeof(T) == sizeof(float), F32, F64>;

/// Number of queries in a group: tile_vectors vectors with one query per lane (prefill.inl).
template <class S>
inline constexpr index_t group_width = S::tile_vectors* S::width;

/// Returns the lanes where x is not -inf. NaN counts as unmasked.
template <class S>
SSMAX_INLINE typename S::M unmasked(typename S::V x) {
  return S::not_less(x, S::set(std::numeric_limits<typename S::Value>::lowest()));
}

/// Loads a vector of which `left` elements exist at p. Lanes after them hold `fill`.
template <class S>
SSMAX_INLINE typename S::V load_up_to(const typename S::Value* p, index_t left, typename S::Value fill) {
  return left >= S::width ? S::load(p) : S::load_part(p, std::max<index_t>(left, 0), fill);
}

template <class S>
SSMAX_INLINE void store_up_to(typename S::Value* p, typename S::V v, index_t left) {
  if (left >= S::width) {
    S::store(p, v);
  } else {
    S::store_part(p, v, std::max<index_t>(left, 0));
  }
}

/// Sets a block of sums in registers to 0: `rows` rows of `vectors` vectors.
template <class S, int rows, int vectors>
SSMAX_INLINE void clear_sums(typename S::V (&sum)[rows][vectors]) {
  SSMAX_UNROLL
  for (int r = 0; r < rows; ++r) {
    SSMAX_UNROLL
    for (int v = 0; v < vectors; ++v) sum[r][v] = S::set(0);
  }
}

template <class S, int rows, int vectors>
SSMAX_INLINE void load_sums(StridedRows<const typename S::Value> from, typename S::V (&sum)[rows][vectors]) {
  SSMAX_UNROLL
  for (int r = 0; r < rows; ++r) {
    SSMAX_UNROLL
    for (int v = 0; v < vectors; ++v) sum[r][v] = S::load(from[r] + v * S::width);
  }
}

template <class S, int rows, int vectors>
SSMAX_INLINE void store_sums(const typename S::V (&sum)[rows][vectors], StridedRows<typename S::Value> to) {
  SSMAX_UNROLL
  for (int r = 0; r < rows; ++r) {
    SSMAX_UNROLL
    for (int v = 0; v < vectors; ++v) S::store(to[r] + v * S::width, sum[r][v]);
  }
}

/// Returns the sum of `count` vectors, added in pairs.
template <class S, int count>
SSMAX_INLINE typename S::V reduce_pairwise(const typename S::V* v) {
  if constexpr (count == 1) {
    return v[0];
  } else {
    return S::add(reduce_pairwise<S, count / 2>(v), reduce_pairwise<S, count / 2>(v + count / 2));
  }
}

struct Maximum {
  template <class S>
  static typename S::V apply(typename S::V a, typename S::V b) {
    return S::max(a, b);
  }
};

struct Sum {
  template <class S>
  static typename S::V apply(typename S::V a, typename S::V b) {
    return S::add(a, b);
  }
};

/// Returns a vector whose lane r is the reduction of all lanes of v[r]. Each stage halves the number of
/// vectors.
template <class S, class Operation, int stage = 0, int count = S::width>
SSMAX_INLINE typename S::V fold(typename S::V* v) {
  if constexpr (count == 1) {
    return v[0];
  } else {
    SSMAX_UNROLL
    for (index_t i = 0; i < count / 2; ++i) {
      typename S::V low, high;
      S::template fold_inputs<stage>(v[2 * i], v[2 * i + 1], low, high);
      v[i] = Operation::template apply<S>(low, high);
    }
    return fold<S, Operation, stage + 1, count / 2>(v);
  }
}

/// Returns the sum of all lanes in every lane. Adds in the order of fold, with the same bits.
template <class S, int stage = 0>
SSMAX_INLINE typename S::V fold_one(typename S::V v) {
  if constexpr ((index_t{1} << stage) >= S::width) {
    return v;
  } else {
    return fold_one<S, stage + 1>(S::add(v, S::template swap<S::fold_step[stage]>(v)));
  }
}

/// Transposes rows v[r] in place to columns, in the order of transposed_column. Each stage separates pairs as
/// a stage of fold does, and keeps both halves.
template <class S, int stage = 0>
SSMAX_INLINE void transpose_block(typename S::V* v) {
  constexpr int width = static_cast<int>(S::width);
  if constexpr ((1 << stage) < width) {
    constexpr int half = width >> (stage + 1);  // pairs that the earlier choices of halves have left
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

/// Returns the column that transpose_block leaves in v[path]. The first stage decides the highest bit of
/// `path`.
template <class S>
constexpr int transposed_column(int path) {
  int column = 0;
  for (int stage = 0; (1 << stage) < static_cast<int>(S::width); ++stage) {
    const int bit = static_cast<int>(S::width) >> (stage + 1);
    if ((path & bit) != 0) column += S::fold_step[stage];
  }
  return column;
}

/// The vectors in which transpose_block leaves the columns: the inverse of transposed_column.
template <class S>
struct ColumnPaths {
  int of[S::width]{};
  constexpr ColumnPaths() {
    for (int path = 0; path < static_cast<int>(S::width); ++path) of[transposed_column<S>(path)] = path;
  }
};
template <class S>
inline constexpr ColumnPaths<S> column_paths{};

/// Writes out[c][r] = in[r][c] for at most a vector's lanes of rows and any number of columns. If `factor` is
/// given, multiplies row r by factor[r].
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
