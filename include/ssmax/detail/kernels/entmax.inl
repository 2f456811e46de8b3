// Implements the kernels of entmax's rows. Included once per target.

template <class S>
SSMAX_INLINE typename S::V heights(typename S::V z, typename S::V scale,
                                   Threshold<typename S::Value> threshold) {
  const typename S::V above = S::fma(z, scale, S::set(-threshold.high));
  return S::max(S::sub(above, S::set(threshold.low)), S::set(0));
}

/// Returns the sums above the threshold. A lane adds at most 32 numbers before its sums move on to doubles.
template <class S>
SupportSums row_above(const typename S::Value* in, index_t n, typename S::Value scale,
                      Threshold<typename S::Value> threshold) {
  using T = typename S::Value;
  using V = typename S::V;
  constexpr index_t w = S::width, run = 32 * w;
  const V c = S::set(scale), zero = S::set(0), one = S::set(1);
  SupportSums total{};
  for (index_t begin = 0; begin < n; begin += run) {
    const index_t end = std::min(n, begin + run);
    V count = zero, sum = zero, squares = zero;
    for (index_t i = begin; i < end; i += w) {
      const V z = load_up_to<S>(in + i, end - i, -std::numeric_limits<T>::infinity());
      const V r = heights<S>(z, c, threshold);
      count = S::add(count, S::keep(S::less(zero, r), one));
      sum = S::add(sum, r);
      squares = S::fma(r, r, squares);
    }
    total.count += static_cast<double>(S::reduce_sum(count));
    total.sum += static_cast<double>(S::reduce_sum(sum));
    total.squares += static_cast<double>(S::reduce_sum(squares));
  }
  return total;
}

template <class S, int power>
void row_store_heights(const typename S::Value* in, index_t n, typename S::Value scale,
                       Threshold<typename S::Value> threshold, typename S::Value* out) {
  const typename S::V c = S::set(scale);
  for (index_t i = 0; i < n; i += S::width) {
    const typename S::V r = heights<S>(load_up_to<S>(in + i, n - i, 0), c, threshold);
    store_up_to<S>(out + i, power == 1 ? r : S::mul(r, r), n - i);
  }
}

/// Returns the lanes where y is above 0 or NaN.
template <class S>
SSMAX_INLINE typename S::M supports(typename S::V y) {
  return S::either(S::less(S::set(0), y), S::unordered(y, y));
}

/// Returns 1 or √y, or NaN if y is NaN.
template <class S, int power>
SSMAX_INLINE typename S::V entmax_weight(typename S::V y) {
  return power == 1 ? S::select(S::unordered(y, y), y, S::set(1)) : S::sqrt(y);
}

template <class S, int power>
WeightSums row_weigh(const typename S::Value* y, const typename S::Value* dy, index_t n) {
  using V = typename S::V;
  constexpr index_t w = S::width, run = 32 * w;
  WeightSums total{};
  for (index_t begin = 0; begin < n; begin += run) {
    const index_t end = std::min(n, begin + run);
    V sum = S::set(0), weighed = S::set(0);
    for (index_t i = begin; i < end; i += w) {
      const V of_y = load_up_to<S>(y + i, end - i, 0);
      const auto counts = supports<S>(of_y);
      const V weight = S::keep(counts, entmax_weight<S, power>(of_y));
      sum = S::add(sum, weight);
      weighed = S::add(weighed, S::keep(counts, S::mul(weight, load_up_to<S>(dy + i, end - i, 0))));
    }
    total.weights += static_cast<double>(S::reduce_sum(sum));
    total.weighed += static_cast<double>(S::reduce_sum(weighed));
  }
  return total;
}

template <class S, int power>
typename S::Value row_entmax_backward(const typename S::Value* y, const typename S::Value* dy,
                                      const typename S::Value* z, index_t n, typename S::Value mean,
                                      typename S::Value c, typename S::Value* dz) {
  using V = typename S::V;
  const V m = S::set(mean), factor = S::set(c);
  V sum = S::set(0);
  for (index_t i = 0; i < n; i += S::width) {
    const V of_y = load_up_to<S>(y + i, n - i, 0);
    const auto counts = supports<S>(of_y);
    const V difference = S::sub(load_up_to<S>(dy + i, n - i, 0), m);
    const V u = S::keep(counts, S::mul(entmax_weight<S, power>(of_y), difference));
    if (z != nullptr) sum = S::add(sum, S::keep(counts, S::mul(u, load_up_to<S>(z + i, n - i, 0))));
    store_up_to<S>(dz + i, S::mul(factor, u), n - i);
  }
  return S::reduce_sum(sum);
}

template <class T>
struct KernelTable<EntmaxKernels<T>> {
  using S = Simd<T>;
  static constexpr EntmaxKernels<T> value{
      .above = row_above<S>,
      .store = {row_store_heights<S, 1>, row_store_heights<S, 2>},
      .weigh = {row_weigh<S, 1>, row_weigh<S, 2>},
      .backward = {row_entmax_backward<S, 1>, row_entmax_backward<S, 2>},
  };
};
