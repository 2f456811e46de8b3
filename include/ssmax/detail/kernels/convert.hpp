// To and from storage of 16 bits.
#pragma once

#include "lanes.hpp"

SSMAX_BEGIN_SHARED

/// To and from storage in half precision; T is float.
template <class T>
struct ConversionKernels {
  void (*widen_half)(const half* in, index_t n, T* out);
  void (*widen_bfloat16)(const bfloat16* in, index_t n, T* out);
  void (*narrow_half)(const T* in, index_t n, half* out);
  void (*narrow_bfloat16)(const T* in, index_t n, bfloat16* out);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/convert.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
