// Computes the cross entropy of one row. The driver is compiled once per element type.
#pragma once

#include "../../storage.hpp"
#include "../kernels/rows.hpp"

SSMAX_BEGIN_COMPILED

/// Writes dz = factor · (softmax(z) - onehot(target)) of one row, unless dz is null. Returns the row's loss.
/// dz may be z.
template <class X>
double cross_entropy_row(const shared::RowKernels<shared::ComputeType<X>>& kernels, const X* z, index_t n,
                         index_t target, double factor, X* dz);

SSMAX_END

#if SSMAX_COMPILES_DRIVERS
#include "row.hpp"

SSMAX_BEGIN_COMPILED

template <class X>
double cross_entropy_row(const shared::RowKernels<shared::ComputeType<X>>& kernels, const X* z, index_t n,
                         index_t target, double factor, X* dz) {
  using namespace detail;
  using T = ComputeType<X>;
  const auto target_logit = static_cast<T>(z[target]);
  ExponentialRow<T, X, X> row(kernels, z, n, 1.0, dz);
  const RowSum<T>& total = row.total();
  const auto settled = [&](double loss, float gradient) {
    if (dz != nullptr) fill_row(dz, n, gradient);
    return loss;
  };
  if (total.kind == RowKind::masked) return settled(std::numeric_limits<double>::infinity(), 0.0f);
  if (total.kind != RowKind::regular) {
    return settled(std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<float>::quiet_NaN());
  }
  if (n == 1) return settled(0.0, 0.0f);
  const double loss = log_sum_above(row.source(), total, target_logit);
  if (dz == nullptr) return loss;

  row.for_each_block([&](index_t begin, index_t count, const T* e, int shift, T* to) {
    // Computes the target's gradient separately, in double: p - 1 with a rounded p would leave a remainder
    // where p is 1.
    const bool holds_target = target >= begin && target < begin + count;
    const double weight = holds_target ? static_cast<double>(e[target - begin]) : 0.0;
    kernels.multiply(e, count, static_cast<T>(std::ldexp(factor / total.sum, shift)), to);
    if (holds_target)
      to[target - begin] = static_cast<T>(factor * (std::ldexp(weight, shift) / total.sum - 1));
  });
  return loss;
}

SSMAX_END
#endif
