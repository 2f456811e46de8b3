// Implements attention with few queries by pair dots of bfloat16. Included once for each extension that has
// pair dots.
//
// Logits: vectors hold keys. Keys are packed first, as pairs of channels: [key / 16][pair of channels][16][2].
// So a product reads vectors of keys and broadcasts pairs of q. Each lane holds the sum of one key. Logits are
// then transposed into lanes of queries. From there on they are the logits of prefill_pairs.inl, which computes
// weights and states.
//
// Weights times V: vectors hold channels. Rows of V are interleaved as pairs of keys, and pairs of weights are
// broadcast.
//
// The products of a query add numbers in the order of prefill_pairs.inl: pair of channels by pair of channels,
// pair of keys by pair of keys. So both paths have the same bits.

/// Loads at most a vector of pairs. Missing numbers are 0.
template <class S, class P>
SSMAX_INLINE typename P::V load_pairs_up_to(const bfloat16* p, index_t left) {
  return left >= 2 * S::width ? P::load(p) : P::load_part(p, left);
}

/// Prefetches channels [first, last) of the rows of keys [begin, end).
SSMAX_INLINE void prefetch_rows(const RowsAhead<bfloat16>& of, index_t begin, index_t end, index_t first,
                                index_t last) {
  for (index_t i = begin; i < end; ++i) {
    const std::uintptr_t row =
        reinterpret_cast<std::uintptr_t>(of.rows[i]) + static_cast<std::uintptr_t>(of.bytes);
    for (index_t c = first; c < last; c += 32)
      __builtin_prefetch(reinterpret_cast<const void*>(row + static_cast<std::uintptr_t>(2 * c)));
  }
}

/// Packs the rows k[keys] of d channels. A missing channel of the last pair is 0. `keys` is a multiple of
/// packed_keys.
template <class S, class P>
void decode_pack_keys(const bfloat16* const* k, index_t keys, index_t d, bfloat16* packed) {
  constexpr int width = static_cast<int>(S::width);
  const index_t pairs = (d + 1) / 2;
  for (index_t key = 0; key < keys; key += S::width) {
    bfloat16* block = packed + key / packed_keys * packed_keys * 2 * pairs + key % packed_keys * 2;
    for (index_t first = 0; first < pairs; first += S::width) {
      const index_t c = 2 * first, left = d - c;
      typename S::V v[width];
      SSMAX_UNROLL
      for (int i = 0; i < width; ++i) v[i] = P::as_floats(load_pairs_up_to<S, P>(k[key + i] + c, left));
      transpose_block<S>(v);
      SSMAX_UNROLL
      for (int i = 0; i < width; ++i) {
        const index_t pair = first + transposed_column<S>(i);
        if (pair < pairs) P::store(block + pair * 2 * packed_keys, P::as_pairs(v[i]));
      }
    }
  }
}

/// Writes s[row][key] for `blocks` blocks of packed keys, of which `key` is the first key, and `rows` queries.
template <class S, class P, int rows, int blocks>
SSMAX_INLINE void decode_pair_logits_block(const bfloat16* q, index_t parts, const bfloat16* k, index_t key,
                                           index_t pairs, const RowsAhead<bfloat16>& ahead, float* s) {
  constexpr int width = static_cast<int>(S::width);
  constexpr int in_block = static_cast<int>(packed_keys) / width, vectors = blocks * in_block;
  const index_t block = pairs * 2 * packed_keys;
  k += key / packed_keys * block;
  typename S::V sum[rows][vectors];
  clear_sums<S>(sum);
  for (index_t part = 0; part < parts; ++part) {
    const index_t prefetched = part > 0 || ahead.rows == nullptr ? 0 : blocks * packed_keys;
    for (index_t pair = 0, end = 0; pair < pairs;) {
      const index_t begin = end;
      end = std::min(begin + 8, pairs);
      prefetch_rows(ahead, key + begin * prefetched / pairs, key + end * prefetched / pairs, 0, ahead.size);
      for (; pair < end; ++pair, q += 2 * group_width<S>) {
        typename P::V y[vectors];
        SSMAX_UNROLL
        for (int j = 0; j < vectors; ++j) {
          y[j] = P::load(k + j / in_block * block + pair * 2 * packed_keys + j % in_block * 2 * width);
        }
        SSMAX_UNROLL
        for (int i = 0; i < rows; ++i) {
          const typename P::V x = P::set(q + 2 * i);
          SSMAX_UNROLL
          for (int j = 0; j < vectors; ++j) sum[i][j] = P::dot(y[j], x, sum[i][j]);
        }
      }
    }
  }
  store_sums<S>(sum, {s + key, logit_pitch});
}

