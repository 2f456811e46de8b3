// Implements attention's tiles in backward by pair dots of bfloat16. Included once for each extension that
// has pair dots.
//
// | product | sums over | operands |
// |---|---|---|
// | dK, dV | queries | weights and gradients in rows [key][query], q and dout in pairs [query/2][channel][2] |
// | dQ | keys | gradients in pairs of keys, as the weights of prefill_pairs.inl |
//
// The sums for parameters add floats before they are rounded.

/// Rounds the weights w and gradients u of two keys, and adds Σ u·z to `sum`.
template <class S, class P>
SSMAX_INLINE void pair_round_step(const typename S::V (&w)[2], const typename S::V (&u)[2], const float* z,
                                  index_t key, typename S::V factor,
                                  const RoundedGradients<float, bfloat16>& to, typename S::V& sum) {
  typename S::V gradient[2];
  SSMAX_UNROLL
  for (int i = 0; i < 2; ++i) {
    const auto counts = P::not_zero(u[i]);
    if (to.dc != nullptr) {
      sum = S::add(sum, S::keep(counts, S::mul(u[i], S::load(z + (key + i) * group_width<S>))));
    }
    gradient[i] = S::keep(counts, S::mul(u[i], factor));
  }
  bfloat16 *weights = to.weights + key * to.stride, *gradients = to.gradients + key * to.stride;
  P::round_rows(w[0], w[1], weights, weights + to.stride);
  P::store(to.pairs + key * group_width<S>,
           P::round_rows(gradient[0], gradient[1], gradients, gradients + to.stride));
}

template <class S, class P>
void pair_round(const float* w, const float* u, const float* z, index_t keys,
                const RoundedGradients<float, bfloat16>& to) {
  using V = typename S::V;
  const V factor = S::load(to.factor);
  V sum = S::set(0);
  for (index_t key = 0; key < keys; key += 2) {
    const index_t at = key * group_width<S>, next = at + group_width<S>;
    pair_round_step<S, P>({S::load(w + at), S::load(w + next)}, {S::load(u + at), S::load(u + next)}, z, key,
                          factor, to, sum);
  }
  if (to.dc != nullptr) S::store(to.dc, sum);
}

/// Computes w = 2^(s - shift) and u = w·(dp - delta) for four keys. w contains s on entry. If w is 0, as for
/// masked keys, u is 0 whatever dp is.
template <class S, class P>
SSMAX_INLINE void pair_gradient_step(const float* dp, typename S::V shift, typename S::V delta,
                                     typename S::V (&w)[4], typename S::V (&u)[4]) {
  SSMAX_UNROLL
  for (int i = 0; i < 4; ++i) w[i] = S::sub(w[i], shift);
  P::template exp2_float<4>(w);
  SSMAX_UNROLL
  for (int i = 0; i < 4; ++i) {
    u[i] = S::mul(w[i], S::sub(S::load(dp + i * group_width<S>), delta));
    u[i] = S::keep(S::less(S::set(0), w[i]), u[i]);
  }
}

template <class S, class P>
void pair_gradients(float* s, float* dp, index_t keys, const float* shift, const float* delta) {
  const typename S::V top = S::load(shift), mean = S::load(delta);
  for (index_t at = 0; at < keys * group_width<S>; at += 4 * group_width<S>) {
    typename S::V w[4], u[4];
    SSMAX_UNROLL
    for (int i = 0; i < 4; ++i) w[i] = S::load(s + at + i * group_width<S>);
    pair_gradient_step<S, P>(dp + at, top, mean, w, u);
    SSMAX_UNROLL
    for (int i = 0; i < 4; ++i) {
      S::store(s + at + i * group_width<S>, w[i]);
      S::store(dp + at + i * group_width<S>, u[i]);
    }
  }
}

template <class S, class P>
void pair_form(const float* z, const float* dp, index_t keys, const PlainLogits<float>& logits,
               const RoundedGradients<float, bfloat16>& to) {
  using V = typename S::V;
  const V multiplier = S::load(logits.multiplier), back = S::sub(S::set(0), S::load(logits.offset)),
          shift = S::load(logits.shift), delta = S::load(logits.delta), factor = S::load(to.factor);
  V sum = S::set(0);
  for (index_t key = 0; key < keys; key += 4) {
    const index_t at = key * group_width<S>;
    V w[4], u[4];
    SSMAX_UNROLL
    for (int i = 0; i < 4; ++i) w[i] = S::fma(S::load(z + at + i * group_width<S>), multiplier, back);
    pair_gradient_step<S, P>(dp + at, shift, delta, w, u);
    pair_round_step<S, P>({w[0], w[1]}, {u[0], u[1]}, z, key, factor, to, sum);
    pair_round_step<S, P>({w[2], w[3]}, {u[2], u[3]}, z, key + 2, factor, to, sum);
  }
  if (to.dc != nullptr) S::store(to.dc, sum);
}

/// Computes pair_add_product for `vectors` vectors of channels.
template <class S, class P, int vectors>
SSMAX_INLINE void add_pair_columns(const bfloat16* a, index_t a_stride, index_t lanes, const bfloat16* b,
                                   index_t pitch, float* out) {
  typename S::V sum[S::tile_rows][vectors];
  load_sums<S>({out, pitch}, sum);
  pair_product<S, P, vectors>(a, a_stride, 2, b, 2 * pitch, lanes / 2, sum);
  store_sums<S>(sum, {out, pitch});
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
  using S = Simd<T>;
  using P = Pairs;
  static constexpr RoundedBackwardKernels<T, bfloat16> value{
      .gradients = pair_gradients<S, P>,
      .round = pair_round<S, P>,
      .form = pair_form<S, P>,
      .add_product = pair_add_product<S, P>,
      .pair_rows = pair_rows<S, P>,
  };
};
