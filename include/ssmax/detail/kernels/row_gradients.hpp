// Declares the kernels for gradients of rows: of softmax, and of its logarithm.
#pragma once

#include "lanes.hpp"

SSMAX_BEGIN_SHARED

template <class T>
struct RowGradientKernels {
  /// Returns the sum of the elements of `in` whose log-probability is not -inf.
  T (*sum_unmasked)(const T* in, const T* log_p, index_t n);
  /// Writes dz = c·u with u = y·(dy - mean). Returns Σ u·z, or 0 if z is null.
  T (*backward)(const T* y, const T* dy, const T* z, index_t n, T mean, T c, T* dz);
  /// Writes dz = c·u with u = dy - total·p, and u = 0 where log_p is -inf. Returns Σ u·z, or 0 if z is null.
  T (*log_backward)(const T* log_p, const T* p, const T* dy, const T* z, index_t n, T total, T c, T* dz);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/row_gradients.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