template <class S, class P, int rows, int blocks>
void decode_pair_logits_rows(const bfloat16* q, index_t parts, const bfloat16* k, index_t keys, index_t pairs,
                             const RowsAhead<bfloat16>& ahead, float* s) {
  index_t key = 0;
  const auto step = [&]<int count>(std::integral_constant<int, count>) {
    decode_pair_logits_block<S, P, rows, count>(q, parts, k, key, pairs, ahead, s);
    key += count * packed_keys;
  };
  while (key + blocks * packed_keys <= keys) step(std::integral_constant<int, blocks>{});
  while (key < keys) step(std::integral_constant<int, 1>{});
}

/// Writes s[rows][keys] = q · kᵀ. The rows of s are padded to whole vectors of queries.
template <class S, class P>
void decode_pair_logits(const bfloat16* q, index_t parts, index_t rows, const PackedKeys<bfloat16>& packed,
                        const RowsAhead<bfloat16>& ahead, float* s) {
  const bfloat16* const k = packed.keys;
  const index_t keys = packed.count, pairs = (packed.width + 1) / 2;
  RowsAhead<bfloat16> first = ahead;  // the first rows alone prefetch
  for (index_t r = 0; r < rows; r += S::width, first = {}) {
    const bfloat16* from = q + 2 * r;
    float* to = s + r * logit_pitch;
    if constexpr (S::width == 16) {
      if (rows - r <= 4) {
        decode_pair_logits_rows<S, P, 4, 4>(from, parts, k, keys, pairs, first, to);
      } else if (rows - r <= 8) {
        decode_pair_logits_rows<S, P, 8, 2>(from, parts, k, keys, pairs, first, to);
      } else {
        decode_pair_logits_rows<S, P, 16, 1>(from, parts, k, keys, pairs, first, to);
      }
    } else {
      decode_pair_logits_rows<S, P, static_cast<int>(S::width), 1>(from, parts, k, keys, pairs, first, to);
    }
  }
}

/// Computes weights as pair_weights does, with the same bits: the weights of a query are added in the same order. 8
/// rows fill the vectors: a vector of weights holds two pairs of keys.
template <class S, class P>
TileChange decode_pair_weights(const float* s, index_t keys, index_t rows, const TileState<float>& state,
                               bfloat16* weights) {
  using V = typename S::V;
  V largest[2] = {S::set(0), S::set(0)};  // of rows 0 to 7, of rows 8 to 15
  auto nan = S::none();
  for (index_t r = 0; r < rows; r += 8) {
    V top[8];
    SSMAX_UNROLL
    for (int i = 0; i < 8; ++i) {
      const float* row = s + (r + i) * logit_pitch;
      top[i] = S::set(-std::numeric_limits<float>::infinity());
      for (index_t key = 0; key < keys; key += 2 * S::width) {
        const V a = S::load(row + key), b = S::load(row + key + S::width);
        nan = S::either(nan, S::unordered(a, b));
        top[i] = S::max(top[i], S::max(a, b));
      }
    }
    largest[r / 8] = P::row_maxima(top);
  }
  const V multiplier = pair_multiplier<S>(state, 0), before = S::load(state.shift),
          raised = S::max(before, S::mul(P::first_halves(largest[0], largest[1]), multiplier)),
          base = pair_base<S>(raised);
  nan = S::either(
      nan, S::either(S::unordered(raised, raised), S::not_less(S::abs(base), S::set(largest_shift<float>))));
  if (S::any(nan)) return TileChange::irregular;

  alignas(64) float multipliers[S::width], back[S::width];
  S::store(multipliers, multiplier);
  S::store(back, S::sub(S::set(0), base));
  const typename P::V ones = P::ones();
  V sums[2] = {S::set(0), S::set(0)};
  for (index_t r = 0; r < rows; r += 8, weights += 8 * logit_pitch) {
    for (index_t key = 0; key < keys; key += 2 * S::width) {
      typename P::V pair[8];
      SSMAX_UNROLL
      for (int i = 0; i < 8; ++i) {
        const float* row = s + (r + i) * logit_pitch + key;
        const V factor = S::set(multipliers[r + i]), offset = S::set(back[r + i]);
        V x[2] = {S::fma(S::load(row), factor, offset), S::fma(S::load(row + S::width), factor, offset)};
        pair[i] = P::exp2_neighbours(x);
      }
      P::transpose_neighbours(pair);
      SSMAX_UNROLL
      for (int i = 0; i < 8; ++i) {
        sums[r / 8] = P::dot(pair[i], ones, sums[r / 8]);
        P::store(weights + key * 8 + i * 32, pair[i]);
      }
    }
  }
  V factor = S::sub(before, base);
  Exp2<S>(S::set(0)).template apply<1>(&factor);
  S::store(state.factor, factor);
  S::store(state.shift, raised);
  S::store(state.sum, S::fma(S::load(state.sum), factor, P::add_halves(sums[0], sums[1])));
  return S::any(S::less(before, raised)) ? TileChange::raised : TileChange::none;
}

