// Declares the kernels of entmax: a row above a threshold, and its gradient.
#pragma once

#include "exp.hpp"

SSMAX_BEGIN_SHARED

/// The sums over the elements above a threshold: their number, their heights and the squares of their
/// heights.
struct SupportSums {
  double count, sum, squares;
};

/// The sums over a row's support: Σ w and Σ w·dy. w is dy/dx / power (1 or √y).
struct WeightSums {
  double weights, weighed;
};

/// A threshold in two parts, high + low. The heights above it are small, so a rounded threshold would make
/// all of them too large or too small.
template <class T>
struct Threshold {
  T high, low;
};

/// Kernels of entmax. Index [0] is power 1 (sparsemax), index [1] is power 2 (entmax-1.5). r is the height of
/// an element above the threshold, max(0, in·scale - threshold), and y = r^power.
template <class T>
struct EntmaxKernels {
  SupportSums (*above)(const T* in, index_t n, T scale, Threshold<T> threshold);
  /// Writes out = y.
  void (*store[2])(const T* in, index_t n, T scale, Threshold<T> threshold, T* out);
  WeightSums (*weigh[2])(const T* y, const T* dy, index_t n);
  /// Writes dz = c·u with u = w·(dy - mean). Returns Σ u·z over the elements with y other than 0, or 0 if z
  /// is null.
  T (*backward[2])(const T* y, const T* dy, const T* z, index_t n, T mean, T c, T* dz);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/entmax.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
