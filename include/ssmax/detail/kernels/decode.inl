// Implements attention with few queries. K and V are read in place, in their storage type, and each only once
// for up to four queries. Included once per target.
//
// Logits: a vector holds products along the channels of a key. As many (query, key) pairs as a vector has
// lanes are summed side by side. They are then folded into one vector of sums, so that a pair costs two
// shuffles. In AVX-512, four queries by four keys take 16 FMAs and 8 loads.
//
// Weights times V: vectors hold channels, in 16 sums. Exception: 8 sums on targets with 16 registers.

// K and V are read in the order of memory, in one stream. docs/measured.md has the measurements of this file.

/// Number of queries that share one reading of K and V. Eight queries with AVX-512's registers were slower,
/// in the cache (16 instead of 19 GB/s) and from memory (10 instead of 12).
template <class S>
inline constexpr int decode_most_rows = S::width < 4 ? static_cast<int>(S::width) : 4;

/// Widest rows that may be read side by side. Rows of K side by side load the queries once for several keys.
/// Narrow rows of V are read in passes, each over some of the channels. The hardware prefetcher still follows
/// such reads. Wider rows are read one after another, each whole. One query reads rows one after another.
template <class S>
inline constexpr index_t decode_narrow = 4 * S::width;

/// The unit in which load_stored returns numbers: 256 for Fp8E4M3. The kernels multiply logits and weights by it, which
/// saves a product for each vector of K and V. With one query and AVX-512, Fp8E4M3 then takes 0.8 of the time.
template <class S, class X>
inline constexpr int stored_unit = requires(const X* p) {
  S::load_over_256(p);
}
? 256 : 1;

/// Returns channels [c, c + width) of a row, divided by stored_unit.
template <class S, class X>
SSMAX_INLINE typename S::V load_stored(const X* row, index_t c) {
  if constexpr (std::is_same_v<X, typename S::Value>) {
    return S::load(row + c);
  } else if constexpr (stored_unit<S, X> != 1) {
    return S::load_over_256(row + c);
  } else if constexpr (std::is_same_v<X, Q8_0>) {
    const Q8_0& group = row[c / Q8_0::group];
    return S::mul(S::load_widened(group.values + c % Q8_0::group), S::set_widened(group.scale));
  } else {
    return S::load_widened(row + c);
  }
}

/// Returns the last `count` channels of a row, from c on, divided by stored_unit. Rows of Q8_0 have whole groups, which
/// fill vectors.
template <class S, class X>
SSMAX_INLINE typename S::V load_stored_part(const X* row, index_t c, index_t count) {
  if constexpr (std::is_same_v<X, typename S::Value>) {
    return S::load_part(row + c, count, 0);
  } else if constexpr (std::is_same_v<X, Q8_0>) {
    return S::set(0);
  } else {
    typename S::Value lanes[S::width] = {};
    for (index_t i = 0; i < count; ++i) lanes[i] = static_cast<float>(row[c + i]) / stored_unit<S, X>;
    return S::load(lanes);
  }
}

/// The number of keys that queries read before the next keys if they read keys more than once. So only the first of
/// these queries read the keys from beyond the first-level cache.
inline constexpr index_t decode_tile = 64;

/// Returns whether `rows` queries read their keys more than once. At most `most` queries share one reading: 4, 2 or 1.
SSMAX_INLINE constexpr bool reads_keys_again(index_t rows, index_t most) { return rows > most || rows == 3; }

/// All targets prefetch listed rows. Only targets with AVX-512 prefetch within runs, because the others were not
/// measured.
template <class S, class Rows>
inline constexpr bool decode_prefetches =
    S::width == 16 || std::is_same_v<Rows, ListedRows<typename Rows::Element>>;