/// Adds weights · values to 2 · width · vectors channels of o from `first` on. Channels from v.width on are missing.
template <class S, class P, int rows, int vectors, bool prefetches>
void decode_pair_values_block(const bfloat16* weights, index_t pair_step, const FoundRows<bfloat16>& v,
                              index_t first, StridedRows<float> o) {
  const index_t left = v.width - first, end = first + vectors * 2 * S::width,
                last_ahead = end < v.width ? end : v.ahead.size;
  typename S::V sum[rows][2 * vectors];
  SSMAX_UNROLL
  for (int i = 0; i < rows; ++i) {
    SSMAX_UNROLL
    for (int j = 0; j < 2 * vectors; ++j) sum[i][j] = S::load(o[i] + first + j * S::width);
  }
  for (index_t key = 0; key < v.count; key += 2, weights += pair_step) {
    const bfloat16 *low = v.rows[key] + first, *high = v.rows[key + 1] + first;
    if constexpr (prefetches) prefetch_rows(v.ahead, key, key + 2, first, last_ahead);
    typename P::V x[2 * vectors];
    SSMAX_UNROLL
    for (int j = 0; j < vectors; ++j) {
      const index_t c = j * 2 * S::width;
      const typename P::V a = load_pairs_up_to<S, P>(low + c, left - c);
      const typename P::V b = load_pairs_up_to<S, P>(high + c, left - c);
      x[2 * j] = P::interleave_low(a, b);
      x[2 * j + 1] = P::interleave_high(a, b);
    }
    SSMAX_UNROLL
    for (int i = 0; i < rows; ++i) {
      const typename P::V weight = P::set(weights + 2 * i);
      SSMAX_UNROLL
      for (int j = 0; j < 2 * vectors; ++j) sum[i][j] = P::dot(x[j], weight, sum[i][j]);
    }
  }
  SSMAX_UNROLL
  for (int i = 0; i < rows; ++i) {
    SSMAX_UNROLL
    for (int j = 0; j < 2 * vectors; ++j) S::store(o[i] + first + j * S::width, sum[i][j]);
  }
}

template <class S, class P, int rows, int vectors>
void decode_pair_values_rows(const bfloat16* weights, index_t pair_step, const FoundRows<bfloat16>& v,
                             StridedRows<float> o) {
  index_t c = 0;
  const auto step = [&]<int count>(std::integral_constant<int, count>) {
    const auto compute = v.ahead.rows == nullptr ? decode_pair_values_block<S, P, rows, count, false>
                                                 : decode_pair_values_block<S, P, rows, count, true>;
    compute(weights, pair_step, v, c, o);
    c += count * 2 * S::width;
  };
  while (c + vectors * 2 * S::width <= v.width) step(std::integral_constant<int, vectors>{});
  while (c < v.width) step(std::integral_constant<int, 1>{});
}

/// Computes o[rows] += weightsᵀ · v[keys].
template <class S, class P>
void decode_pair_accumulate(const PairWeights<bfloat16>& weights, index_t rows, const FoundRows<bfloat16>& v,
                            StridedRows<float> o) {
  FoundRows<bfloat16> values = v;
  for (index_t r = 0; r < rows; r += 8, values.ahead = {}) {  // the first rows alone prefetch
    const bfloat16* from = weights.at(0, r);
    if (rows - r > 4) {
      decode_pair_values_rows<S, P, 8, 1>(from, weights.pair_step, values, {o[r], o.stride});
    } else {
      decode_pair_values_rows<S, P, 4, 2>(from, weights.pair_step, values, {o[r], o.stride});
    }
  }
}

/// Computes out[n] = out · factor + in · in_factor.
template <class S>
void decode_pair_merge(float* out, const float* in, index_t n, float factor, float in_factor) {
  const typename S::V f = S::set(factor), g = S::set(in_factor);
  for (index_t c = 0; c < n; c += S::width)
    S::store(out + c, S::fma(S::load(out + c), f, S::mul(S::load(in + c), g)));
}

template <class S, class P>
constexpr auto decode_pair_weights_if_wide() -> decltype(&decode_pair_weights<S, P>) {
  if constexpr (S::width == 16) return decode_pair_weights<S, P>;
  return nullptr;
}

template <class T>
struct KernelTable<PairDecodeKernels<T, bfloat16>> {
  using S = Simd<T>;
  using P = Pairs;
  static constexpr PairDecodeKernels<T, bfloat16> value{.pack_keys = decode_pack_keys<S, P>,
                                                        .logits = decode_pair_logits<S, P>,
                                                        .weights = decode_pair_weights_if_wide<S, P>(),
                                                        .accumulate = decode_pair_accumulate<S, P>,
                                                        .merge = decode_pair_merge<S>};
};
