// To and from storage of 16 bits.
#pragma once

#include "lanes.hpp"

SSMAX_BEGIN_SHARED

/// Widen to float and round to storage of 16 bits.
struct ConversionKernels {
  void (*widen_half)(const half* in, index_t n, float* out);
  void (*widen_bfloat16)(const bfloat16* in, index_t n, float* out);
  void (*narrow_half)(const float* in, index_t n, half* out);
  void (*narrow_bfloat16)(const float* in, index_t n, bfloat16* out);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/convert.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
