// Declares the kernel of the dot product of two rows.
#pragma once

#include "lanes.hpp"

SSMAX_BEGIN_SHARED

template <class T>
struct DotKernels {
  T (*dot)(const T* a, const T* b, index_t n);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/dot.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