/// Prefetches channels [c, c + count) of the row that lies ahead of row i. Kernels have a form that does not
/// prefetch: a test of `ahead` per row takes a fifth of the time of one float query from memory, and 5 % of four from
/// the third-level cache.
///
/// With one query, 16-bit rows are widened and multiplied about as fast as memory delivers the rows. So one query
/// always prefetches them: 23 instead of 11 GB/s on an Intel processor with AMX. One query does not prefetch long runs
/// of float, which became 16 % slower on that processor.
template <bool prefetches, class Rows>
SSMAX_INLINE void prefetch_row(const Rows& rows, index_t i, index_t c, index_t count) {
  if constexpr (prefetches) {
    using X = typename Rows::Element;
    constexpr index_t group = std::is_same_v<X, Q8_0> ? Q8_0::group : 1;
    const std::uintptr_t first = rows.later(i) + static_cast<std::uintptr_t>(c / group) * sizeof(X);
    const std::uintptr_t end = first + static_cast<std::uintptr_t>((count + group - 1) / group) * sizeof(X);
    if (end - first <= 64) {  // two lines at most, without a branch
      __builtin_prefetch(reinterpret_cast<const void*>(first));
      __builtin_prefetch(reinterpret_cast<const void*>(end - 1));
      return;
    }
    for (std::uintptr_t line = first / 64 * 64; line < end; line += 64)
      __builtin_prefetch(reinterpret_cast<const void*>(line));
  }
}

/// Adds the products of queries and keys [first, first + count) along the channels from c on, which fill no vector.
template <class S, int rows, int step, class Rows>
SSMAX_INLINE void decode_add_part(StridedRows<const typename S::Value> q, const Rows& k, index_t first,
                                  index_t count, index_t c, typename S::V (&sum)[rows * step]) {
  using X = typename Rows::Element;
  using T = typename S::Value;
  // A copy of the loop that widens the channels for each key took a quarter of the time to compile.
  T widened[step][S::width];
  if constexpr (!std::is_same_v<X, T>) {
    for (int j = 0; j < step; ++j)
      S::store(widened[j], load_stored_part<S>(k[first + std::min<index_t>(j, count - 1)], c, k.width - c));
  }
  SSMAX_UNROLL
  for (int j = 0; j < step; ++j) {
    typename S::V y;
    if constexpr (std::is_same_v<X, T>) {
      y = load_stored_part<S>(k[first + std::min<index_t>(j, count - 1)], c, k.width - c);
    } else {
      y = S::load(widened[j]);
    }
    SSMAX_UNROLL
    for (int i = 0; i < rows; ++i) sum[i * step + j] = S::fma(S::load(q[i] + c), y, sum[i * step + j]);
  }
}

