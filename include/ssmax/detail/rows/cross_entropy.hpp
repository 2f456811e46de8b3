// The driver of cross_entropy: one row, compiled once for each element type.
#pragma once

#include "../../storage.hpp"
#include "../kernels/rows.hpp"

namespace ssmax {
inline namespace SSMAX_COMPILED_NAMESPACE {
namespace SSMAX_VISIBLE compiled {

/// dz = factor · (softmax(z) - onehot(target)) of one row, unless dz is null; returns the row's loss. dz may be z.
template <class X>
double cross_entropy_row(const shared::RowKernels<shared::Compute<X>>& kernels, const X* z, index_t n,
                         index_t target, double factor, X* dz);

}  // namespace compiled
}  // namespace SSMAX_COMPILED_NAMESPACE
}  // namespace ssmax

#if SSMAX_COMPILES_DRIVERS
#include "row.hpp"

namespace ssmax {
inline namespace SSMAX_COMPILED_NAMESPACE {
namespace SSMAX_VISIBLE compiled {

template <class X>
double cross_entropy_row(const shared::RowKernels<shared::Compute<X>>& kernels, const X* z, index_t n,
                         index_t target, double factor, X* dz) {
  using namespace detail;
  using T = Compute<X>;
  constexpr index_t most_blocks = 1024;
  T scratch[row_block], staged[row_block];
  T shifts[most_blocks];
  const auto target_logit = static_cast<T>(z[target]);
  RowSource<T, X> source(kernels, z, n, 1.0);

  T* stage = nullptr;  // where the exponentials of the whole row are kept, if anywhere
  if (dz != nullptr) {
    if constexpr (std::same_as<X, T>) {
      if (n <= row_block || (dz != z && n <= row_block * most_blocks)) stage = dz;
    } else {
      if (n <= row_block) stage = staged;
    }
  }
  const RowSum<T> total = sum_row_rebasing(kernels, source, scratch, stage, shifts);
  const auto settled = [&](double loss, float gradient) {
    if (dz != nullptr) fill_row(dz, n, gradient);
    return loss;
  };
  if (total.kind == RowKind::masked) return settled(std::numeric_limits<double>::infinity(), 0.0f);
  if (total.kind != RowKind::regular) {
    return settled(std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<float>::quiet_NaN());
  }
  if (n == 1) return settled(0.0, 0.0f);
  const double loss = log_sum_above(source, total, target_logit);
  if (dz == nullptr) return loss;

  for (index_t begin = 0; begin < n; begin += row_block) {
    const index_t count = std::min(row_block, n - begin);
    T* to = staging<T>(dz + begin, staged);
    const T* exponentials = to;
    int shift = 0;
    if (stage != nullptr) {
      exponentials = stage + begin;
      shift = static_cast<int>(static_cast<double>(shifts[begin / row_block]) - total.shift);
    } else {
      OverlappedWork<T> nothing;
      kernels.exp_store(source.block(begin, count, scratch), count, source.scale(),
                        static_cast<T>(total.shift), to, nothing);
    }
    // The target's is worked out apart, in double: p - 1 from a rounded p would leave a remainder where p is 1.
    const bool holds_target = target >= begin && target < begin + count;
    const double weight = holds_target ? static_cast<double>(exponentials[target - begin]) : 0.0;
    kernels.multiply(exponentials, count, static_cast<T>(std::ldexp(factor / total.sum, shift)), to);
    if (holds_target)
      to[target - begin] = static_cast<T>(factor * (std::ldexp(weight, shift) / total.sum - 1));
    narrow_to<T>(dz + begin, count, to);
  }
  return loss;
}

}  // namespace compiled
}  // namespace SSMAX_COMPILED_NAMESPACE
}  // namespace ssmax
#endif
