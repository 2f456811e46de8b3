// Implements attention's tiles in backward: the gradients of the logits, and the products that sum over
// queries (dK and dV). The other three products (logits, dout·Vᵀ, dQ) use the kernels of prefill.inl.
// Included once per target.

/// Replaces `count` vectors of s by w = 2^(s - shift), and of dp by u = w·(dp - delta). If w is 0, as for
/// masked keys, u is 0 whatever dp is: dp may come from numbers that are masked.
template <class S, int count>
SSMAX_INLINE void gradient_step(const Exp2<S>& power, typename S::V delta, typename S::Value* s,
                                typename S::Value* dp) {
  using V = typename S::V;
  V w[count];
  SSMAX_UNROLL
  for (int i = 0; i < count; ++i) w[i] = S::load(s + i * group_width<S>);
  power.template apply<count>(w);
  SSMAX_UNROLL
  for (int i = 0; i < count; ++i) {
    const V u = S::mul(w[i], S::sub(S::load(dp + i * group_width<S>), delta));
    S::store(s + i * group_width<S>, w[i]);
    S::store(dp + i * group_width<S>, S::keep(S::less(S::set(0), w[i]), u));
  }
}

/// Computes PrefillBackwardKernels::gradients for one vector of queries.
template <class S>
void tile_gradients(typename S::Value* s, typename S::Value* dp, index_t keys, const typename S::Value* shift,
                    const typename S::Value* delta) {
  const Exp2<S> power(S::load(shift));
  const typename S::V mean = S::load(delta);
  index_t key = 0;
  for (; key + 4 <= keys; key += 4) {
    gradient_step<S, 4>(power, mean, s + key * group_width<S>, dp + key * group_width<S>);
  }
  for (; key < keys; ++key) {
    gradient_step<S, 1>(power, mean, s + key * group_width<S>, dp + key * group_width<S>);
  }
}

/// Computes, for one vector of queries with a score function, dc = Σ u·z and then u = c·u·slope. Exception: a
/// u of 0 stays 0 and is not part of dc, whatever the other factors are.
template <class S>
void tile_score_gradients(typename S::Value* u, index_t keys, const typename S::Value* z,
                          const typename S::Value* slope, const typename S::Value* c, typename S::Value* dc) {
  using V = typename S::V;
  const V multiplier = S::load(c), zero = S::set(0);
  V sum = zero;
  for (index_t at = 0; at < keys * group_width<S>; at += group_width<S>) {
    const V x = S::load(u + at);
    const auto counts = S::either(S::less(zero, S::abs(x)), S::unordered(x, x));
    sum = S::add(sum, S::keep(counts, S::mul(x, S::load(z + at))));
    S::store(u + at, S::keep(counts, S::mul(S::mul(x, multiplier), S::load(slope + at))));
  }
  S::store(dc, sum);
}

/// Computes out[keys][pitch] += a[keys][lanes] · b[lanes][pitch] for `vectors` vectors of channels.
template <class S, int vectors>
SSMAX_INLINE void add_product_columns(const typename S::Value* a, index_t lanes, const typename S::Value* b,
                                      index_t pitch, typename S::Value* out) {
  typename S::V sum[S::tile_rows][vectors];
  load_sums<S>({out, pitch}, sum);
  tile_product<S, vectors, false>(a, group_width<S>, b, pitch, lanes, sum);
  store_sums<S>(sum, {out, pitch});
}

template <class S>
void tile_add_product(const typename S::Value* a, index_t lanes, index_t keys, const typename S::Value* b,
                      index_t pitch, typename S::Value* out) {
  static_assert(S::tile_vectors == 3);
  constexpr index_t w = S::width;
  for (index_t key = 0; key < keys; key += S::tile_rows) {
    const typename S::Value* rows = a + key * group_width<S>;
    typename S::Value* to = out + key * pitch;
    index_t c = 0;
    // Divides four vectors into two and two. A single vector has 8 chains, which do not fill two FMA ports.
    for (; c + 3 * w <= pitch && c + 4 * w != pitch; c += 3 * w) {
      add_product_columns<S, 3>(rows, lanes, b + c, pitch, to + c);
    }
    for (; c + 2 * w <= pitch; c += 2 * w) add_product_columns<S, 2>(rows, lanes, b + c, pitch, to + c);
    if (c < pitch) add_product_columns<S, 1>(rows, lanes, b + c, pitch, to + c);
  }
}

/// Writes out[r][c] = in[r][c] · factor[r], and 0 from `columns` to `pitch`. pitch must be whole vectors.
template <class S>
void tile_scale_rows(const typename S::Value* const* in, index_t rows, index_t columns,
                     const typename S::Value* factor, typename S::Value* out, index_t pitch) {
  for (index_t r = 0; r < rows; ++r, out += pitch) {
    const typename S::V f = S::set(factor[r]);
    for (index_t c = 0; c < pitch; c += S::width) {
      S::store(out + c, S::mul(load_up_to<S>(in[r] + c, columns - c, 0), f));
    }
  }
}

/// Computes out = in, or out += in.
template <class S, bool adds>
void tile_copy_rows(const typename S::Value* in, index_t in_stride, index_t rows, index_t columns,
                    typename S::Value* out, index_t out_stride) {
  for (index_t r = 0; r < rows; ++r, in += in_stride, out += out_stride) {
    for (index_t c = 0; c < columns; c += S::width) {
      typename S::V x = load_up_to<S>(in + c, columns - c, 0);
      if constexpr (adds) x = S::add(x, load_up_to<S>(out + c, columns - c, 0));
      store_up_to<S>(out + c, x, columns - c);
    }
  }
}

/// The empty table of targets without a bf16 path.
template <class T>
struct KernelTable<RoundedBackwardKernels<T, bfloat16>> {
  static constexpr RoundedBackwardKernels<T, bfloat16> value{};
};

template <class T>
struct KernelTable<PrefillBackwardKernels<T>> {
  using S = Simd<T>;
  static constexpr PrefillBackwardKernels<T> value{
      .gradients = tile_gradients<S>,
      .score_gradients = tile_score_gradients<S>,
      .add_product = tile_add_product<S>,
      .scale_rows = tile_scale_rows<S>,
      .copy_rows = tile_copy_rows<S, false>,
      .add_rows = tile_copy_rows<S, true>,
  };
};