/// Writes s[rows][·] = q[rows × d] · k[·][d] for width / rows keys at a time.
template <class S, int rows, bool prefetches, class Rows>
void decode_logits_rows(StridedRows<const typename S::Value> q, const Rows& key_rows,
                        StridedRows<typename S::Value> s) {
  using X = typename Rows::Element;
  using T = typename S::Value;
  using V = typename S::V;
  constexpr int step = static_cast<int>(S::width) / rows;
  const Rows k = key_rows;  // a copy that no store can change
  const index_t d = k.width, whole = d / S::width * S::width;
  for (index_t first = 0; first < k.count; first += step) {
    const index_t count = std::min<index_t>(step, k.count - first);
    const X* key[step];
    SSMAX_UNROLL
    for (int j = 0; j < step; ++j) key[j] = k[first + std::min<index_t>(j, count - 1)];
    V sum[rows * step];
    SSMAX_UNROLL
    for (int i = 0; i < rows * step; ++i) sum[i] = S::set(0);
    if (d == S::width) {  // without the loops over channels, which would take half of the time
      SSMAX_UNROLL
      for (int j = 0; j < step; ++j) {
        if (j < count) prefetch_row<prefetches>(k, first + j, 0, S::width);
        const V y = load_stored<S>(key[j], 0);
        SSMAX_UNROLL
        for (int i = 0; i < rows; ++i) sum[i * step + j] = S::fma(S::load(q[i]), y, sum[i * step + j]);
      }
    } else if (rows == 1 || d > decode_narrow<S>) {
      SSMAX_UNROLL
      for (int j = 0; j < step; ++j) {
        prefetch_row<prefetches>(k, first + std::min<index_t>(j, count - 1), 0, d);
        for (index_t c = 0; c < whole; c += S::width) {
          const V y = load_stored<S>(key[j], c);
          SSMAX_UNROLL
          for (int i = 0; i < rows; ++i) sum[i * step + j] = S::fma(S::load(q[i] + c), y, sum[i * step + j]);
        }
      }
    } else {
      SSMAX_UNROLL
      for (int j = 0; j < step; ++j)
        prefetch_row<prefetches>(k, first + std::min<index_t>(j, count - 1), 0, d);
      for (index_t c = 0; c < whole; c += S::width) {
        V x[rows];
        SSMAX_UNROLL
        for (int i = 0; i < rows; ++i) x[i] = S::load(q[i] + c);
        SSMAX_UNROLL
        for (int j = 0; j < step; ++j) {
          const V y = load_stored<S>(key[j], c);
          SSMAX_UNROLL
          for (int i = 0; i < rows; ++i) sum[i * step + j] = S::fma(x[i], y, sum[i * step + j]);
        }
      }
    }
    if (whole < d) decode_add_part<S, rows, step>(q, k, first, count, whole, sum);
    V sums = fold<S, Sum>(sum);
    if constexpr (stored_unit<S, X> != 1) sums = S::mul(sums, S::set(stored_unit<S, X>));
    if (rows == 1) {
      if (count == step) {
        S::store(s.first + first, sums);
      } else {
        S::store_part(s.first + first, sums, count);
      }
      continue;
    }
    T lanes[S::width];
    S::store(lanes, sums);
    SSMAX_UNROLL
    for (int i = 0; i < rows; ++i) {
      T* to = s[i] + first;
      if (count == step) {
        __builtin_memcpy(to, lanes + i * step, sizeof(T) * step);
      } else {
        for (index_t j = 0; j < count; ++j) to[j] = lanes[index_t{i} * step + j];
      }
    }
  }
}

/// Computes the logits of queries that read the keys together.
template <class S, int rows, class Rows>
SSMAX_INLINE void decode_logits_of(StridedRows<const typename S::Value> q, const Rows& k,
                                   StridedRows<typename S::Value> s) {
  const auto compute = k.prefetches() ? decode_logits_rows<S, rows, decode_prefetches<S, Rows>, Rows>
                                      : decode_logits_rows<S, rows, false, Rows>;
  compute(q, k, s);
}

template <class S, class Rows>
void decode_logits(StridedRows<const typename S::Value> q, index_t rows, const Rows& k,
                   StridedRows<typename S::Value> s) {
  // With 32 keys, the loops below would take 4 % of a task with one query.
  if (rows == 1) return decode_logits_of<S, 1>(q, k, s);
  const index_t tile = reads_keys_again(rows, decode_most_rows<S>) ? decode_tile : k.count;
  for (index_t first = 0; first < k.count; first += tile) {
    const Rows tile_k = k.part(first, std::min(tile, k.count - first));
    index_t r = 0;
    const auto step = [&]<int step_rows>(std::integral_constant<int, step_rows>) {
      decode_logits_of<S, step_rows>({q[r], q.stride}, r == 0 ? tile_k : tile_k.without_prefetch(),
                                     {s[r] + first, s.stride});
      r += step_rows;
    };
    if constexpr (decode_most_rows<S> >= 4) {
      while (r + 4 <= rows) step(std::integral_constant<int, 4>{});
    }
    if constexpr (decode_most_rows<S> >= 2) {
      while (r + 2 <= rows) step(std::integral_constant<int, 2>{});
    }
    while (r < rows) step(std::integral_constant<int, 1>{});
  }
}

