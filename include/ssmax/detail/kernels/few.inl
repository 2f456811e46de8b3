// Attention of few queries: K and V are read from where they lie, in whatever type they are stored, each once for four
// queries. Included once per target.
//
// Logits: a vector holds products along a key's channels; as many (query, key) pairs as a vector has lanes are summed
// side by side, then folded into one vector of sums, so that a pair costs two shuffles. Four queries by four keys in
// AVX-512 make 16 FMAs of 8 loads.
// Weights times V: vectors along the channels, 16 sums (8 where there are 16 registers).

/// A block's keys are read in four streams, from its quarters in turn.
inline constexpr index_t few_streams = 4;

template <class S, class X>
SSMAX_INLINE typename S::V load_stored(const X* p) {
  if constexpr (std::is_same_v<X, typename S::Value>) {
    return S::load(p);
  } else {
    return S::load_widened(p);
  }
}

template <class S, class X>
SSMAX_INLINE typename S::V load_stored_part(const X* p, index_t count) {
  if constexpr (std::is_same_v<X, typename S::Value>) {
    return S::load_part(p, count, 0);
  } else {
    typename S::Value lanes[S::width] = {};
    for (index_t i = 0; i < count; ++i) lanes[i] = static_cast<float>(p[i]);
    return S::load(lanes);
  }
}

/// s[rows][·] = q[rows × d] · k[·][d] for `count` keys, at most width / rows.
template <class S, int rows, class X>
SSMAX_INLINE void few_logits_block(const typename S::Value* q, index_t q_stride, const X* k, index_t k_stride,
                                   index_t count, index_t d, typename S::Value* s, index_t s_stride) {
  using V = typename S::V;
  constexpr int keys = static_cast<int>(S::width) / rows;
  const X* key[keys];
  SSMAX_UNROLL
  for (int j = 0; j < keys; ++j) key[j] = k + std::min<index_t>(j, count - 1) * k_stride;
  V sum[rows * keys];
  SSMAX_UNROLL
  for (int i = 0; i < rows * keys; ++i) sum[i] = S::set(0);
  const auto whole = d / S::width * S::width;
  if constexpr (rows == 1) {
    // Key by key, in the order in which they lie: the processor's prefetching follows.
    SSMAX_UNROLL
    for (int j = 0; j < keys; ++j) {
      for (index_t c = 0; c < whole; c += S::width)
        sum[j] = S::fma(S::load(q + c), load_stored<S>(key[j] + c), sum[j]);
    }
  } else {
    for (index_t c = 0; c < whole; c += S::width) {
      V x[rows];
      SSMAX_UNROLL
      for (int i = 0; i < rows; ++i) x[i] = S::load(q + i * q_stride + c);
      SSMAX_UNROLL
      for (int j = 0; j < keys; ++j) {
        const V y = load_stored<S>(key[j] + c);
        SSMAX_UNROLL
        for (int i = 0; i < rows; ++i) sum[i * keys + j] = S::fma(x[i], y, sum[i * keys + j]);
      }
    }
  }
  if (whole < d) {
    SSMAX_UNROLL
    for (int j = 0; j < keys; ++j) {
      const V y = load_stored_part<S>(key[j] + whole, d - whole);
      SSMAX_UNROLL
      for (int i = 0; i < rows; ++i)
        sum[i * keys + j] = S::fma(S::load(q + i * q_stride + whole), y, sum[i * keys + j]);
    }
  }
  const V sums = fold<S, Sum>(sum);
  if (rows == 1 && count == keys) {
    S::store(s, sums);
    return;
  }
  typename S::Value lanes[S::width];
  S::store(lanes, sums);
  SSMAX_UNROLL
  for (int i = 0; i < rows; ++i) {
    if (count == keys) {
      __builtin_memcpy(s + i * s_stride, lanes + i * keys, sizeof(typename S::Value) * keys);
    } else {
      for (index_t j = 0; j < count; ++j) s[i * s_stride + j] = lanes[i * keys + j];
    }
  }
}

template <class S, int rows, class X>
void few_logits_rows(const typename S::Value* q, index_t q_stride, const X* k, index_t k_stride, index_t keys,
                     index_t d, typename S::Value* s, index_t s_stride) {
  constexpr index_t step = S::width / rows;
  const index_t blocks = (keys + step - 1) / step, quarter = (blocks + few_streams - 1) / few_streams;
  for (index_t i = 0; i < quarter; ++i) {
    for (index_t block = i; block < blocks; block += quarter) {
      const index_t key = block * step;
      few_logits_block<S, rows>(q, q_stride, k + key * k_stride, k_stride, std::min(step, keys - key), d,
                                s + key, s_stride);
    }
  }
}

