// Attention of many queries, backward.
#pragma once

#include "prefill.hpp"

SSMAX_BEGIN_SHARED

/// Attention's tiles, backward (prefill_backward.inl); tiles are [key][group].
template <class T>
struct PrefillBackwardKernels {
  /// One vector of queries: w = 2^(s - shift) in place of s, u = w·(dp - delta) in place of dp, and 0 where
  /// w is 0. |shift| < 2^20, s - shift <= 1.
  void (*gradients)(T* s, T* dp, index_t keys, const T* shift, const T* delta);
  /// One vector of queries: dc[·] = Σ u·z, then u = c·u·slope. A u of 0 adds nothing and stays 0,
  /// whatever the others are.
  void (*score_gradients)(T* u, index_t keys, const T* z, const T* slope, const T* c, T* dc);
  /// out[keys][pitch] += a[keys][·] · b[lanes][pitch]. pitch is whole vectors, keys a
  /// multiple of PrefillKernels::rows.
  void (*add_product)(const T* a, index_t lanes, index_t keys, const T* b, index_t pitch, T* out);
  /// out[r][c] = in[r][c] · factor[r], and 0 up to out's pitch.
  void (*scale_rows)(const T* const* in, index_t rows, index_t columns, const T* factor, T* out,
                     index_t pitch);
  /// out[rows][columns] = in
  void (*copy_rows)(const T* in, index_t in_stride, index_t rows, index_t columns, T* out,
                    index_t out_stride);
  /// out[rows][columns] += in
  void (*add_rows)(const T* in, index_t in_stride, index_t rows, index_t columns, T* out, index_t out_stride);
};

/// Where one vector of queries leaves what the products of a backward in 16 bits take.
template <class T, class E>
struct RoundedGradients {
  E *weights, *gradients;  // [key][stride]
  index_t stride;
  E* pairs;         // [key / 2][group][2]: the gradients once more
  const T* factor;  // of the gradients, a lane each
  T* dc;            // out, if given: Σ u·z, of numbers that were not rounded
};

/// One vector of queries whose logits reach the softmax as they are, a lane each: s = z · multiplier - offset,
/// w = 2^(s - shift) and u = w · (dp - delta).
template <class T>
struct PlainLogits {
  const T *multiplier, *offset, *shift, *delta;
};

/// Attention's tiles, backward, whose products take E: what PrefillKernels<T, E> does not have. Of the
/// targets that have those.
template <class T, class E>
struct RoundedBackwardKernels {
  /// As PrefillBackwardKernels::gradients; keys is a multiple of 4.
  void (*gradients)(T* s, T* dp, index_t keys, const T* shift, const T* delta);
  /// One vector of queries: weights w, gradients u · factor. A u of 0 adds nothing to dc and stays 0.
  void (*round)(const T* w, const T* u, const T* z, index_t keys, const RoundedGradients<T, E>& to);
  /// What place, gradients and round do to plain logits z[key][·] and dp[key][·] = dout·v, in one go and to the same
  /// bits; keys is a multiple of 4.
  void (*form)(const T* z, const T* dp, index_t keys, const PlainLogits<T>& logits,
               const RoundedGradients<T, E>& to);
  /// out[keys][pitch] += a[keys][·] · b[lanes / 2][pitch][2]: keys and lanes are multiples of
  /// PrefillKernels::rows and depth.
  void (*add_product)(const E* a, index_t a_stride, index_t lanes, index_t keys, const E* b, index_t pitch,
                      T* out);
  /// out[c][2] = low[c], high[c], and 0 up to out's pitch
  void (*pair_rows)(const E* low, const E* high, index_t columns, E* out, index_t pitch);
};

template <class T>
inline constexpr bool has_extensions<RoundedBackwardKernels<T, bfloat16>> = true;

SSMAX_END

#define SSMAX_KERNELS "../kernels/prefill_backward.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS

#define SSMAX_PAIR_KERNELS "../kernels/prefill_backward_pairs.inl"
#include "../dispatch/for_each_extension.inl"
#undef SSMAX_PAIR_KERNELS

#define SSMAX_MATRIX_KERNELS "../kernels/prefill_backward_matrix.inl"
#include "../dispatch/for_each_matrix.inl"
#undef SSMAX_MATRIX_KERNELS
