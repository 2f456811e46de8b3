// Attention of many queries, backward.
#pragma once

#include "prefill.hpp"

namespace ssmax {
inline namespace SSMAX_DATA_NAMESPACE {
namespace SSMAX_VISIBLE shared {

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

}  // namespace shared
}  // namespace SSMAX_DATA_NAMESPACE
}  // namespace ssmax

#define SSMAX_KERNELS "../kernels/prefill_backward.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
