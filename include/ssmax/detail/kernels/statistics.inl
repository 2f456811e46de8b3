// Implements the kernels of statistics. Included once per target.

template <class S>
void row_statistics(typename S::Value* z, const typename S::Value* weights, index_t n, typename S::Value unit,
                    typename S::Value base, const TileStatistics<typename S::Value>& to) {
  using T = typename S::Value;
  using V = typename S::V;
  constexpr index_t w = S::width;
  const V factor = S::set(unit), from = S::set(base), masked = S::set(-std::numeric_limits<T>::infinity());
  StepStatistics<S> step(masked);
  const auto add = [&](int part, V logit, V weight) {
    const V x = S::select(unmasked<S>(logit), S::mul(logit, factor), masked);
    step.largest = S::max(step.largest, x);
    step.add_logit(part, x);
    step.template add_weight<true>(part, S::sub(x, from), weight);
    return weight;
  };
  index_t i = 0;
  for (; i + 2 * w <= n; i += 2 * w) {
    S::store(z + i, add(0, S::load(z + i), S::load(weights + i)));
    S::store(z + i + w, add(1, S::load(z + i + w), S::load(weights + i + w)));
  }
  for (; i < n; i += w) {
    const V logit = load_up_to<S>(z + i, n - i, -std::numeric_limits<T>::infinity());
    store_up_to<S>(z + i, add(0, logit, load_up_to<S>(weights + i, n - i, T{0})), n - i);
  }
  *to.largest = S::reduce_max(step.largest);
  *to.smallest = -S::reduce_max(S::sub(S::set(0), S::min(step.smallest[0], step.smallest[1])));
  *to.distances = S::reduce_sum(S::add(step.distances[0], step.distances[1]));
  *to.squares = S::reduce_sum(S::add(step.squares[0], step.squares[1]));
}

/// The empty table of targets without a bf16 path.
template <class T>
struct KernelTable<StatisticsKernels<T, bfloat16>> {
  static constexpr StatisticsKernels<T, bfloat16> value{};
};

template <class T>
struct KernelTable<StatisticsKernels<T>> {
  static constexpr StatisticsKernels<T> value{.weights = tile_weights<Simd<T>, true>,
                                              .of_row = row_statistics<Simd<T>>};
};