/// Adds weights times `vectors` vectors of values from channel c on.
template <class S, int rows, int vectors, bool prefetches, class Rows>
SSMAX_INLINE void decode_add_values(StridedRows<const typename S::Value> s, const Rows& v, index_t c,
                                    typename S::V (&sum)[rows][vectors]) {
  using X = typename Rows::Element;
  using V = typename S::V;
  for (index_t key = 0; key < v.count; ++key) {
    prefetch_row<prefetches>(v, key, c, vectors * S::width);
    const X* row = v[key];
    V x[vectors];
    SSMAX_UNROLL
    for (int j = 0; j < vectors; ++j) x[j] = load_stored<S>(row, c + j * S::width);
    SSMAX_UNROLL
    for (int i = 0; i < rows; ++i) {
      const V weight = S::set(s[i][key] * stored_unit<S, X>);
      SSMAX_UNROLL
      for (int j = 0; j < vectors; ++j) sum[i][j] = S::fma(weight, x[j], sum[i][j]);
    }
  }
}

template <class S, int rows, int vectors, bool prefetches, class Rows>
SSMAX_INLINE void decode_accumulate_block(StridedRows<const typename S::Value> s, const Rows& v, index_t c,
                                          StridedRows<typename S::Value> o) {
  typename S::V sum[rows][vectors];
  load_sums<S>({o[0] + c, o.stride}, sum);
  decode_add_values<S, rows, vectors, prefetches>(s, v, c, sum);
  store_sums<S>(sum, {o[0] + c, o.stride});
}

template <class S, int rows, bool prefetches, class Rows>
void decode_accumulate_rows(StridedRows<const typename S::Value> s, const Rows& value_rows,
                            StridedRows<typename S::Value> o) {
  using X = typename Rows::Element;
  using V = typename S::V;
  const Rows v = value_rows;  // a copy that no store can change
  const index_t dv = v.width;
  index_t c = 0;
  if constexpr (2 * S::tile_rows / rows >= 8) {
    for (; c + 8 * S::width <= dv; c += 8 * S::width) {
      decode_accumulate_block<S, rows, 8, prefetches>(s, v, c, o);
    }
  }
  if constexpr (2 * S::tile_rows / rows >= 4) {
    for (; c + 4 * S::width <= dv; c += 4 * S::width) {
      decode_accumulate_block<S, rows, 4, prefetches>(s, v, c, o);
    }
  }
  for (; c + 2 * S::width <= dv; c += 2 * S::width) {
    decode_accumulate_block<S, rows, 2, prefetches>(s, v, c, o);
  }
  for (; c + S::width <= dv; c += S::width) {
    decode_accumulate_block<S, rows, 1, prefetches>(s, v, c, o);
  }
  if (c == dv) return;
  V sum[rows];
  for (int i = 0; i < rows; ++i) sum[i] = S::load_part(o[i] + c, dv - c, 0);
  for (index_t key = 0; key < v.count; ++key) {
    prefetch_row<prefetches>(v, key, c, dv - c);
    const V x = load_stored_part<S>(v[key], c, dv - c);
    for (int i = 0; i < rows; ++i) sum[i] = S::fma(S::set(s[i][key] * stored_unit<S, X>), x, sum[i]);
  }
  for (int i = 0; i < rows; ++i) S::store_part(o[i] + c, sum[i], dv - c);
}

/// Adds the weights of queries that read the values together, times V.
template <class S, int rows, class Rows>
SSMAX_INLINE void decode_accumulate_of(StridedRows<const typename S::Value> s, const Rows& v,
                                       StridedRows<typename S::Value> o) {
  const auto compute = v.prefetches() ? decode_accumulate_rows<S, rows, decode_prefetches<S, Rows>, Rows>
                                      : decode_accumulate_rows<S, rows, false, Rows>;
  compute(s, v, o);
}

