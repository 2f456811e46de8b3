// Declares what the texts of all kernels use: partial vectors, reductions and transposition.
#pragma once

#include "../dispatch/kernels.hpp"

SSMAX_BEGIN_SHARED

/// Number of vectors of queries in a group (prefill.inl).
inline constexpr int tile_vectors = 3;

/// Rows of numbers, `stride` numbers from one row to the next.
template <class T>
struct StridedRows {
  T* first = nullptr;
  index_t stride = 0;

  SSMAX_INLINE T* operator[](index_t i) const { return first + i * stride; }
};

/// `count` keys or values of `width` channels, `stride` elements from one to the next. Kernels prefetch the rows that
/// lie `ahead` bytes later, unless `ahead` is 0. They may lie past the end.
template <class X>
struct KeyRows {
  using Element = X;
  const X* first;
  index_t stride, count, width, ahead = 0;

  SSMAX_INLINE const X* operator[](index_t i) const { return first + i * stride; }
  SSMAX_INLINE std::uintptr_t later(index_t i) const {
    return reinterpret_cast<std::uintptr_t>(first + i * stride) + static_cast<std::uintptr_t>(ahead);
  }
  SSMAX_INLINE KeyRows part(index_t begin, index_t size) const {
    return {first + begin * stride, stride, size, width, ahead};
  }
  SSMAX_INLINE KeyRows without_prefetch() const { return {first, stride, count, width}; }
  SSMAX_INLINE bool prefetches() const { return ahead != 0; }
  /// Returns the same rows with their type of elements, if X is void.
  template <class E>
  SSMAX_INLINE KeyRows<E> as() const {
    return {static_cast<const E*>(first), stride, count, width, ahead};
  }
};

SSMAX_END

#define SSMAX_KERNELS "../kernels/lanes.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
