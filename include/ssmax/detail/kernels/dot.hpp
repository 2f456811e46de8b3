// The dot product of two rows.
#pragma once

#include "lanes.hpp"

SSMAX_BEGIN
inline namespace SSMAX_DATA_NAMESPACE {
namespace SSMAX_VISIBLE shared {

template <class T>
struct DotKernels {
  T (*dot)(const T* a, const T* b, index_t n);
};

}  // namespace shared
}  // namespace SSMAX_DATA_NAMESPACE
SSMAX_END

#define SSMAX_KERNELS "../kernels/dot.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
