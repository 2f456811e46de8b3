// Declares the kernels for gradients of rows: of softmax, and of its logarithm.
#pragma once

#include "dot.hpp"
#include "exp.hpp"

SSMAX_BEGIN_SHARED

/// The arrays of `rows` rows of n elements. Each array has its own stride from row to row.
template <class X>
struct GradientRows {
  const X *out, *dout, *logits;  // logits is null if dc is not wanted
  X* dlogits;                    // may be out or dout
  index_t out_stride, dout_stride, logits_stride, dlogits_stride;
  index_t rows, n;
};

template <class T>
struct RowGradientKernels {
  /// Returns the sum of the elements of `in` whose log-probability is not -inf.
  T (*sum_unmasked)(const T* in, const T* log_p, index_t n);
  /// Writes dz = c·u with u = y·(dy - mean). Returns Σ u·z, or 0 if z is null.
  T (*backward)(const T* y, const T* dy, const T* z, index_t n, T mean, T c, T* dz);
  /// Writes dz = c·u with u = dy - total·p, and u = 0 where log_p is -inf. Returns Σ u·z, or 0 if z is null.
  T (*log_backward)(const T* log_p, const T* p, const T* dy, const T* z, index_t n, T total, T c, T* dz);

  /// Longest row of backward_rows and log_backward_rows.
  index_t longest;

  /// Computes `backward` of all rows, with each row's mean. If rows.logits is not null, writes each row's
  /// Σ u·sign·z to `sums`, where sign is -1 for a negative c and 1 otherwise. A row's result does not depend
  /// on the number of rows.
  void (*backward_rows)(const GradientRows<T>& rows, T c, T* sums);
  /// Computes `log_backward` of all rows, with each row's total, and writes `sums` as backward_rows does.
  void (*log_backward_rows)(const GradientRows<T>& rows, T c, T* sums);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/row_gradients.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
