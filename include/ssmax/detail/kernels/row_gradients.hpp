// Declares the kernels for gradients of rows: of softmax, and of its logarithm.
#pragma once

#include "dot.hpp"
#include "exp.hpp"

SSMAX_BEGIN_SHARED

/// The arrays of `rows` rows of n elements. Each array has its own stride from row to row. A single row needs
/// no strides.
template <class X>
struct GradientRows {
  const X *out, *dout, *logits;  // logits is null if dc is not wanted
  X* dlogits;                    // may be out, dout or logits
  index_t out_stride = 0, dout_stride = 0, logits_stride = 0, dlogits_stride = 0;
  index_t rows = 1, n = 0;
};

template <class T>
struct RowGradientKernels {
  /// Returns the sum of the elements of `in` whose log-probability is not -inf.
  T (*sum_unmasked)(const T* in, const T* log_p, index_t n);
  /// Writes dlogits = c·u with u = out·(dout - mean) for one row. Returns Σ u·logits, or 0 without logits.
  T (*backward)(const GradientRows<T>& row, T mean, T c);
  /// Writes dlogits = c·u with u = dout - total·p for one row, and u = 0 where out = log p is -inf. Returns what
  /// `backward` returns.
  T (*log_backward)(const GradientRows<T>& row, const T* p, T total, T c);

  /// Longest row of backward_rows and log_backward_rows.
  index_t longest;

  /// Computes `backward` of all rows, with each row's mean. If rows.logits is not null, writes Σ u·logits of each
  /// `rows_of_sum` rows to `sums`, the last sum of fewer rows. dlogits of a row does not depend on the number of rows.
  void (*backward_rows)(const GradientRows<T>& rows, T c, index_t rows_of_sum, T* sums);
  /// Computes `log_backward` of all rows, with each row's total, and writes `sums` as backward_rows does.
  void (*log_backward_rows)(const GradientRows<T>& rows, T c, index_t rows_of_sum, T* sums);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/row_gradients.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
