// Attention of few queries: K and V are read from where they lie, in whatever type they are stored, each once for four
// queries. Included once per target.
//
// Logits: a vector holds products along a key's channels; as many (query, key) pairs as a vector has lanes are summed
// side by side, then folded into one vector of sums, so that a pair costs two shuffles. Four queries by four keys in
// AVX-512 make 16 FMAs of 8 loads.
// Weights times V: vectors along the channels, 16 sums (8 where there are 16 registers).

/// One query is bound by memory: a block's keys are read in four streams, a row or a few of each in turn. In small pages
/// that brings 23 GB/s of 24, against 17 in one stream, and 15 where each stream gives a whole page in its turn (Zen 4).
/// Several queries are bound by their FMAs: they read on in one stream, 15 to 18 GB/s against 12 (eight queries).
template <int rows>
inline constexpr int few_streams = rows == 1 ? 4 : 1;

/// Queries for which K and V are read once. Eight with AVX-512's registers were slower, in cache (16 instead of 19 GB/s) and
/// from memory (10 instead of 12), and so was fetching ahead.
template <class S>
inline constexpr int few_most_rows = S::width >= 4 ? 4 : 1;

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

/// s[rows][·] = q[rows × d] · k[·][d] for width / rows keys at a time, as many from each stream.
template <class S, int rows, class X>
void few_logits_rows(const typename S::Value* q, index_t q_stride, const X* k, index_t k_stride, index_t keys,
                     index_t d, typename S::Value* s, index_t s_stride) {
  using T = typename S::Value;
  using V = typename S::V;
  constexpr int step = static_cast<int>(S::width) / rows;
  constexpr int streams = std::min(step, few_streams<rows>), each = step / streams;
  const index_t whole = d / S::width * S::width;
  const index_t part = (keys + step - 1) / step * each;  // of a stream, the last one's cut short
  for (index_t first = 0; first < part; first += each) {
    const X* key[step];
    SSMAX_UNROLL
    for (int j = 0; j < step; ++j)
      key[j] = k + std::min(j / each * part + first + j % each, keys - 1) * k_stride;
    V sum[rows * step];
    SSMAX_UNROLL
    for (int i = 0; i < rows * step; ++i) sum[i] = S::set(0);
    if constexpr (rows == 1) {
      // Key by key, in the order in which they lie: the processor's prefetching follows.
      SSMAX_UNROLL
      for (int j = 0; j < step; ++j) {
        for (index_t c = 0; c < whole; c += S::width)
          sum[j] = S::fma(S::load(q + c), load_stored<S>(key[j] + c), sum[j]);
      }
    } else {
      for (index_t c = 0; c < whole; c += S::width) {
        V x[rows];
        SSMAX_UNROLL
        for (int i = 0; i < rows; ++i) x[i] = S::load(q + i * q_stride + c);
        SSMAX_UNROLL
        for (int j = 0; j < step; ++j) {
          const V y = load_stored<S>(key[j] + c);
          SSMAX_UNROLL
          for (int i = 0; i < rows; ++i) sum[i * step + j] = S::fma(x[i], y, sum[i * step + j]);
        }
      }
    }
    if (whole < d) {
      SSMAX_UNROLL
      for (int j = 0; j < step; ++j) {
        const V y = load_stored_part<S>(key[j] + whole, d - whole);
        SSMAX_UNROLL
        for (int i = 0; i < rows; ++i)
          sum[i * step + j] = S::fma(S::load(q + i * q_stride + whole), y, sum[i * step + j]);
      }
    }
    T lanes[S::width];
    S::store(lanes, fold<S, Sum>(sum));
    SSMAX_UNROLL
    for (int stream = 0; stream < streams; ++stream) {
      const index_t at = stream * part + first, count = std::min<index_t>(each, keys - at);
      SSMAX_UNROLL
      for (int i = 0; i < rows; ++i) {
        const T* from = lanes + i * step + stream * each;
        T* to = s + i * s_stride + at;
        if (count == each) {
          __builtin_memcpy(to, from, sizeof(T) * each);
        } else {
          for (index_t j = 0; j < count; ++j) to[j] = from[j];
        }
      }
    }
  }
}

template <class S, class X>
void few_logits(const typename S::Value* q, index_t q_stride, index_t rows, const X* k, index_t k_stride,
                index_t keys, index_t d, typename S::Value* s, index_t s_stride) {
  index_t r = 0;
  const auto take = [&](auto count) {
    constexpr int at_once = count;
    if constexpr (at_once == 1 || at_once <= few_most_rows<S>) {
      for (; r + at_once <= rows; r += at_once) {
        few_logits_rows<S, at_once>(q + r * q_stride, q_stride, k, k_stride, keys, d, s + r * s_stride,
                                    s_stride);
      }
    }
  };
  take(std::integral_constant<int, 4>{});
  take(std::integral_constant<int, 2>{});
  take(std::integral_constant<int, 1>{});
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
  const index_t part = (keys + few_streams<rows> - 1) / few_streams<rows>;
  for (index_t first = 0; first < part; ++first) {
    for (index_t key = first; key < keys; key += part) {
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
  index_t r = 0;
  const auto take = [&](auto count) {
    constexpr int at_once = count;
    if constexpr (at_once == 1 || at_once <= few_most_rows<S>) {
      for (; r + at_once <= rows; r += at_once) {
        few_accumulate_rows<S, at_once>(s + r * s_stride, s_stride, keys, v, v_stride, dv, o + r * o_stride,
                                        o_stride);
      }
    }
  };
  take(std::integral_constant<int, 4>{});
  take(std::integral_constant<int, 1>{});
}