template <class S, class X>
void few_logits(const typename S::Value* q, index_t q_stride, index_t rows, const X* k, index_t k_stride,
                index_t keys, index_t d, typename S::Value* s, index_t s_stride) {
  for (index_t r = 0; r < rows;) {
    const auto* from = q + r * q_stride;
    auto* to = s + r * s_stride;
    if (S::width >= 4 && r + 4 <= rows) {
      few_logits_rows<S, S::width >= 4 ? 4 : 1>(from, q_stride, k, k_stride, keys, d, to, s_stride);
      r += 4;
    } else if (S::width >= 2 && r + 2 <= rows) {
      few_logits_rows<S, S::width >= 2 ? 2 : 1>(from, q_stride, k, k_stride, keys, d, to, s_stride);
      r += 2;
    } else {
      few_logits_rows<S, 1>(from, q_stride, k, k_stride, keys, d, to, s_stride);
      r += 1;
    }
  }
}

template <class S, int rows, int vectors, class X>
SSMAX_INLINE void few_accumulate_block(const typename S::Value* s, index_t s_stride, index_t keys, const X* v,
                                       index_t v_stride, typename S::Value* o, index_t o_stride) {
  using V = typename S::V;
  V sum[rows][vectors];
  SSMAX_UNROLL
  for (int i = 0; i < rows; ++i) {
    SSMAX_UNROLL
    for (int j = 0; j < vectors; ++j) sum[i][j] = S::set(0);
  }
  const index_t quarter = (keys + few_streams - 1) / few_streams;
  for (index_t first = 0; first < quarter; ++first) {
    for (index_t key = first; key < keys; key += quarter) {
      V x[vectors];
      SSMAX_UNROLL
      for (int j = 0; j < vectors; ++j) x[j] = load_stored<S>(v + key * v_stride + j * S::width);
      SSMAX_UNROLL
      for (int i = 0; i < rows; ++i) {
        const V weight = S::set(s[i * s_stride + key]);
        SSMAX_UNROLL
        for (int j = 0; j < vectors; ++j) sum[i][j] = S::fma(weight, x[j], sum[i][j]);
      }
    }
  }
  SSMAX_UNROLL
  for (int i = 0; i < rows; ++i) {
    SSMAX_UNROLL
    for (int j = 0; j < vectors; ++j) {
      typename S::Value* to = o + i * o_stride + j * S::width;
      S::store(to, S::add(S::load(to), sum[i][j]));
    }
  }
}

template <class S, int rows, class X>
void few_accumulate_rows(const typename S::Value* s, index_t s_stride, index_t keys, const X* v,
                         index_t v_stride, index_t dv, typename S::Value* o, index_t o_stride) {
  using V = typename S::V;
  index_t c = 0;
  if constexpr (2 * S::tile_rows / rows >= 8) {
    for (; c + 8 * S::width <= dv; c += 8 * S::width) {
      few_accumulate_block<S, rows, 8>(s, s_stride, keys, v + c, v_stride, o + c, o_stride);
    }
  }
  if constexpr (2 * S::tile_rows / rows >= 4) {
    for (; c + 4 * S::width <= dv; c += 4 * S::width) {
      few_accumulate_block<S, rows, 4>(s, s_stride, keys, v + c, v_stride, o + c, o_stride);
    }
  }
  for (; c + 2 * S::width <= dv; c += 2 * S::width) {
    few_accumulate_block<S, rows, 2>(s, s_stride, keys, v + c, v_stride, o + c, o_stride);
  }
  for (; c + S::width <= dv; c += S::width) {
    few_accumulate_block<S, rows, 1>(s, s_stride, keys, v + c, v_stride, o + c, o_stride);
  }
  if (c == dv) return;
  V sum[rows];
  for (int i = 0; i < rows; ++i) sum[i] = S::set(0);
  for (index_t key = 0; key < keys; ++key) {
    const V x = load_stored_part<S>(v + key * v_stride + c, dv - c);
    for (int i = 0; i < rows; ++i) sum[i] = S::fma(S::set(s[i * s_stride + key]), x, sum[i]);
  }
  for (int i = 0; i < rows; ++i) {
    typename S::Value* to = o + i * o_stride + c;
    S::store_part(to, S::add(S::load_part(to, dv - c, 0), sum[i]), dv - c);
  }
}

template <class S, class X>
void few_accumulate(const typename S::Value* s, index_t s_stride, index_t rows, index_t keys, const X* v,
                    index_t v_stride, index_t dv, typename S::Value* o, index_t o_stride) {
  for (index_t r = 0; r < rows;) {
    const auto* from = s + r * s_stride;
    auto* to = o + r * o_stride;
    if (r + 4 <= rows) {
      few_accumulate_rows<S, 4>(from, s_stride, keys, v, v_stride, dv, to, o_stride);
      r += 4;
    } else {
      few_accumulate_rows<S, 1>(from, s_stride, keys, v, v_stride, dv, to, o_stride);
      r += 1;
    }
  }
}
