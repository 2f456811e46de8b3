// Rotations of pairs of channels.
#pragma once

#include "lanes.hpp"

SSMAX_BEGIN_SHARED

template <class T>
struct RopeKernels {
  /// `rows` rows of 2·half elements: (a, b) = (in[i], in[i + half]) -> (a·cos - b·sin, b·cos + a·sin).
  /// Tables advance by table_stride a row. inverse: the rotation by the opposite angle.
  void (*rotate_half_split)(const T* in, index_t in_stride, T* out, index_t out_stride, index_t rows,
                            index_t half, const T* cosine, const T* sine, index_t table_stride, bool inverse);
  /// The same for neighbours (in[2i], in[2i + 1]); tables hold every cosine twice and the sines as -sin,
  /// +sin.
  void (*rotate_interleaved)(const T* in, index_t in_stride, T* out, index_t out_stride, index_t rows,
                             index_t half, const T* cosine, const T* sine, index_t table_stride,
                             bool inverse);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/rope.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
