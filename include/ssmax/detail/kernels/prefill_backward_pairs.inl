// Attention's tiles, backward, in pair dots of bfloat16. Included once for each extension that has them.
//
// dK and dV sum over queries: weights and gradients lie in rows, [key][query], q and dout in pairs of queries,
// [query/2][channel][2]. dQ sums over keys: gradients lie in pairs of keys as well, as prefill_pairs.inl's weights.
// What is summed up for parameters is taken from floats, before they are rounded.

template <class S>
void pair_place(const float* z, index_t keys, const float* factor, const float* offset, float* s) {
  const typename S::V f = S::load(factor), back = S::sub(S::set(0), S::load(offset));
  for (index_t at = 0; at < keys * group_width<S>; at += group_width<S>) {
    S::store(s + at, S::fma(S::load(z + at), f, back));
  }
}

/// NaN with one payload: rounded by its bits, another could become 0.
template <class S>
SSMAX_INLINE typename S::V plain_nan(typename S::V x) {
  return S::select(S::unordered(x, x), S::set(std::numeric_limits<float>::quiet_NaN()), x);
}

template <class S, class P>
void pair_round(const float* w, const float* u, const float* z, index_t keys,
                const RoundedGradients<float, bfloat16>& to) {
  using V = typename S::V;
  const V factor = S::load(to.factor), zero = S::set(0);
  V sum = zero;
  for (index_t key = 0; key < keys; key += 2) {
    V weight[2], gradient[2];
    SSMAX_UNROLL
    for (int i = 0; i < 2; ++i) {
      const index_t at = (key + i) * group_width<S>;
      const V x = S::load(u + at);
      const auto counts = S::either(S::less(zero, S::abs(x)), S::unordered(x, x));
      if (to.dc != nullptr) sum = S::add(sum, S::keep(counts, S::mul(x, S::load(z + at))));
      weight[i] = plain_nan<S>(S::load(w + at));
      gradient[i] = plain_nan<S>(S::keep(counts, S::mul(x, factor)));
    }
    const typename P::V gradients = P::round(gradient[0], gradient[1]);
    bfloat16* row = to.gradients + key * to.stride;
    P::split(P::round(weight[0], weight[1]), to.weights + key * to.stride,
             to.weights + (key + 1) * to.stride);
    P::split(gradients, row, row + to.stride);
    P::store(to.pairs + key * group_width<S>, gradients);
  }
  if (to.dc != nullptr) S::store(to.dc, sum);
}

/// `vectors` vectors of channels.
template <class S, class P, int vectors>
SSMAX_INLINE void add_pair_columns(const bfloat16* a, index_t a_stride, index_t lanes, const bfloat16* b,
                                   index_t pitch, float* out) {
  typename S::V sum[S::tile_rows][vectors];
  SSMAX_UNROLL
  for (int r = 0; r < S::tile_rows; ++r) {
    SSMAX_UNROLL
    for (int v = 0; v < vectors; ++v) sum[r][v] = S::load(out + r * pitch + v * S::width);
  }
  pair_product<S, P, vectors>(a, a_stride, 2, b, 2 * pitch, lanes / 2, sum);
  SSMAX_UNROLL
  for (int r = 0; r < S::tile_rows; ++r) {
    SSMAX_UNROLL
    for (int v = 0; v < vectors; ++v) S::store(out + r * pitch + v * S::width, sum[r][v]);
  }
}

template <class S, class P>
void pair_add_product(const bfloat16* a, index_t a_stride, index_t lanes, index_t keys, const bfloat16* b,
                      index_t pitch, float* out) {
  constexpr index_t w = S::width;
  for (index_t key = 0; key < keys; key += S::tile_rows, a += S::tile_rows * a_stride) {
    float* to = out + key * pitch;
    index_t c = 0;
    for (; c + 3 * w <= pitch && c + 4 * w != pitch; c += 3 * w)
      add_pair_columns<S, P, 3>(a, a_stride, lanes, b + 2 * c, pitch, to + c);
    for (; c + 2 * w <= pitch; c += 2 * w)
      add_pair_columns<S, P, 2>(a, a_stride, lanes, b + 2 * c, pitch, to + c);
    if (c < pitch) add_pair_columns<S, P, 1>(a, a_stride, lanes, b + 2 * c, pitch, to + c);
  }
}

template <class S, class P>
void pair_rows(const bfloat16* low, const bfloat16* high, index_t columns, bfloat16* out, index_t pitch) {
  for (index_t c = 0; c < pitch; c += S::width) {
    P::store(out + 2 * c, interleave_up_to<S, P>(low + c, high + c, columns - c));
  }
}

template <class T>
struct KernelTable<RoundedBackwardKernels<T, bfloat16>> {
  using S = Lanes<T>;
  using P = Pairs;
  static constexpr RoundedBackwardKernels<T, bfloat16> value{
      .place = pair_place<S>,
      .round = pair_round<S, P>,
      .add_product = pair_add_product<S, P>,
      .pair_rows = pair_rows<S, P>,
  };
};
