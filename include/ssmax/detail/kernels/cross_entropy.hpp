// Declares the kernel of cross-entropy with label smoothing, class weights, a softcap or a z-loss.
#pragma once

#include "lanes.hpp"

SSMAX_BEGIN_SHARED

/// A block of one row: logits x, after the softcap, and their exponentials e.
template <class T>
struct LossBlock {
  const T *x, *e, *weights;  // weights is null if every weight is 1
  T* out;                    // null if only the distance is wanted; may be x or e
  index_t n;
  T origin, factor, share, inverse_cap;  // inverse_cap is 0 without a softcap
};

template <class T>
struct CrossEntropyKernels {
  /// Writes out = (1 - (x · inverse_cap)²) · (factor·e - share·weight). Returns Σ weight · (origin - x). A weight of 0
  /// adds 0, also for x = -inf.
  double (*loss_block)(const LossBlock<T>& block);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/cross_entropy.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
