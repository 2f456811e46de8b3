// Implements the kernel of cross-entropy. Included once per target.

template <class S>
double loss_block(const LossBlock<typename S::Value>& block) {
  using V = typename S::V;
  constexpr index_t w = S::width, run = 8 * w;  // a lane adds 8 terms before its sum moves on to a double
  const V zero = S::set(0), one = S::set(1), origin = S::set(block.origin), factor = S::set(block.factor);
  const V share = S::set(-block.share), inverse = S::set(block.inverse_cap);
  double distance = 0;
  for (index_t i = 0; i < block.n;) {
    const index_t end = std::min(block.n, i + run);
    V sum = zero;
    for (; i < end; i += w) {
      const index_t left = block.n - i;
      const V x = load_up_to<S>(block.x + i, left, block.origin);
      const V weight = block.weights == nullptr ? one : load_up_to<S>(block.weights + i, left, 0);
      sum = S::add(sum, S::keep(S::less(zero, weight), S::mul(weight, S::sub(origin, x))));
      if (block.out == nullptr) continue;
      V gradient = S::fma(factor, load_up_to<S>(block.e + i, left, 0), S::mul(share, weight));
      if (block.inverse_cap != 0) {
        const V t = S::mul(x, inverse);
        gradient = S::mul(gradient, S::max(S::sub(one, S::mul(t, t)), zero));
      }
      store_up_to<S>(block.out + i, gradient, left);
    }
    distance += static_cast<double>(S::reduce_sum(sum));
  }
  return distance;
}

template <class T>
struct KernelTable<CrossEntropyKernels<T>> {
  static constexpr CrossEntropyKernels<T> value{.loss_block = loss_block<Simd<T>>};
};
