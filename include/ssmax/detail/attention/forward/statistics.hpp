// Computes the statistics of rows of logits.
#pragma once

#include <cmath>
#include <limits>

#include "../../kernels/statistics.hpp"
#include "../tile/statistics.hpp"
#include "epilogue.hpp"

SSMAX_BEGIN_DETAIL

/// Returns the kernel that adds a vector of queries to their statistics.
template <class Compute, class Operand>
decltype(PrefillKernels<Compute, Operand>::weights) statistics_weights() {
  return kernels<StatisticsKernels<Compute, Operand>>().weights;
}

template <class Compute>
const GroupKernels<Compute, bfloat16>& statistics_of_group() {
  return kernels<StatisticsKernels<Compute, bfloat16>>().group;
}

/// Writes the statistics of one row (StatisticsFunctions::of_row). Logits beyond the range of the kernel take a loop in
/// double.
template <class Compute>
void write_row_statistics(Compute* z, const Compute* weights, index_t n, double unit, double shift,
                          const TileStatistics<Compute>& to) {
  if (std::abs(shift) < static_cast<double>(largest_shift<Compute>)) {
    return kernels<StatisticsKernels<Compute>>().of_row(z, weights, n, static_cast<Compute>(unit),
                                                        static_cast<Compute>(shift), to);
  }
  LaneStatistics<Compute> sums;
  for (index_t i = 0; i < n; ++i) {
    sums.add(unit * static_cast<double>(z[i]), shift, static_cast<double>(weights[i]));
    z[i] = weights[i];
  }
  sums.write(to);
}

SSMAX_END
