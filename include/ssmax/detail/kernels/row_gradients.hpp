// The gradient of rows: of softmax, and of its logarithm.
#pragma once

#include "lanes.hpp"

SSMAX_BEGIN_SHARED

template <class T>
struct RowGradientKernels {
  /// The sum of the elements of `in` whose log-probability is not -inf.
  T (*sum_unmasked)(const T* in, const T* log_p, index_t n);
  /// u = y·(dy - mean); dz = c·u; returns the sum of u·z, or 0 where z is null.
  T (*backward)(const T* y, const T* dy, const T* z, index_t n, T mean, T c, T* dz);
  /// u = dy - total·p, 0 where log_p is -inf; dz = c·u; returns the sum of u·z, or 0 where z is null.
  T (*log_backward)(const T* log_p, const T* p, const T* dy, const T* z, index_t n, T total, T c, T* dz);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/row_gradients.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
