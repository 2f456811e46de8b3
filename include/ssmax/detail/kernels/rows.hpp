// Declares the kernels for one row: its maximum, its exponentials and its multiples.
#pragma once

#include "exp.hpp"

SSMAX_BEGIN_SHARED

template <class T>
struct Extremum {
  T value;
  bool has_nan;
};

/// Work on two other rows of the same length, done between the exponentials of a row: the maximum of `next`,
/// and `waiting` *= factor. A null pointer leaves out its work. The FMA units bound exponentials, loads and
/// stores bound this work.
template <class T>
struct OverlappedWork {
  const T* next = nullptr;
  Extremum<T> next_top{};  // out: the maximum of `next`
  T* waiting = nullptr;
  T factor{};
};

template <class T>
struct RowKernels {
  int width;  // lanes of a vector

  /// Returns the largest element (-inf for an empty row), and whether an element is NaN.
  Extremum<T> (*max)(const T* in, index_t n);
  /// Writes out = 2^(in·scale - shift) and returns the sum. Requires in·scale - shift <= 1 for every element.
  /// Results below 2^-125.5 (double: 2^-1021.5) become 0.
  T (*exp_store)(const T* in, index_t n, Scale<T> scale, T shift, T* out, OverlappedWork<T>& overlapped);
  /// Writes out = factor · in.
  void (*multiply)(const T* in, index_t n, T factor, T* out);
  /// Writes out = c·(in - origin) + offset. -inf stays -inf for every c. Rounds twice: the difference, and
  /// the product plus the offset.
  void (*affine)(const T* in, index_t n, T origin, T c, T offset, T* out);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/rows.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
