// Implements the kernels for gradients of rows. Included once per target.

/// Returns the sum of the elements whose log-probability is not -inf.
template <class S>
typename S::Value row_sum_unmasked(const typename S::Value* in, const typename S::Value* log_p, index_t n) {
  using T = typename S::Value;
  typename S::V s = S::set(T{0});
  index_t i = 0;
  for (; i + S::width <= n; i += S::width) {
    s = S::add(s, S::keep(unmasked<S>(S::load(log_p + i)), S::load(in + i)));
  }
  if (i < n) {
    s = S::add(s,
               S::keep(unmasked<S>(S::load_part(log_p + i, n - i, T{0})), S::load_part(in + i, n - i, T{0})));
  }
  return S::reduce_sum(s);
}

/// An accumulator of Σ u·z that returns c·u for each u. A masked logit is -inf with u = 0. It is raised to
/// the lowest finite number, because 0·(-inf) is NaN.
template <class S>
struct LogitGradient {
  using T = typename S::Value;
  using V = typename S::V;

  V factor, sum, lowest;

  SSMAX_INLINE explicit LogitGradient(T c)
      : factor(S::set(c)), sum(S::set(T{0})), lowest(S::set(std::numeric_limits<T>::lowest())) {}

  SSMAX_INLINE V whole(V u, const T* z) {
    if (z != nullptr) sum = S::fma(u, S::max(S::load(z), lowest), sum);
    return S::mul(factor, u);
  }
  SSMAX_INLINE V part(V u, const T* z, index_t count) {
    if (z != nullptr) sum = S::fma(u, S::max(S::load_part(z, count, T{0}), lowest), sum);
    return S::mul(factor, u);
  }
};

template <class S, bool with_logits>
SSMAX_INLINE typename S::Value backward_row(const typename S::Value* y, const typename S::Value* dy,
                                            const typename S::Value* z, index_t n, typename S::Value mean,
                                            typename S::Value c, typename S::Value* dz) {
  using T = typename S::Value;
  using V = typename S::V;
  constexpr index_t w = S::width;
  const V m = S::set(mean);
  LogitGradient<S> even(c), odd(c);
  index_t i = 0;
  for (; i + 2 * w <= n; i += 2 * w) {
    const V u0 = S::mul(S::load(y + i), S::sub(S::load(dy + i), m));
    const V u1 = S::mul(S::load(y + i + w), S::sub(S::load(dy + i + w), m));
    S::store(dz + i, even.whole(u0, with_logits ? z + i : nullptr));
    S::store(dz + i + w, odd.whole(u1, with_logits ? z + i + w : nullptr));
  }
  for (; i + w <= n; i += w) {
    const V u = S::mul(S::load(y + i), S::sub(S::load(dy + i), m));
    S::store(dz + i, even.whole(u, with_logits ? z + i : nullptr));
  }
  if (i < n) {
    const V u = S::mul(S::load_part(y + i, n - i, T{0}), S::sub(S::load_part(dy + i, n - i, T{0}), m));
    S::store_part(dz + i, odd.part(u, with_logits ? z + i : nullptr, n - i), n - i);
  }
  return S::reduce_sum(S::add(even.sum, odd.sum));
}

template <class S>
typename S::Value row_backward(const typename S::Value* y, const typename S::Value* dy,
                               const typename S::Value* z, index_t n, typename S::Value mean,
                               typename S::Value c, typename S::Value* dz) {
  return z == nullptr ? backward_row<S, false>(y, dy, z, n, mean, c, dz)
                      : backward_row<S, true>(y, dy, z, n, mean, c, dz);
}

template <class S>
typename S::Value row_log_backward(const typename S::Value* log_p, const typename S::Value* p,
                                   const typename S::Value* dy, const typename S::Value* z, index_t n,
                                   typename S::Value total, typename S::Value c, typename S::Value* dz) {
  using T = typename S::Value;
  using V = typename S::V;
  constexpr index_t w = S::width;
  const V k = S::set(total);
  LogitGradient<S> gradient(c);
  index_t i = 0;
  for (; i + w <= n; i += w) {
    const V u = S::keep(unmasked<S>(S::load(log_p + i)), S::sub(S::load(dy + i), S::mul(k, S::load(p + i))));
    S::store(dz + i, gradient.whole(u, z == nullptr ? nullptr : z + i));
  }
  if (i < n) {
    const V u =
        S::keep(unmasked<S>(S::load_part(log_p + i, n - i, T{0})),
                S::sub(S::load_part(dy + i, n - i, T{0}), S::mul(k, S::load_part(p + i, n - i, T{0}))));
    S::store_part(dz + i, gradient.part(u, z == nullptr ? nullptr : z + i, n - i), n - i);
  }
  return S::reduce_sum(gradient.sum);
}

template <class T>
struct KernelTable<RowGradientKernels<T>> {
  using S = Simd<T>;
  static constexpr RowGradientKernels<T> value{
      .sum_unmasked = row_sum_unmasked<S>,
      .backward = row_backward<S>,
      .log_backward = row_log_backward<S>,
  };
};
