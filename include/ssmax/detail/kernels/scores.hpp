// Declares the kernels of score functions, which compute vectors of logits.
#pragma once

#include "exp.hpp"

SSMAX_BEGIN_SHARED

/// Kernels of score functions (kernels/scores.inl). `s[key][·]` is one vector of queries of a tile. `s[key]`
/// are the logits of one query.
template <class T>
struct ScoreKernels {
  /// Writes out = cap·tanh(in / cap). -inf and NaN stay. The relative error is below 4 ulp for small and for
  /// large `in`.
  void (*softcap)(const T* in, index_t n, T cap, T* out);
  /// Multiplies slope by the softcap's derivative at the logit whose result is `capped`.
  void (*softcap_slope)(const T* capped, index_t n, T cap, T* slope);
  /// Computes s[key][·] += slope[·] · (first[·] + key).
  void (*ramp)(T* s, index_t keys, const T* slope, const T* first);
  /// Computes s[key][·] = a·(s[key][·] - a) + 1 with a = factors[key · step + ·]. Multiplies slope by a,
  /// unless slope is null. -inf stays.
  void (*scale_by_distance)(T* s, T* slope, index_t keys, const T* factors, index_t step);
  /// Computes s[key][·] += bias[key · width + ·].
  void (*add)(T* s, index_t keys, const T* bias);
  /// Computes s[key] += slope · distance[key], rounded once.
  void (*ramp_row)(T* s, index_t keys, T slope, const T* distance);
  /// Computes s[key] = a·(s[key] - a) + 1 with a = factors[key]. -inf stays.
  void (*scale_row_by_distance)(T* s, index_t keys, const T* factors);
  /// Computes s[key] += bias[key].
  void (*add_row)(T* s, index_t keys, const T* bias);
  /// Computes s[key][·] *= factor[·]. -inf stays -inf.
  void (*multiply)(T* s, index_t keys, const T* factor);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/scores.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
