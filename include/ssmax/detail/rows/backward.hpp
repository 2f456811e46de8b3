// One row's gradient, any length and storage: blocks are widened as in the forward, their sums are added in
// double.
#pragma once

#include <algorithm>
#include <cmath>

#include "../kernels/dot.hpp"
#include "../kernels/row_gradients.hpp"
#include "forward.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// A row's multiplier c as the kernels take it, which compute dz = factor·u and ⟨u, sign·z⟩.
template <class T>
class GradientFactor {
 public:
  explicit GradientFactor(double c)
      : c_(c), applies_(Multiplier<T>::unit_of(c) == 1), factor_(applies_ ? static_cast<T>(c) : T{1}) {}

  /// c, or 1 where T need not hold c: c·u is then left to `finish`.
  T factor() const { return factor_; }

  /// The logits of a block, times -1 where c is negative: +inf is then a logit with weight 0, and must become the -inf
  /// that the kernels know as such. Null if there are none.
  template <class X>
  const T* logits(const X* z, index_t count, T* scratch) const {
    if (z == nullptr) return nullptr;
    const T* wide = widened<T>(z, count, scratch);
    if (c_ < 0) {
      kernels<RowKernels<T>>().affine(wide, count, T{0}, T{-1}, T{0}, scratch);
      return scratch;
    }
    return wide;
  }

  void finish(T* dz, index_t count) const {
    if (!applies_) multiply_apart(dz, count);
  }

  double sign() const { return c_ < 0 ? -1.0 : 1.0; }

 private:
  SSMAX_COLD void multiply_apart(T* dz, index_t count) const {
    for (index_t i = 0; i < count; ++i) dz[i] = static_cast<T>(c_ * static_cast<double>(dz[i]));
  }

  double c_;
  bool applies_;
  T factor_;
};

/// dz = c·y ⊙ (dy - ⟨dy, y⟩). Returns ⟨y ⊙ (dy - ⟨dy, y⟩), sign·z⟩, or 0 where z is null. dz may be dy or y.
template <class T>
struct SoftmaxGradient {
  const RowGradientKernels<T>& kernels = detail::kernels<RowGradientKernels<T>>();
  const DotKernels<T>& dots = detail::kernels<DotKernels<T>>();

  template <class X>
  SSMAX_INLINE double operator()(const X* y, const X* dy, const X* z, index_t n,
                                 const GradientFactor<T>& factor, X* dz) const {
    T y_scratch[row_block], dy_scratch[row_block], z_scratch[row_block], dz_scratch[row_block];
    double mean = 0;
    for (index_t begin = 0; begin < n; begin += row_block) {
      const index_t count = std::min(row_block, n - begin);
      mean += static_cast<double>(dots.dot(widened<T>(y + begin, count, y_scratch),
                                           widened<T>(dy + begin, count, dy_scratch), count));
    }
    double dc = 0;
    for (index_t begin = 0; begin < n; begin += row_block) {
      const index_t count = std::min(row_block, n - begin);
      T* to = staging<T>(dz + begin, dz_scratch);
      const T* logits = factor.logits(z == nullptr ? nullptr : z + begin, count, z_scratch);
      dc += static_cast<double>(kernels.backward(widened<T>(y + begin, count, y_scratch),
                                                 widened<T>(dy + begin, count, dy_scratch), logits, count,
                                                 static_cast<T>(mean), factor.factor(), to));
      factor.finish(to, count);
      narrow_to<T>(dz + begin, count, to);
    }
    return dc;
  }
};

/// dz = c·(dy - p·Σdy) with p = exp(log_p). Returns ⟨dy - p·Σdy, sign·z⟩, or 0 where z is null. dz may be dy
/// or log_p.
template <class T>
struct LogSoftmaxGradient {
  const RowGradientKernels<T>& kernels = detail::kernels<RowGradientKernels<T>>();
  const RowKernels<T>& rows = detail::kernels<RowKernels<T>>();

  template <class X>
  SSMAX_INLINE double operator()(const X* log_p, const X* dy, const X* z, index_t n,
                                 const GradientFactor<T>& factor, X* dz) const {
    OverlappedWork<T> nothing;
    T log_scratch[row_block], p_scratch[row_block], dy_scratch[row_block], z_scratch[row_block],
        dz_scratch[row_block];
    double total = 0;
    for (index_t begin = 0; begin < n; begin += row_block) {
      const index_t count = std::min(row_block, n - begin);
      total += static_cast<double>(kernels.sum_unmasked(
          widened<T>(dy + begin, count, dy_scratch), widened<T>(log_p + begin, count, log_scratch), count));
    }
    double dc = 0;
    for (index_t begin = 0; begin < n; begin += row_block) {
      const index_t count = std::min(row_block, n - begin);
      const T* log = widened<T>(log_p + begin, count, log_scratch);
      rows.exp_store(log, count, split_scale<T>(1.0), T{0}, p_scratch, nothing);
      T* to = staging<T>(dz + begin, dz_scratch);
      const T* logits = factor.logits(z == nullptr ? nullptr : z + begin, count, z_scratch);
      dc += static_cast<double>(kernels.log_backward(log, p_scratch,
                                                     widened<T>(dy + begin, count, dy_scratch), logits, count,
                                                     static_cast<T>(total), factor.factor(), to));
      factor.finish(to, count);
      narrow_to<T>(dz + begin, count, to);
    }
    return dc;
  }
};

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
