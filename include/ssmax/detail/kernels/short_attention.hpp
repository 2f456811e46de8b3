// Declares the kernels of attention with few keys, where the weights of a query are final at once.
#pragma once

#include "lanes.hpp"
#include "prefill.hpp"

SSMAX_BEGIN_SHARED

/// The kernel of attention's second product for few keys.
template <class T>
struct ShortAttentionKernels {
  /// Writes, for one vector of queries, out[query][·] = factor[query] · Σ_keys s[key][query] · v[key][·].
  /// Only the first `queries` queries are written. Rows of v must be readable up to whole vectors.
  void (*weigh_values)(const T* s, index_t queries, const KeyRows<T>& v, const T* factor, T* const* out);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/short_attention.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
