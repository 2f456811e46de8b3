// Declares the kernels that compute softmax of many short rows.
#pragma once

#include "exp.hpp"

SSMAX_BEGIN_SHARED

/// A row of n elements with its own scale. Its result has `masked` zeros after the n weights.
template <class T>
struct RaggedRow {
  const T* in;
  T* out;
  index_t n, masked;
  Scale<T> scale;
};

template <class T>
struct ShortRowKernels {
  /// Longest row that these kernels compute: as many such rows as a vector has lanes, in and out, fill a
  /// first-level cache. Exception: on targets with one lane it is 4, because `group` then saves a call per
  /// row.
  index_t longest;

  /// Computes softmax of several short rows of n elements, as many rows at a time as a vector has lanes.
  /// Returns the number of rows done. Stops before the remainder, and before rows that need the general path:
  /// rows with NaN, without a finite maximum, or with |in·scale| >= 2^20.
  index_t (*group)(const T* in, index_t in_stride, T* out, index_t out_stride, index_t rows, index_t n,
                   Scale<T> scale);
  /// Computes softmax of contiguous rows of n = 1, 2, 4, … < width elements, several per vector, including
  /// the remainder. Returns the number of rows done.
  index_t (*packed)(const T* in, T* out, index_t rows, index_t n, Scale<T> scale);
  /// Computes softmax of at most a vector's lanes of rows of different lengths n >= 1. Returns false and writes
  /// no row if a row needs the general path.
  bool (*ragged)(const RaggedRow<T>* rows, index_t count);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/short_rows.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
