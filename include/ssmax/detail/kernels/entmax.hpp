// Kernels of entmax: a row above a threshold, and its gradient.
#pragma once

#include "exp.hpp"

SSMAX_BEGIN_SHARED

/// What lies above a threshold: how many elements, and the sums of their heights and of the heights' squares.
struct SupportSums {
  double count, sum, squares;
};

/// Over a row's support, w being dy/dx / power (1 or √y): Σ w and Σ w·dy.
struct WeightSums {
  double weights, weighed;
};

/// A threshold as high + low: what lies above it is small, and a rounded threshold would make all of it too
/// large or too small.
template <class T>
struct Threshold {
  T high, low;
};

/// The powers: [0] is 1, sparsemax's, [1] is 2, entmax-1.5's. r is the height of an element above the threshold,
/// max(0, in·scale - threshold), and y = r^power.
template <class T>
struct EntmaxKernels {
  SupportSums (*above)(const T* in, index_t n, T scale, Threshold<T> threshold);
  /// out = y
  void (*store[2])(const T* in, index_t n, T scale, Threshold<T> threshold, T* out);
  WeightSums (*weigh[2])(const T* y, const T* dy, index_t n);
  /// u = w·(dy - mean): dz = c·u. Returns Σ u·z where y is not 0, or 0 where z is null.
  T (*backward[2])(const T* y, const T* dy, const T* z, index_t n, T mean, T c, T* dz);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/entmax.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
