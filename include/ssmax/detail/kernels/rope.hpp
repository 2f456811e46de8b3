// Declares the kernels that rotate pairs of channels.
#pragma once

#include "lanes.hpp"

SSMAX_BEGIN_SHARED

/// The angles of a rotation of rows of 2·half channels. The tables advance by `stride` numbers per row. `inverse`
/// rotates by the opposite angles.
template <class T>
struct Angles {
  const T *cosine, *sine;
  index_t stride;
  index_t half;
  bool inverse;
};

template <class T>
struct RopeKernels {
  /// Rotates `rows` rows of 2·half elements: (a, b) = (in[i], in[i + half]) -> (a·cos - b·sin, b·cos + a·sin).
  void (*rotate_half_split)(StridedRows<const T> in, StridedRows<T> out, index_t rows, const Angles<T>& by);
  /// Rotates neighbours (in[2i], in[2i + 1]) in the same way. The tables hold every cosine twice, and the
  /// sines as -sin, +sin.
  void (*rotate_interleaved)(StridedRows<const T> in, StridedRows<T> out, index_t rows, const Angles<T>& by);
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/rope.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
