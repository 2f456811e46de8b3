// Kernels on one row: its maximum, its exponentials, multiples.
#pragma once

#include "exp.hpp"

SSMAX_BEGIN_SHARED

template <class T>
struct Extremum {
  T value;
  bool has_nan;
};

/// Work on two other rows of the same length, done between one row's exponentials: the maximum of
/// `next`, and `waiting` *= factor. Null leaves either out. Exponentials are bound by the FMA units,
/// this work by loads and stores.
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

  /// Largest element (-inf if none), and whether any is NaN.
  Extremum<T> (*max)(const T* in, index_t n);
  /// out = 2^(in·scale - shift); returns the sum. Needs in·scale - shift <= 1 everywhere; flushes below
  /// 2^-125.5 to 0.
  T (*exp_store)(const T* in, index_t n, Scale<T> scale, T shift, T* out, OverlappedWork<T>& overlapped);
  /// out = factor · in.
  void (*multiply)(const T* in, index_t n, T factor, T* out);
  /// out = c·(in - origin) + offset; -inf stays -inf for every c. Rounds the difference, the product with
  /// the offset, and nothing else.
  void (*affine)(const T* in, index_t n, T origin, T c, T offset, T* out);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/rows.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
