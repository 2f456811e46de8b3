// Softmax of many short rows.
#pragma once

#include "exp.hpp"

SSMAX_BEGIN_SHARED

template <class T>
struct ShortRowKernels {
  /// Rows up to this length come here: a vector's worth of them, in and out, fills a first-level cache.
  /// Vectors of one lane hold no more than one row: there rows of up to 4 elements come here, for which
  /// `group` saves a call for each row.
  index_t longest;

  /// Softmax of several short rows of n elements, a vector's worth of rows at a time. Returns how many rows
  /// are done: it stops before rows that need the general path (NaN, no finite maximum, |in·scale| >= 2^20)
  /// and before the remainder.
  index_t (*group)(const T* in, index_t in_stride, T* out, index_t out_stride, index_t rows, index_t n,
                   Scale<T> scale);
  /// The same for contiguous rows of n = 1, 2, 4, … < width elements, several to a vector, remainder
  /// included.
  index_t (*packed)(const T* in, T* out, index_t rows, index_t n, Scale<T> scale);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/short_rows.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
