// Implements the kernels of statistics of AMX. Weights are those of pair dots.

/// Does what matrix_attend does, and adds to the statistics.
template <class S, int vectors>
TileChange matrix_attend_and_statistics(float* s, index_t keys, const TileState<float>& state,
                                        bfloat16* weights, const ValuePanels<bfloat16>& values, float* o) {
  return matrix_attend<S, Pairs, vectors, true>(s, keys, state, weights, values, o);
}

template <class T>
struct KernelTable<StatisticsKernels<T, bfloat16>> {
  using S = Simd<T>;
  static constexpr StatisticsKernels<T, bfloat16> value{
      .weights = pair_weights_and_statistics<S, Pairs>,
      .group = {.weights = {pair_weights<S, Pairs, 1, true>, pair_weights<S, Pairs, 2, true>,
                            pair_weights<S, Pairs, 3, true>},
                .attend = {matrix_attend_and_statistics<S, 1>, matrix_attend_and_statistics<S, 2>,
                           matrix_attend_and_statistics<S, 3>}}};
};
