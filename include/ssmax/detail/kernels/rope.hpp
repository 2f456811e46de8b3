// Declares the kernels that rotate pairs of channels.
#pragma once

#include "lanes.hpp"

SSMAX_BEGIN_SHARED

template <class T>
struct RopeKernels {
  /// Rotates `rows` rows of 2·half elements: (a, b) = (in[i], in[i + half]) -> (a·cos - b·sin, b·cos +
  /// a·sin). The tables advance by table_stride per row. `inverse` rotates by the opposite angle.
  void (*rotate_half_split)(const T* in, index_t in_stride, T* out, index_t out_stride, index_t rows,
                            index_t half, const T* cosine, const T* sine, index_t table_stride, bool inverse);
  /// Rotates neighbours (in[2i], in[2i + 1]) in the same way. The tables hold every cosine twice, and the
  /// sines as -sin, +sin.
  void (*rotate_interleaved)(const T* in, index_t in_stride, T* out, index_t out_stride, index_t rows,
                             index_t half, const T* cosine, const T* sine, index_t table_stride,
                             bool inverse);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/rope.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
