// Implements attention with few queries by pair dots of bfloat16. Included once for each extension that has
// pair dots.
//
// The code works like decode.inl, but the logits multiply pairs of channels and the values multiply pairs of
// keys. Two rows of V are separated into channels of even and of odd number. The sums of both are brought
// into order once, at the end. Operands are not widened: a product costs half the operations of a float
// product.

/// Loads at most a vector of pairs. Missing numbers are 0.
template <class S, class P>
SSMAX_INLINE typename P::V load_pairs_up_to(const bfloat16* p, index_t left) {
  return left >= 2 * S::width ? P::load(p) : P::load_part(p, left);
}

/// Computes sum[i·step + j] += q(i) · y for one vector of pairs of key j, at channel c.
template <class S, class P, int rows, int parts, int step>
SSMAX_INLINE void decode_pair_dots(const bfloat16* q, index_t q_pitch, typename P::V y, int j,
                                   typename S::V (&sum)[S::width]) {
  SSMAX_UNROLL
  for (int i = 0; i < rows * parts; ++i) {
    typename S::V& to = sum[i / parts * step + j];
    to = P::dot(P::load(q + i * q_pitch), y, to);
  }
}

/// Writes s[rows][·] = q[rows × d] · k[·][d] for width / rows keys at a time. q has `parts` parts, whose
/// products are added.
template <class S, class P, int rows, int parts>
void decode_pair_logits_rows(const bfloat16* q, index_t q_pitch, const bfloat16* k, index_t k_stride,
                             index_t keys, index_t d, float* s, index_t s_stride) {
  constexpr int step = static_cast<int>(S::width) / rows;
  const index_t whole = d / (2 * S::width) * (2 * S::width);
  for (index_t first = 0; first < keys; first += step) {
    const index_t count = std::min<index_t>(step, keys - first);
    typename S::V sum[S::width];
    SSMAX_UNROLL
    for (int i = 0; i < rows * step; ++i) sum[i] = S::set(0);
    SSMAX_UNROLL
    for (int j = 0; j < step; ++j) {
      const bfloat16* key = k + (first + std::min<index_t>(j, count - 1)) * k_stride;
      for (index_t c = 0; c < whole; c += 2 * S::width) {
        decode_pair_dots<S, P, rows, parts, step>(q + c, q_pitch, P::load(key + c), j, sum);
      }
      if (whole < d) {
        const typename P::V y = P::load_part(key + whole, d - whole);
        decode_pair_dots<S, P, rows, parts, step>(q + whole, q_pitch, y, j, sum);
      }
    }
    float lanes[S::width];
    S::store(lanes, fold<S, Sum>(sum));
    for (int i = 0; i < rows; ++i) {
      for (index_t j = 0; j < count; ++j) s[i * s_stride + first + j] = lanes[index_t{i} * step + j];
    }
  }
}

template <class S, class P, int parts>
void decode_pair_logits_parts(const bfloat16* q, index_t q_pitch, index_t rows, const bfloat16* k,
                              index_t k_stride, index_t keys, index_t d, float* s, index_t s_stride) {
  index_t r = 0;
  for (; r + 4 <= rows; r += 4)
    decode_pair_logits_rows<S, P, 4, parts>(q + r * parts * q_pitch, q_pitch, k, k_stride, keys, d,
                                            s + r * s_stride, s_stride);
  for (; r + 2 <= rows; r += 2)
    decode_pair_logits_rows<S, P, 2, parts>(q + r * parts * q_pitch, q_pitch, k, k_stride, keys, d,
                                            s + r * s_stride, s_stride);
  for (; r < rows; ++r)
    decode_pair_logits_rows<S, P, 1, parts>(q + r * parts * q_pitch, q_pitch, k, k_stride, keys, d,
                                            s + r * s_stride, s_stride);
}

template <class S, class P>
void decode_pair_logits(const bfloat16* q, index_t q_pitch, index_t parts, index_t rows, const bfloat16* k,
                        index_t k_stride, index_t keys, index_t d, float* s, index_t s_stride) {
  if (parts == 1) {
    decode_pair_logits_parts<S, P, 1>(q, q_pitch, rows, k, k_stride, keys, d, s, s_stride);
  } else {
    decode_pair_logits_parts<S, P, 2>(q, q_pitch, rows, k, k_stride, keys, d, s, s_stride);
  }
}

