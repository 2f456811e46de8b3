// One row's gradient, any length and storage: blocks are widened as in the forward, their sums are added in
// double.
#pragma once

#include <algorithm>

#include "row_forward.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// dz = c·y ⊙ (dy - ⟨dy, y⟩). Returns dc = ⟨y ⊙ (dy - ⟨dy, y⟩), z⟩, or 0 where z is null. dz may be dy or y.
template <class T, class X>
double softmax_backward_row(const GradientLeaves<T>& leaves, const X* y, const X* dy, const X* z, index_t n,
                            double c, X* dz) {
  T y_scratch[row_block], dy_scratch[row_block], z_scratch[row_block], dz_scratch[row_block];
  double mean = 0;
  for (index_t begin = 0; begin < n; begin += row_block) {
    const index_t count = std::min(row_block, n - begin);
    mean += static_cast<double>(leaves.dot(widened<T>(y + begin, count, y_scratch),
                                           widened<T>(dy + begin, count, dy_scratch), count));
  }
  double dc = 0;
  for (index_t begin = 0; begin < n; begin += row_block) {
    const index_t count = std::min(row_block, n - begin);
    T* to = staging<T>(dz + begin, dz_scratch);
    dc += static_cast<double>(
        leaves.backward(widened<T>(y + begin, count, y_scratch), widened<T>(dy + begin, count, dy_scratch),
                        z == nullptr ? nullptr : widened<T>(z + begin, count, z_scratch), count,
                        static_cast<T>(mean), static_cast<T>(c), to));
    narrow_to<T>(dz + begin, count, to);
  }
  return dc;
}

/// dz = c·(dy - p·Σdy) with p = exp(log_p). Returns dc = ⟨dy - p·Σdy, z⟩, or 0 where z is null. dz may be dy
/// or log_p.
template <class T, class X>
double log_softmax_backward_row(const GradientLeaves<T>& leaves, const X* log_p, const X* dy, const X* z,
                                index_t n, double c, X* dz) {
  const auto& exponentials = detail::leaves<RowLeaves<T>>();
  Meanwhile<T> nothing;
  T log_scratch[row_block], p_scratch[row_block], dy_scratch[row_block], z_scratch[row_block],
      dz_scratch[row_block];
  double total = 0;
  for (index_t begin = 0; begin < n; begin += row_block) {
    const index_t count = std::min(row_block, n - begin);
    total += static_cast<double>(leaves.sum_unmasked(widened<T>(dy + begin, count, dy_scratch),
                                                     widened<T>(log_p + begin, count, log_scratch), count));
  }
  double dc = 0;
  for (index_t begin = 0; begin < n; begin += row_block) {
    const index_t count = std::min(row_block, n - begin);
    const T* log = widened<T>(log_p + begin, count, log_scratch);
    exponentials.exp_store(log, count, split_scale<T>(1.0), T{0}, p_scratch, nothing);
    T* to = staging<T>(dz + begin, dz_scratch);
    dc += static_cast<double>(
        leaves.log_backward(log, p_scratch, widened<T>(dy + begin, count, dy_scratch),
                            z == nullptr ? nullptr : widened<T>(z + begin, count, z_scratch), count,
                            static_cast<T>(total), static_cast<T>(c), to));
    narrow_to<T>(dz + begin, count, to);
  }
  return dc;
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
