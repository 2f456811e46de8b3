// Scores on vectors of logits.
#pragma once

#include "exp.hpp"

SSMAX_BEGIN_SHARED

/// Scores (kernels/scores.inl). `s[key][·]` is one vector of queries of a tile; `s[key]` are the logits of one query.
template <class T>
struct ScoreKernels {
  /// out = cap·tanh(in / cap); -inf and NaN stay. For small in and large, relative error below 4 ulp.
  void (*softcap)(const T* in, index_t n, T cap, T* out);
  /// slope *= the softcap's derivative where it made `capped`
  void (*softcap_slope)(const T* capped, index_t n, T cap, T* slope);
  /// s[key][·] += slope[·] · (first[·] + key)
  void (*ramp)(T* s, index_t keys, const T* slope, const T* first);
  /// s[key][·] = a·(s[key][·] - a) + 1 with a = factors[key · step + ·], and slope, unless null, times a. -inf
  /// stays.
  void (*stretch)(T* s, T* slope, index_t keys, const T* factors, index_t step);
  /// s[key][·] += bias[key · width + ·]
  void (*add)(T* s, index_t keys, const T* bias);
  /// s[key] += slope · distance[key], rounded once
  void (*ramp_row)(T* s, index_t keys, T slope, const T* distance);
  /// s[key] = a·(s[key] - a) + 1 with a = factors[key]. -inf stays.
  void (*stretch_row)(T* s, index_t keys, const T* factors);
  /// s[key] += bias[key]
  void (*add_row)(T* s, index_t keys, const T* bias);
  /// s[key][·] *= factor[·], but -inf stays -inf
  void (*multiply)(T* s, index_t keys, const T* factor);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/scores.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
