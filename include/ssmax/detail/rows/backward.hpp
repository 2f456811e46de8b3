// Computes the gradient of one row of any length and storage type. Blocks are widened as in forward, and the
// sums of blocks are added in double.
#pragma once

#include <algorithm>

#include "driver.hpp"
#include "groups.hpp"
#include "row.hpp"
#include "strided.hpp"

SSMAX_BEGIN_DETAIL

/// A row's multiplier c in the form that the kernels take. The kernels compute dz = factor·u. They compute ⟨u, z⟩
/// for short rows, and ⟨u, sign·z⟩ for others.
template <class T>
class GradientFactor {
 public:
  explicit GradientFactor(double c)
      : c_(c), applies_(Multiplier<T>::unit_of(c) == 1), factor_(applies_ ? static_cast<T>(c) : T{1}) {}

  /// Returns c. Exception: returns 1 if |c| lies outside 2^-64 to 2^64, because T may not represent c.
  /// `finish` then multiplies by c in double.
  T factor() const { return factor_; }

  /// Returns true if factor() is c.
  bool applies() const { return applies_; }

  /// Returns the logits of a block, times -1 if c is negative, or null if z is null. With a negative c, a
  /// logit of +inf has weight 0. The sign turns it into -inf, which the kernels treat as a masked key.
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
    if (!applies_) multiply_separately(dz, count);
  }

  double sign() const { return c_ < 0 ? -1.0 : 1.0; }

 private:
  SSMAX_COLD void multiply_separately(T* dz, index_t count) const {
    for (index_t i = 0; i < count; ++i) dz[i] = static_cast<T>(c_ * static_cast<double>(dz[i]));
  }

  double c_;
  bool applies_;
  T factor_;
};

/// Writes dz = c·y ⊙ (dy - ⟨dy, y⟩). Returns ⟨y ⊙ (dy - ⟨dy, y⟩), z⟩, or 0 if z is null. dz may be dy or
/// y.
struct SoftmaxGradient {
  template <class T>
  static void rows(const RowGradientKernels<T>& kernels, const GradientRows<T>& rows, T c,
                   index_t rows_of_sum, T* sums) {
    kernels.backward_rows(rows, c, rows_of_sum, sums);
  }

  template <class T>
  SSMAX_INLINE static T sum(const SoftmaxGradientKernels<T>& kernels, const T* y, const T* dy,
                            index_t count) {
    return kernels.dot.dot(y, dy, count);
  }
  template <class T>
  SSMAX_INLINE static T block(const SoftmaxGradientKernels<T>& kernels, const GradientRows<T>& block, T mean,
                              T c) {
    return kernels.gradients.backward(block, mean, c);
  }
};

/// Writes dz = c·(dy - p·Σdy) with p = exp(log_p). Returns ⟨dy - p·Σdy, z⟩, or 0 if z is null. dz may be
/// dy or log_p.
struct LogSoftmaxGradient {
  template <class T>
  static void rows(const RowGradientKernels<T>& kernels, const GradientRows<T>& rows, T c,
                   index_t rows_of_sum, T* sums) {
    kernels.log_backward_rows(rows, c, rows_of_sum, sums);
  }

  template <class T>
  SSMAX_INLINE static T sum(const SoftmaxGradientKernels<T>& kernels, const T* log_p, const T* dy,
                            index_t count) {
    return kernels.gradients.sum_unmasked(dy, log_p, count);
  }
  template <class T>
  SSMAX_INLINE static T block(const SoftmaxGradientKernels<T>& kernels, const GradientRows<T>& block, T total,
                              T c) {
    OverlappedWork<T> nothing{};
    T p[row_block];
    kernels.rows.exp_store(block.out, block.n, split_scale<T>(1.0), T{0}, p, nothing);
    return kernels.gradients.log_backward(block, p, total, c);
  }
};

/// Computes the gradient of one row in two passes over its blocks: the sum of the row, then dz and the result.
template <class Gradient, class T, class X>
SSMAX_INLINE double gradient_of_row(const SoftmaxGradientKernels<T>& kernels, const X* y, const X* dy,
                                    const X* z, index_t n, const GradientFactor<T>& factor, X* dz) {
  T y_scratch[row_block], dy_scratch[row_block], z_scratch[row_block], dz_scratch[row_block];
  double sum = 0;
  for (index_t begin = 0; begin < n; begin += row_block) {
    const index_t count = std::min(row_block, n - begin);
    sum += static_cast<double>(Gradient::sum(kernels, widened<T>(y + begin, count, y_scratch),
                                             widened<T>(dy + begin, count, dy_scratch), count));
  }
  double dc = 0;
  for (index_t begin = 0; begin < n; begin += row_block) {
    const index_t count = std::min(row_block, n - begin);
    T* to = staging<T>(dz + begin, dz_scratch);
    const T* logits = factor.logits(z == nullptr ? nullptr : z + begin, count, z_scratch);
    const GradientRows<T> block{.out = widened<T>(y + begin, count, y_scratch),
                                .dout = widened<T>(dy + begin, count, dy_scratch),
                                .logits = logits,
                                .dlogits = to,
                                .n = count};
    dc += static_cast<double>(Gradient::block(kernels, block, static_cast<T>(sum), factor.factor()));
    factor.finish(to, count);
    narrow_to<T>(dz + begin, count, to);
  }
  return dc;
}