template <class S, class Rows>
void decode_accumulate(StridedRows<const typename S::Value> s, index_t rows, const Rows& v,
                       StridedRows<typename S::Value> o) {
  if (rows == 1) return decode_accumulate_of<S, 1>(s, v, o);
  const bool narrow = v.width <= decode_narrow<S>;
  const index_t most = narrow ? decode_most_rows<S> : std::min<index_t>(2, decode_most_rows<S>);
  const index_t tile = reads_keys_again(rows, most) ? decode_tile : v.count;
  for (index_t first = 0; first < v.count; first += tile) {
    const Rows tile_v = v.part(first, std::min(tile, v.count - first));
    index_t r = 0;
    const auto step = [&]<int step_rows>(std::integral_constant<int, step_rows>) {
      decode_accumulate_of<S, step_rows>({s[r] + first, s.stride},
                                         r == 0 ? tile_v : tile_v.without_prefetch(), {o[r], o.stride});
      r += step_rows;
    };
    if constexpr (decode_most_rows<S> >= 4) {
      while (narrow && r + 4 <= rows) step(std::integral_constant<int, 4>{});
    }
    if constexpr (decode_most_rows<S> >= 2) {
      while (r + 2 <= rows) step(std::integral_constant<int, 2>{});
    }
    while (r < rows) step(std::integral_constant<int, 1>{});
  }
}

/// Returns the lanes below `count`, which may be larger than the number of lanes.
template <class S>
SSMAX_INLINE typename S::M first_lanes(index_t count) {
  using T = typename S::Value;
  static constexpr T numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return S::less(S::load(numbers), S::set(static_cast<T>(count)));
}

/// Returns the shift of the largest logit, as OnlineSoftmax does. Returns false if the shift is not exact.
template <class T>
SSMAX_INLINE bool find_shift(double c, const Extremum<T>& top, T& shift) {
  const double largest = c * static_cast<double>(top.value) * std::numbers::log2e;
  if (top.has_nan || !(std::abs(largest) < largest_shift<double>)) return false;
  shift = static_cast<T>(round_shift(largest));
  return true;
}

/// Returns the logits of `count` keys, from `first` on, of `vectors` vectors each. Lanes from `count` on are -inf.
template <class S, int vectors, bool prefetches, class Rows>
SSMAX_INLINE typename S::V decode_vector_of_logits(const typename S::V (&q)[vectors], const Rows& k,
                                                   index_t first, index_t count) {
  using X = typename Rows::Element;
  typename S::V sum[S::width];
  SSMAX_UNROLL
  for (int j = 0; j < static_cast<int>(S::width); ++j) {
    sum[j] = S::set(0);
    if (j >= count) continue;
    prefetch_row<prefetches>(k, first + j, 0, vectors * S::width);
    const X* key = k[first + j];
    SSMAX_UNROLL
    for (int c = 0; c < vectors; ++c) sum[j] = S::fma(q[c], load_stored<S>(key, c * S::width), sum[j]);
  }
  const typename S::V lowest = S::set(-std::numeric_limits<typename S::Value>::infinity());
  return S::select(first_lanes<S>(count), fold<S, Sum>(sum), lowest);
}

/// Computes the weights of less than S::chains vectors of keys in registers. Adds them in the order of row_exp_store.
template <class S, int vectors, bool prefetches, class Rows>
bool decode_few_weights(const typename S::Value* q, const Rows& key_rows,
                        const QueryScale<typename S::Value>& scale, typename S::Value* s,
                        typename S::Value& shift, typename S::Value& sum) {
  using T = typename S::Value;
  using V = typename S::V;
  constexpr index_t w = S::width;
  const Rows k = key_rows;  // a copy that no store can change
  V query[vectors], z[S::chains], top = S::set(-std::numeric_limits<T>::infinity());
  typename S::M nan = S::none();
  SSMAX_UNROLL
  for (int c = 0; c < vectors; ++c) query[c] = S::load(q + c * w);
  for (index_t i = 0; i * w < k.count; ++i) {
    z[i] = decode_vector_of_logits<S, vectors, prefetches>(query, k, i * w, std::min(w, k.count - i * w));
    nan = S::either(nan, S::unordered(z[i], z[i]));
    top = S::max(top, z[i]);
  }
  T found;
  if (!find_shift<T>(scale.c, {S::reduce_max(top), S::any(nan)}, found)) return false;
  const Exp<S> exp(scale.scale, found);
  V total = S::set(T{0});
  for (index_t i = 0; i * w < k.count; ++i) {
    const V weights = exp(z[i]);
    S::store(s + i * w, weights);
    total = S::add(total, weights);
  }
  shift = found;
  sum = S::reduce_sum(total);
  return true;
}

