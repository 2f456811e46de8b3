// Implements the kernels for one row: reductions, exponentials and multiples. Included once per target.
//
// Reductions use four accumulators, to hide a latency of 4 cycles. A vector takes a load and an addition or
// maximum, and a core processes two vectors per cycle. The callers divide long rows into blocks and add the
// results of blocks in double.

template <class S>
Extremum<typename S::Value> row_max(const typename S::Value* in, index_t n) {
  using T = typename S::Value;
  constexpr index_t w = S::width;
  const typename S::V lowest = S::set(-std::numeric_limits<T>::infinity());
  typename S::V m0 = lowest, m1 = lowest, m2 = lowest, m3 = lowest;
  typename S::M nan = S::none();
  index_t i = 0;
  for (; i + 4 * w <= n; i += 4 * w) {
    const typename S::V a = S::load(in + i), b = S::load(in + i + w);
    const typename S::V c = S::load(in + i + 2 * w), d = S::load(in + i + 3 * w);
    nan = S::either(nan, S::either(S::unordered(a, b), S::unordered(c, d)));
    m0 = S::max(m0, a);
    m1 = S::max(m1, b);
    m2 = S::max(m2, c);
    m3 = S::max(m3, d);
  }
  for (; i + w <= n; i += w) {
    const typename S::V a = S::load(in + i);
    nan = S::either(nan, S::unordered(a, a));
    m0 = S::max(m0, a);
  }
  if (i < n) {
    const typename S::V a = S::load_part(in + i, n - i, -std::numeric_limits<T>::infinity());
    nan = S::either(nan, S::unordered(a, a));
    m1 = S::max(m1, a);
  }
  return {S::reduce_max(S::max(S::max(m0, m1), S::max(m2, m3))), S::any(nan)};
}

template <class S>
void row_multiply(const typename S::Value* in, index_t n, typename S::Value factor, typename S::Value* out) {
  constexpr index_t w = S::width;
  const typename S::V f = S::set(factor);
  index_t i = 0;
  for (; i + 4 * w <= n; i += 4 * w) {
    S::store(out + i, S::mul(f, S::load(in + i)));
    S::store(out + i + w, S::mul(f, S::load(in + i + w)));
    S::store(out + i + 2 * w, S::mul(f, S::load(in + i + 2 * w)));
    S::store(out + i + 3 * w, S::mul(f, S::load(in + i + 3 * w)));
  }
  for (; i + w <= n; i += w) S::store(out + i, S::mul(f, S::load(in + i)));
  if (i < n) S::store_part(out + i, S::mul(f, S::load_part(in + i, n - i, typename S::Value{0})), n - i);
}

template <class S>
typename S::Value row_exp_store(const typename S::Value* in, index_t n, Scale<typename S::Value> scale,
                                typename S::Value shift, typename S::Value* out,
                                OverlappedWork<typename S::Value>& overlapped) {
  using T = typename S::Value;
  constexpr index_t w = S::width;
  const Exp<S> exp(scale, shift);
  constexpr int chains = S::chains;
  // A lane adds at most 16 exponentials before its sum moves on to a double. With one long sum, every
  // addition of a block of equal logits rounds in the same direction. A long sum lost 1e-6 of its value in
  // AVX2, and 1.4e-5 with one lane.
  constexpr index_t step = chains * w, run = 16 * step;
  typename S::V biases[chains];
  double total = 0;
  SSMAX_UNROLL
  for (int k = 0; k < chains; ++k) biases[k] = exp.bias;
  const T* next = overlapped.next;
  T* waiting = overlapped.waiting;
  const typename S::V factor = S::set(overlapped.factor);
  typename S::V top = S::set(-std::numeric_limits<T>::infinity());
  typename S::M nan = S::none();
  index_t i = 0;
  while (i + step <= n) {
    const index_t end = i + std::min(run, (n - i) / step * step);
    typename S::V sums[chains];
    SSMAX_UNROLL
    for (int k = 0; k < chains; ++k) sums[k] = S::set(T{0});
    for (; i < end; i += step) {
      typename S::V e[chains];
      SSMAX_UNROLL
      for (int k = 0; k < chains; ++k) e[k] = S::load(in + i + k * w);
      exp.template apply<chains>(e, biases);
      SSMAX_UNROLL
      for (int k = 0; k < chains; ++k) {
        S::store(out + i + k * w, e[k]);
        sums[k] = S::add(sums[k], e[k]);
      }
      if (next != nullptr) {
        SSMAX_UNROLL
        for (int k = 0; k < chains; ++k) {
          const typename S::V x = S::load(next + i + k * w);
          nan = S::either(nan, S::unordered(x, x));
          top = S::max(top, x);
        }
      }
      if (waiting != nullptr) {
        SSMAX_UNROLL
        for (int k = 0; k < chains; ++k) {
          T* to = waiting + i + k * w;
          S::store(to, S::mul(factor, S::load(to)));
        }
      }
    }
    total += static_cast<double>(S::reduce_sum(reduce_pairwise<S, chains>(sums)));
  }
  if (next != nullptr) {
    const Extremum<T> last = row_max<S>(next + i, n - i);
    overlapped.next_top = {std::max(S::reduce_max(top), last.value), S::any(nan) || last.has_nan};
  }
  if (waiting != nullptr) row_multiply<S>(waiting + i, n - i, overlapped.factor, waiting + i);
  typename S::V rest = S::set(T{0});
  for (; i < n; i += w) {
    const typename S::V e = exp(load_up_to<S>(in + i, n - i, -std::numeric_limits<T>::infinity()));
    store_up_to<S>(out + i, e, n - i);
    rest = S::add(rest, e);
  }
  return static_cast<T>(total + static_cast<double>(S::reduce_sum(rest)));
}

/// Writes c·(in - origin) + offset. If |c| < 1, the product is computed as 2c·(in/2 - origin/2): the
/// difference of two finite numbers may overflow although the product does not.
template <class S>
void row_affine(const typename S::Value* in, index_t n, typename S::Value origin, typename S::Value c,
                typename S::Value offset, typename S::Value* out) {
  using T = typename S::Value;
  const T size = std::abs(c) < 1 ? T(0.5) : T(1);
  const typename S::V masked = S::set(-std::numeric_limits<T>::infinity()), part = S::set(size);
  const typename S::V o = S::set(-size * origin), factor = S::set(c / size), add = S::set(offset);
  for (index_t i = 0; i < n; i += S::width) {
    const typename S::V x = load_up_to<S>(in + i, n - i, T{0});
    const typename S::V y = S::fma(factor, S::fma(x, part, o), add);
    store_up_to<S>(out + i, S::select(unmasked<S>(x), y, masked), n - i);
  }
}

template <class T>
struct KernelTable<RowKernels<T>> {
  using S = Simd<T>;
  static constexpr RowKernels<T> value{
      .width = static_cast<int>(S::width),
      .max = row_max<S>,
      .exp_store = row_exp_store<S>,
      .multiply = row_multiply<S>,
      .affine = row_affine<S>,
  };
};
