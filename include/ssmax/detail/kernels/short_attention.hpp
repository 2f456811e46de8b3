// Attention where a query's weights are final as soon as they are formed.
#pragma once

#include "prefill.hpp"

SSMAX_BEGIN_SHARED

/// The second product of attention.
template <class T>
struct ShortAttentionKernels {
  /// One vector of queries: out[query][·] = factor[query] · Σ_keys s[key][query] · v[key][·], for the first
  /// `queries` of them. v's rows are `channels` long and may be read up to whole vectors.
  void (*weigh_values)(const T* s, index_t queries, index_t keys, const T* v, index_t v_stride,
                       index_t channels, const T* factor, T* const* out);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/short_attention.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