/// Computes the weights of one query: the steps of OnlineSoftmax::update.
template <class S, class Rows>
bool decode_weights(const typename S::Value* q, const Rows& k, const QueryScale<typename S::Value>& scale,
                    typename S::Value* s, typename S::Value& shift, typename S::Value& sum) {
  const auto few = [&]<int vectors>(std::integral_constant<int, vectors>) {
    const auto compute = k.prefetches() ? decode_few_weights<S, vectors, decode_prefetches<S, Rows>, Rows>
                                        : decode_few_weights<S, vectors, false, Rows>;
    return compute(q, k, scale, s, shift, sum);
  };
  if (k.count < S::chains * S::width) {
    if (k.width == S::width) return few(std::integral_constant<int, 1>{});
    if (k.width == 2 * S::width) return few(std::integral_constant<int, 2>{});
    if (k.width == 4 * S::width) return few(std::integral_constant<int, 4>{});
  }
  decode_logits_of<S, 1>({q, 0}, k, {s, 0});
  if (!find_shift(scale.c, row_max<S>(s, k.count), shift)) return false;
  OverlappedWork<typename S::Value> nothing{};
  sum = row_exp_store<S>(s, k.count, scale.scale, shift, s, nothing);
  return true;
}

/// Writes `vectors` vectors of the result of one query.
template <class S, int vectors, bool prefetches, class Rows>
void decode_output_block(const typename S::Value* s, const Rows& value_rows, typename S::Value factor,
                         typename S::Value* out) {
  const Rows v = value_rows;  // a copy that no store can change
  typename S::V sum[1][vectors];
  clear_sums<S>(sum);
  decode_add_values<S, 1, vectors, prefetches>({s, 0}, v, 0, sum);
  SSMAX_UNROLL
  for (int j = 0; j < vectors; ++j) S::store(out + j * S::width, S::mul(S::set(factor), sum[0][j]));
}

/// Writes the result of one query over few keys.
template <class S, class Rows>
void decode_output(const typename S::Value* s, const Rows& v, typename S::Value factor,
                   typename S::Value* out) {
  const auto write = [&]<int vectors>(std::integral_constant<int, vectors>) {
    const auto compute = v.prefetches() ? decode_output_block<S, vectors, decode_prefetches<S, Rows>, Rows>
                                        : decode_output_block<S, vectors, false, Rows>;
    compute(s, v, factor, out);
  };
  if (v.width == S::width) return write(std::integral_constant<int, 1>{});
  if (v.width == 2 * S::width) return write(std::integral_constant<int, 2>{});
  if (v.width == 4 * S::width) return write(std::integral_constant<int, 4>{});
  std::fill_n(out, v.width, typename S::Value{0});
  decode_accumulate_of<S, 1>({s, 0}, v, {out, 0});
  row_multiply<S>(out, v.width, factor, out);
}

/// The empty table of targets without pair dots.
template <class T>
struct KernelTable<PairDecodeKernels<T, bfloat16>> {
  static constexpr PairDecodeKernels<T, bfloat16> value{};
};

template <class T, class X>
struct KernelTable<DecodeKernels<T, X>> {
  using S = Simd<T>;
  static constexpr DecodeKernels<T, X> value{.logits = decode_logits<S, KeyRows<X>>,
                                             .accumulate = decode_accumulate<S, KeyRows<X>>};
};

template <class T, class X>
struct KernelTable<ListedDecodeKernels<T, X>> {
  using S = Simd<T>;
  static constexpr ListedDecodeKernels<T, X> value{.logits = decode_logits<S, ListedRows<X>>,
                                                   .accumulate = decode_accumulate<S, ListedRows<X>>,
                                                   .weights = decode_weights<S, ListedRows<X>>,
                                                   .output = decode_output<S, ListedRows<X>>};
};
