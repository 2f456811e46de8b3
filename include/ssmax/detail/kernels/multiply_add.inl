// c += a·b for one tile of attention: QKᵀ with K packed transposed, and PV. Included once per target.
//
// Four rows by two vectors: eight accumulators stay in registers over the whole of k, each step loads two
// vectors of b, broadcasts four elements of a, and issues eight FMAs.

template <class S, int m, int vectors>
SSMAX_INLINE void multiply_add_block(const typename S::Value* a, index_t a_stride, const typename S::Value* b,
                                     index_t b_stride, typename S::Value* c, index_t c_stride, index_t k,
                                     index_t last_lanes) {
  using T = typename S::Value;
  using V = typename S::V;
  constexpr index_t w = S::width;
  V sum[m][vectors];
  SSMAX_UNROLL
  for (int i = 0; i < m; ++i) {
    SSMAX_UNROLL
    for (int j = 0; j < vectors; ++j) sum[i][j] = S::set(T{0});
  }
  if (last_lanes == w) {
    for (index_t p = 0; p < k; ++p) {
      V row[vectors];
      SSMAX_UNROLL
      for (int j = 0; j < vectors; ++j) row[j] = S::load(b + p * b_stride + j * w);
      SSMAX_UNROLL
      for (int i = 0; i < m; ++i) {
        const V factor = S::set(a[i * a_stride + p]);
        SSMAX_UNROLL
        for (int j = 0; j < vectors; ++j) sum[i][j] = S::fma(factor, row[j], sum[i][j]);
      }
    }
    SSMAX_UNROLL
    for (int i = 0; i < m; ++i) {
      SSMAX_UNROLL
      for (int j = 0; j < vectors; ++j) {
        T* to = c + i * c_stride + j * w;
        S::store(to, S::add(S::load(to), sum[i][j]));
      }
    }
  } else {
    for (index_t p = 0; p < k; ++p) {
      const V row = S::load_part(b + p * b_stride, last_lanes, T{0});
      SSMAX_UNROLL
      for (int i = 0; i < m; ++i) sum[i][0] = S::fma(S::set(a[i * a_stride + p]), row, sum[i][0]);
    }
    SSMAX_UNROLL
    for (int i = 0; i < m; ++i) {
      T* to = c + i * c_stride;
      S::store_part(to, S::add(S::load_part(to, last_lanes, T{0}), sum[i][0]), last_lanes);
    }
  }
}

template <class S, int m>
SSMAX_INLINE void multiply_add_rows(const typename S::Value* a, index_t a_stride, const typename S::Value* b,
                                    index_t b_stride, typename S::Value* c, index_t c_stride, index_t n,
                                    index_t k) {
  constexpr index_t w = S::width;
  index_t j = 0;
  for (; j + 2 * w <= n; j += 2 * w) {
    multiply_add_block<S, m, 2>(a, a_stride, b + j, b_stride, c + j, c_stride, k, w);
  }
  for (; j < n; j += w) {
    multiply_add_block<S, m, 1>(a, a_stride, b + j, b_stride, c + j, c_stride, k, std::min(w, n - j));
  }
}

template <class S>
void multiply_add(const typename S::Value* a, index_t a_stride, const typename S::Value* b, index_t b_stride,
                  typename S::Value* c, index_t c_stride, index_t m, index_t n, index_t k) {
  index_t i = 0;
  for (; i + 4 <= m; i += 4) {
    multiply_add_rows<S, 4>(a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride, n, k);
  }
  for (; i < m; ++i) {
    multiply_add_rows<S, 1>(a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride, n, k);
  }
}
