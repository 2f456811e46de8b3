// Declares the kernels of statistics. Units that give statistics compile them.
#pragma once

#include "prefill.hpp"

SSMAX_BEGIN_SHARED

/// Kernels of the statistics of rows. T and E are those of PrefillKernels.
template <class T, class E = T>
struct StatisticsKernels {
  /// Does what PrefillKernels::weights does, and adds to state.statistics.
  TileChange (*weights)(T* s, index_t keys, const TileState<T>& state, E* weights) = nullptr;
  /// Do what PrefillKernels::group does, and add to state.statistics. A vector with a masked key is irregular.
  GroupKernels<T, E> group{};
  /// Writes the statistics of one query over n keys: of x = unit·z and of the weights 2^(x - base). A z of -inf is
  /// masked. Replaces z by the weights. Null if E is bfloat16.
  void (*of_row)(T* z, const T* weights, index_t n, T unit, T base, const TileStatistics<T>& to) = nullptr;
};

template <class T>
inline constexpr bool has_extensions<StatisticsKernels<T, bfloat16>> = true;

SSMAX_END

#define SSMAX_KERNELS "../kernels/statistics.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS

#define SSMAX_PAIR_KERNELS "../kernels/statistics_pairs.inl"
#include "../dispatch/for_each_extension.inl"
#undef SSMAX_PAIR_KERNELS

#define SSMAX_MATRIX_KERNELS "../kernels/statistics_matrix.inl"
#include "../dispatch/for_each_matrix.inl"
#undef SSMAX_MATRIX_KERNELS
