// The dot product of two rows.
#pragma once

#include "lanes.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

template <class T>
struct DotKernels {
  T (*dot)(const T* a, const T* b, index_t n);
};

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax

#define SSMAX_KERNELS "../kernels/dot.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
