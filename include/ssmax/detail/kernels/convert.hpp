// Declares the kernels that convert from and to 16-bit storage types, from 8-bit storage types and from Q8_0.
#pragma once

#include "lanes.hpp"

SSMAX_BEGIN_SHARED

/// Kernels that widen 16-bit storage and Q8_0 to float and round float to 16-bit storage.
struct ConversionKernels {
  void (*widen_half)(const half* in, index_t n, float* out);
  void (*widen_bfloat16)(const bfloat16* in, index_t n, float* out);
  /// Widens n / 32 groups.
  void (*widen_q8_0)(const Q8_0* in, index_t n, float* out);
  void (*narrow_half)(const float* in, index_t n, half* out);
  void (*narrow_bfloat16)(const float* in, index_t n, bfloat16* out);
};

/// Kernels of storage of 8 bits with a factor per row.
template <class X>
struct EightBitKernels {
  /// Widens n elements to float. The result lacks the factor.
  void (*widen)(const X* in, index_t n, float* out);
  /// Computes out[i] = in[i] · factors[i] for n logits or weights of a query.
  void (*multiply)(const float* in, const float* factors, index_t n, float* out);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/convert.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
