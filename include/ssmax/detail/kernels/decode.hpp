// Attention of few queries.
#pragma once

#include "lanes.hpp"

namespace ssmax {
inline namespace SSMAX_DATA_NAMESPACE {
namespace SSMAX_VISIBLE shared {

/// Attention of few queries against keys and values in storage type X. Rows of q are filled
/// up with 0 to whole vectors.
template <class T, class X>
struct DecodeKernels {
  /// s[rows × keys] = q[rows × d] · k[keys × d]ᵀ
  void (*logits)(const T* q, index_t q_stride, index_t rows, const X* k, index_t k_stride, index_t keys,
                 index_t d, T* s, index_t s_stride);
  /// o[rows × dv] += s[rows × keys] · v[keys × dv]
  void (*accumulate)(const T* s, index_t s_stride, index_t rows, index_t keys, const X* v, index_t v_stride,
                     index_t dv, T* o, index_t o_stride);
};

}  // namespace shared
}  // namespace SSMAX_DATA_NAMESPACE
}  // namespace ssmax

#define SSMAX_KERNELS "../kernels/decode.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
