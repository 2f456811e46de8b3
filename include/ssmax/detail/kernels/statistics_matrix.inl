// Implements the kernels of statistics of AMX: weights are those of pair dots.

template <class T>
struct KernelTable<StatisticsKernels<T, bfloat16>> {
  using S = Simd<T>;
  using P = Pairs;
  static constexpr StatisticsKernels<T, bfloat16> value{
      .weights = pair_weights_and_statistics<S, P>,
      .group = {.weights = {pair_weights<S, P, 1, true>, pair_weights<S, P, 2, true>,
                            pair_weights<S, P, 3, true>},
                .attend = {matrix_attend<S, P, 1, true>, matrix_attend<S, P, 2, true>,
                           matrix_attend<S, P, 3, true>}},
  };
};
