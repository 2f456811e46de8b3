// Implements the kernels of the rotary embedding. Included once per target. A pair of vectors takes four
// loads, two multiplications, two FMAs and two stores. So loads and stores bound the speed.

/// Computes (a, b) -> (a·cos - b·sin, b·cos + a·sin), or the rotation by the opposite angle.
template <class S, bool inverse>
SSMAX_INLINE void rotate_pair(typename S::V& a, typename S::V& b, typename S::V cosine, typename S::V sine) {
  const typename S::V from_a = S::mul(a, sine), from_b = S::mul(b, sine);
  a = inverse ? S::fma(a, cosine, from_b) : S::sub(S::mul(a, cosine), from_b);
  b = inverse ? S::sub(S::mul(b, cosine), from_a) : S::fma(b, cosine, from_a);
}

template <class S, bool inverse>
SSMAX_INLINE void rotate_half_split_rows(StridedRows<const typename S::Value> from,
                                         StridedRows<typename S::Value> to, index_t rows,
                                         const Angles<typename S::Value>& by) {
  using T = typename S::Value;
  using V = typename S::V;
  constexpr index_t w = S::width;
  const index_t half = by.half, stride = by.stride;
  const T *in = from.first, *cosine = by.cosine, *sine = by.sine;
  T* out = to.first;
  for (index_t r = 0; r < rows; ++r) {
    index_t i = 0;
    for (; i + w <= half; i += w) {
      V a = S::load(in + i), b = S::load(in + half + i);
      rotate_pair<S, inverse>(a, b, S::load(cosine + i), S::load(sine + i));
      S::store(out + i, a);
      S::store(out + half + i, b);
    }
    if (i < half) {
      const index_t count = half - i;
      V a = S::load_part(in + i, count, T{0}), b = S::load_part(in + half + i, count, T{0});
      rotate_pair<S, inverse>(a, b, S::load_part(cosine + i, count, T{0}),
                              S::load_part(sine + i, count, T{0}));
      S::store_part(out + i, a, count);
      S::store_part(out + half + i, b, count);
    }
    in += from.stride;
    out += to.stride;
    cosine += stride;
    sine += stride;
  }
}

template <class S>
void rotate_half_split(StridedRows<const typename S::Value> in, StridedRows<typename S::Value> out,
                       index_t rows, const Angles<typename S::Value>& by) {
  if (by.inverse) return rotate_half_split_rows<S, true>(in, out, rows, by);
  rotate_half_split_rows<S, false>(in, out, rows, by);
}

/// Rotates neighbours. A swap brings the partner of each lane, and its sine carries the sign.
template <class S, bool inverse>
SSMAX_INLINE typename S::V rotate_neighbours(typename S::V x, typename S::V cosine, typename S::V sine) {
  const typename S::V partner = S::mul(S::template swap<1>(x), sine);
  const typename S::V own = S::mul(x, cosine);
  return inverse ? S::sub(own, partner) : S::add(own, partner);
}

template <class S, bool inverse>
SSMAX_INLINE void rotate_interleaved_rows(StridedRows<const typename S::Value> from,
                                          StridedRows<typename S::Value> to, index_t rows,
                                          const Angles<typename S::Value>& by) {
  using T = typename S::Value;
  using V = typename S::V;
  constexpr index_t w = S::width;
  const index_t width = 2 * by.half, stride = by.stride;
  const T *in = from.first, *cosine = by.cosine, *sine = by.sine;
  T* out = to.first;
  for (index_t r = 0; r < rows; ++r) {
    index_t i = 0;
    for (; i + w <= width; i += w) {
      S::store(out + i,
               rotate_neighbours<S, inverse>(S::load(in + i), S::load(cosine + i), S::load(sine + i)));
    }
    if (i < width) {
      const index_t count = width - i;
      const V x = S::load_part(in + i, count, T{0});
      const V y = rotate_neighbours<S, inverse>(x, S::load_part(cosine + i, count, T{0}),
                                                S::load_part(sine + i, count, T{0}));
      S::store_part(out + i, y, count);
    }
    in += from.stride;
    out += to.stride;
    cosine += stride;
    sine += stride;
  }
}

template <class S>
void rotate_interleaved(StridedRows<const typename S::Value> in, StridedRows<typename S::Value> out,
                        index_t rows, const Angles<typename S::Value>& by) {
  if constexpr (S::width == 1) {  // one lane has no neighbour to swap with
    using T = typename S::Value;
    const T sign = by.inverse ? -1 : 1;
    for (index_t r = 0; r < rows; ++r) {
      const T *cosine = by.cosine + r * by.stride, *sine = by.sine + r * by.stride;
      for (index_t i = 0; i < 2 * by.half; i += 2) {
        const T a = in[r][i], b = in[r][i + 1];
        out[r][i] = a * cosine[i] + sign * (b * sine[i]);
        out[r][i + 1] = b * cosine[i + 1] + sign * (a * sine[i + 1]);
      }
    }
  } else if (by.inverse) {
    rotate_interleaved_rows<S, true>(in, out, rows, by);
  } else {
    rotate_interleaved_rows<S, false>(in, out, rows, by);
  }
}

template <class T>
struct KernelTable<RopeKernels<T>> {
  using S = Simd<T>;
  static constexpr RopeKernels<T> value{
      .rotate_half_split = rotate_half_split<S>,
      .rotate_interleaved = rotate_interleaved<S>,
  };
};
