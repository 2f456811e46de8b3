// Declares the kernel that computes the statistics of one row of logits. Tiles have statistics in their own kernels.
#pragma once

#include "prefill.hpp"

SSMAX_BEGIN_SHARED

template <class T>
struct StatisticsKernels {
  /// Writes the statistics of one query over n keys: of x = unit·z and of the weights 2^(x - base). A z of -inf is masked.
  /// Replaces z by the weights.
  void (*of_row)(T* z, const T* weights, index_t n, T unit, T base, const TileStatistics<T>& to);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/statistics.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