/// Adds weights · values of two keys to the sums of channels of even and of odd number. `left` is the number
/// of channels in the rows.
template <class S, class P, int rows, int vectors>
SSMAX_INLINE void decode_pair_step(const bfloat16* weights, index_t stride, const bfloat16* low,
                                   const bfloat16* high, index_t left, typename S::V (&even)[rows][vectors],
                                   typename S::V (&odd)[rows][vectors]) {
  typename P::V x[vectors], y[vectors];
  SSMAX_UNROLL
  for (int j = 0; j < vectors; ++j) {
    const index_t c = j * 2 * S::width;
    const typename P::V a = load_pairs_up_to<S, P>(low + c, left - c);
    const typename P::V b = load_pairs_up_to<S, P>(high + c, left - c);
    x[j] = P::even(a, b);
    y[j] = P::odd(a, b);
  }
  SSMAX_UNROLL
  for (int i = 0; i < rows; ++i) {
    const typename P::V weight = P::set(weights + i * stride);
    SSMAX_UNROLL
    for (int j = 0; j < vectors; ++j) {
      even[i][j] = P::dot(weight, x[j], even[i][j]);
      odd[i][j] = P::dot(weight, y[j], odd[i][j]);
    }
  }
}

/// Adds the first `left` of 2 · width · vectors channels of weights · values to o.
template <class S, class P, int rows, int vectors>
SSMAX_INLINE void decode_pair_block(const bfloat16* weights, index_t stride, index_t keys, const bfloat16* v,
                                    index_t v_stride, index_t left, float* o, index_t o_stride) {
  typename S::V even[rows][vectors], odd[rows][vectors];
  SSMAX_UNROLL
  for (int i = 0; i < rows; ++i) {
    SSMAX_UNROLL
    for (int j = 0; j < vectors; ++j) even[i][j] = odd[i][j] = S::set(0);
  }
  for (index_t key = 0; key + 2 <= keys; key += 2, v += 2 * v_stride) {
    decode_pair_step<S, P, rows, vectors>(weights + key, stride, v, v + v_stride, left, even, odd);
  }
  if (keys % 2 == 1) {
    bfloat16 last[rows][2] = {};
    for (int i = 0; i < rows; ++i) last[i][0] = weights[i * stride + keys - 1];
    decode_pair_step<S, P, rows, vectors>(last[0], 2, v, v, left, even, odd);
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < vectors; ++j) {
      float sums[2][S::width];
      S::store(sums[0], even[i][j]);
      S::store(sums[1], odd[i][j]);
      const index_t first = j * 2 * S::width, count = std::min(2 * S::width, left - first);
      for (index_t c = 0; c < count; ++c) o[i * o_stride + first + c] += sums[c % 2][c / 2];
    }
  }
}

template <class S, class P, int rows>
void decode_pair_accumulate_rows(const bfloat16* weights, index_t stride, index_t keys, const bfloat16* v,
                                 index_t v_stride, index_t dv, float* o, index_t o_stride) {
  constexpr index_t w = 2 * S::width;
  index_t c = 0;
  if constexpr (rows <= 2) {
    for (; c + 4 * w <= dv; c += 4 * w)
      decode_pair_block<S, P, rows, 4>(weights, stride, keys, v + c, v_stride, 4 * w, o + c, o_stride);
  }
  for (; c + 2 * w <= dv; c += 2 * w)
    decode_pair_block<S, P, rows, 2>(weights, stride, keys, v + c, v_stride, 2 * w, o + c, o_stride);
  for (; c + w <= dv; c += w)
    decode_pair_block<S, P, rows, 1>(weights, stride, keys, v + c, v_stride, w, o + c, o_stride);
  if (c < dv)
    decode_pair_block<S, P, rows, 1>(weights, stride, keys, v + c, v_stride, dv - c, o + c, o_stride);
}

template <class S, class P>
void decode_pair_accumulate(const bfloat16* weights, index_t stride, index_t rows, index_t keys,
                            const bfloat16* v, index_t v_stride, index_t dv, float* o, index_t o_stride) {
  index_t r = 0;
  for (; dv <= 4 * S::width && r + 4 <= rows; r += 4)
    decode_pair_accumulate_rows<S, P, 4>(weights + r * stride, stride, keys, v, v_stride, dv,
                                         o + r * o_stride, o_stride);
  for (; r + 2 <= rows; r += 2)
    decode_pair_accumulate_rows<S, P, 2>(weights + r * stride, stride, keys, v, v_stride, dv,
                                         o + r * o_stride, o_stride);
  for (; r < rows; ++r)
    decode_pair_accumulate_rows<S, P, 1>(weights + r * stride, stride, keys, v, v_stride, dv,
                                         o + r * o_stride, o_stride);
}

template <class T>
struct KernelTable<PairDecodeKernels<T, bfloat16>> {
  using S = Simd<T>;
  using P = Pairs;
  static constexpr PairDecodeKernels<T, bfloat16> value{.logits = decode_pair_logits<S, P>,
                                                        .accumulate = decode_pair_accumulate<S, P>};
};