/// Computes the gradients of a group's rows, which share c (driver.hpp). `kernels` and `rows` are copies that
/// the called functions cannot change, so that the loop keeps them in registers. Rows of 16 then take 0.9 of
/// the time.
template <class Gradient, bool has_logits, class T, class X>
double gradient_of_rows(const SoftmaxGradientKernels<T> kernels, const GradientRows<X> rows, double c,
                        double* dc) {
  const GradientFactor<T> factor(c);
  double sum = 0;
  for (index_t r = 0; r < rows.rows; ++r) {
    const X* logits = has_logits ? rows.logits + r * rows.logits_stride : nullptr;
    const double dc_of_row =
        gradient_of_row<Gradient>(kernels, rows.out + r * rows.out_stride, rows.dout + r * rows.dout_stride,
                                  logits, rows.n, factor, rows.dlogits + r * rows.dlogits_stride);
    if (!has_logits) continue;
    if (dc != nullptr) dc[r] = factor.sign() * dc_of_row;
    sum += dc_of_row;
  }
  return factor.sign() * sum;
}

/// Returns how many rows of n elements one sum of T takes. The error of such a sum is that of a row of 256 elements.
/// Blocks of rows with strides begin at multiples of least_scratch_rows, and so do sums.
constexpr index_t rows_of_sum(index_t n) {
  index_t rows = least_scratch_rows;
  while (rows > 1 && rows * n > 256) rows /= 2;
  return rows;
}

/// Computes the gradients of short rows as gradient_of_rows does, several rows at a time. Exception: writes the sum of
/// several rows to the dc of the first of them, and 0 to the others. Requires |c| within 2^-64 to 2^64.
template <class Gradient, class T>
double gradient_of_short_rows(const RowGradientKernels<T>& kernels, GradientRows<T> rows, T c, double* dc) {
  if (rows.logits == nullptr) {
    Gradient::template rows<T>(kernels, rows, c, 1, nullptr);
    return 0;
  }
  constexpr index_t rows_of_call = row_cut;  // all rows of a sum are in one call of an executor
  static_assert(row_cut % least_scratch_rows == 0);
  const index_t step = rows_of_sum(rows.n);
  T sums[rows_of_call];
  double sum = 0;
  for (index_t left = rows.rows; left > 0; left -= rows.rows) {
    rows.rows = std::min(rows_of_call, left);
    Gradient::rows(kernels, rows, c, step, sums);
    const index_t count = (rows.rows + step - 1) / step;
    for (index_t i = 0; i < count; ++i) sum += static_cast<double>(sums[i]);
    if (dc != nullptr) {
      std::fill_n(dc, rows.rows, 0.0);
      for (index_t i = 0; i < count; ++i) dc[i * step] = static_cast<double>(sums[i]);
      dc += rows.rows;
    }
    rows.out += rows.rows * rows.out_stride;
    rows.dout += rows.rows * rows.dout_stride;
    rows.logits += rows.rows * rows.logits_stride;
    rows.dlogits += rows.rows * rows.dlogits_stride;
  }
  return sum;
}

template <class Gradient, class T, class X>
double gradient_of_group(const SoftmaxGradientKernels<T>& kernels, const GradientRows<X>& rows, double c,
                         double* dc) {
  if constexpr (std::same_as<X, T>) {
    const GradientFactor<T> factor(c);
    if (rows.n <= kernels.gradients.longest && factor.applies())
      return gradient_of_short_rows<Gradient>(kernels.gradients, rows, factor.factor(), dc);
  }
  return rows.logits == nullptr ? gradient_of_rows<Gradient, false>(kernels, rows, c, dc)
                                : gradient_of_rows<Gradient, true>(kernels, rows, c, dc);
}

SSMAX_END

SSMAX_BEGIN_COMPILED

template <class X>
double softmax_gradient(const shared::SoftmaxGradientKernels<ComputeType<X>>& kernels,
                        const shared::GradientRows<X>& rows, double c, double* dc) {
  return detail::gradient_of_group<detail::SoftmaxGradient>(kernels, rows, c, dc);
}

template <class X>
double log_softmax_gradient(const shared::SoftmaxGradientKernels<ComputeType<X>>& kernels,
                            const shared::GradientRows<X>& rows, double c, double* dc) {
  return detail::gradient_of_group<detail::LogSoftmaxGradient>(kernels, rows, c, dc);
}

SSMAX_END
