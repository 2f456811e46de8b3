// Implements the kernel of statistics of the bf16 path. Included once for each extension that has pair dots.

/// Does what pair_weights does for one vector, and adds to the statistics.
template <class S, class P>
TileChange pair_weights_and_statistics(float* s, index_t keys, const TileState<float>& state,
                                       bfloat16* weights) {
  typename S::V shifts[1];
  if (!pair_shifts<S, 1>(s, keys, state, shifts)) return TileChange::irregular;
  const bool rises = vector_weights<S, P, true>(s, keys, state, 0, shifts[0], weights);
  return rises ? TileChange::raised : TileChange::none;
}

template <class T>
struct KernelTable<StatisticsKernels<T, bfloat16>> {
  using S = Simd<T>;
  using P = Pairs;
  static constexpr StatisticsKernels<T, bfloat16> value{
      .weights = pair_weights_and_statistics<S, P>,
      .group = {.weights = {pair_weights<S, P, 1, true>, pair_weights<S, P, 2, true>,
                            pair_weights<S, P, 3, true>}}};
};
