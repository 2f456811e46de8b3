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

/// Prefetches the row of `count` numbers that lies `ahead` bytes after p, unless `ahead` is 0. The row may lie past
/// the end. Prefetches between products bring more than many in a row.
SSMAX_INLINE void prefetch_row_ahead(const bfloat16* p, index_t count, index_t ahead) {
  if (ahead == 0) return;
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(p) + static_cast<std::uintptr_t>(ahead),
                       end = begin + static_cast<std::uintptr_t>(count) * sizeof(bfloat16);
  for (std::uintptr_t line = begin / 64 * 64; line < end; line += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(line));
}

/// Packs the rows k[keys] of d channels. A missing channel of the last pair is 0. `keys` is a multiple of
/// packed_keys.
template <class S, class P>
void decode_pack_keys(const bfloat16* const* k, index_t keys, index_t d, index_t ahead, bfloat16* packed) {
  constexpr int width = static_cast<int>(S::width);
  const index_t pairs = (d + 1) / 2;
  for (index_t key = 0; key < keys; key += S::width) {
    for (int i = 0; i < width; ++i) prefetch_row_ahead(k[key + i], d, ahead);
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

/// Writes s[key][lane] for `blocks` blocks of packed keys and `rows` queries. A query is `parts` rows of q, whose
/// products are added one after the other.
template <class S, class P, int rows, int blocks>
SSMAX_INLINE void decode_pair_logits_block(const bfloat16* q, index_t pitch, index_t parts, const bfloat16* k,
                                           index_t pairs, float* s) {
  constexpr int width = static_cast<int>(S::width);
  constexpr int in_block = static_cast<int>(packed_keys) / width, vectors = blocks * in_block;
  const index_t block = pairs * 2 * packed_keys;
  typename S::V sum[rows][vectors];
  SSMAX_UNROLL
  for (int i = 0; i < rows; ++i) {
    SSMAX_UNROLL
    for (int j = 0; j < vectors; ++j) sum[i][j] = S::set(0);
  }
  for (index_t part = 0; part < parts; ++part, q += pitch) {
    for (index_t pair = 0; pair < pairs; ++pair) {
      typename P::V y[vectors];
      SSMAX_UNROLL
      for (int j = 0; j < vectors; ++j) {
        y[j] = P::load(k + j / in_block * block + pair * 2 * packed_keys + j % in_block * 2 * width);
      }
      SSMAX_UNROLL
      for (int i = 0; i < rows; ++i) {
        const typename P::V x = P::set(q + i * parts * pitch + 2 * pair);
        SSMAX_UNROLL
        for (int j = 0; j < vectors; ++j) sum[i][j] = P::dot(y[j], x, sum[i][j]);
      }
    }
  }
  SSMAX_UNROLL
  for (int j = 0; j < vectors; ++j) {
    typename S::V v[width];
    SSMAX_UNROLL
    for (int i = 0; i < width; ++i) v[i] = i < rows ? sum[i < rows ? i : 0][j] : S::set(0);
    transpose_block<S>(v);
    SSMAX_UNROLL
    for (int i = 0; i < width; ++i) {
      S::store(s + (index_t{j} * S::width + transposed_column<S>(i)) * group_width<S>, v[i]);
    }
  }
}

template <class S, class P, int rows, int blocks>
void decode_pair_logits_rows(const bfloat16* q, index_t pitch, index_t parts, const bfloat16* k, index_t keys,
                             index_t pairs, float* s) {
  index_t key = 0;
  const auto step = [&]<int count>(std::integral_constant<int, count>) {
    decode_pair_logits_block<S, P, rows, count>(q, pitch, parts, k + key * 2 * pairs, pairs,
                                                s + key * group_width<S>);
    key += count * packed_keys;
  };
  while (key + blocks * packed_keys <= keys) step(std::integral_constant<int, blocks>{});
  while (key < keys) step(std::integral_constant<int, 1>{});
}

/// Writes s[keys][·] = q[rows] · k[keys]ᵀ. The rows of q are padded with 0 to whole vectors of queries.
template <class S, class P>
void decode_pair_logits(const bfloat16* q, index_t pitch, index_t parts, index_t rows, const bfloat16* k,
                        index_t keys, index_t d, float* s) {
  const index_t pairs = (d + 1) / 2;
  for (index_t r = 0; r < rows; r += S::width) {
    const bfloat16* from = q + r * parts * pitch;
    if constexpr (S::width == 16) {
      if (rows - r <= 4) {
        decode_pair_logits_rows<S, P, 4, 4>(from, pitch, parts, k, keys, pairs, s + r);
      } else if (rows - r <= 8) {
        decode_pair_logits_rows<S, P, 8, 2>(from, pitch, parts, k, keys, pairs, s + r);
      } else {
        decode_pair_logits_rows<S, P, 16, 1>(from, pitch, parts, k, keys, pairs, s + r);
      }
    } else {
      decode_pair_logits_rows<S, P, static_cast<int>(S::width), 1>(from, pitch, parts, k, keys, pairs, s + r);
    }
  }
}

/// Adds weights · values to 2 · width · vectors channels of o, of which `left` exist.
template <class S, class P, int rows, int vectors>
SSMAX_INLINE void decode_pair_values_block(const bfloat16* weights, const bfloat16* const* v, index_t keys,
                                           index_t first, index_t left, index_t ahead, float* o,
                                           index_t pitch) {
  typename S::V sum[rows][2 * vectors];
  SSMAX_UNROLL
  for (int i = 0; i < rows; ++i) {
    SSMAX_UNROLL
    for (int j = 0; j < 2 * vectors; ++j) sum[i][j] = S::load(o + i * pitch + j * S::width);
  }
  for (index_t key = 0; key < keys; key += 2, weights += 2 * group_width<S>) {
    const bfloat16 *low = v[key] + first, *high = v[key + 1] + first;
    prefetch_row_ahead(low, left, ahead);
    prefetch_row_ahead(high, left, ahead);
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
    for (int j = 0; j < 2 * vectors; ++j) S::store(o + i * pitch + j * S::width, sum[i][j]);
  }
}

template <class S, class P, int rows, int vectors>
void decode_pair_values_rows(const bfloat16* weights, const bfloat16* const* v, index_t keys, index_t dv,
                             index_t ahead, float* o, index_t pitch) {
  constexpr index_t step = vectors * 2 * S::width;
  index_t c = 0;
  for (; c + step <= dv; c += step)
    decode_pair_values_block<S, P, rows, vectors>(weights, v, keys, c, step, ahead, o + c, pitch);
  for (; c < dv; c += 2 * S::width)
    decode_pair_values_block<S, P, rows, 1>(weights, v, keys, c, std::min(dv - c, 2 * S::width), ahead, o + c,
                                            pitch);
}

/// Computes o[rows] += weights[keys / 2][·][2]ᵀ · v[keys].
template <class S, class P>
void decode_pair_accumulate(const bfloat16* weights, index_t rows, const bfloat16* const* v, index_t keys,
                            index_t dv, index_t ahead, float* o, index_t pitch) {
  for (index_t r = 0; r < rows; r += 8, ahead = 0) {
    const bfloat16* from = weights + 2 * r;
    if (rows - r > 4) {
      decode_pair_values_rows<S, P, 8, 1>(from, v, keys, dv, ahead, o + r * pitch, pitch);
    } else {
      decode_pair_values_rows<S, P, 4, 2>(from, v, keys, dv, ahead, o + r * pitch, pitch);
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

template <class T>
struct KernelTable<PairDecodeKernels<T, bfloat16>> {
  using S = Simd<T>;
  using P = Pairs;
  static constexpr PairDecodeKernels<T, bfloat16> value{.pack_keys = decode_pack_keys<S, P>,
                                                        .logits = decode_pair_logits<S, P>,
                                                        .accumulate = decode_pair_accumulate<S, P>,
                                                        .merge = decode_pair_merge<S>};
};
