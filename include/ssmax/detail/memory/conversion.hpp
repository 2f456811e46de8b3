// Converts between storage types and compute types.
#pragma once

#include "../../storage.hpp"
#include "../kernels/convert.hpp"

SSMAX_BEGIN_DETAIL

template <class X>
void widen(const X* in, index_t n, float* out) {
  if constexpr (EightBitStorage<X>) {
    kernels<EightBitKernels<X>>().widen(in, n, out);
  } else if constexpr (std::same_as<X, half>) {
    kernels<ConversionKernels>().widen_half(in, n, out);
  } else {
    kernels<ConversionKernels>().widen_bfloat16(in, n, out);
  }
}

template <class X>
void narrow(const float* in, index_t n, X* out) {
  if constexpr (std::same_as<X, half>) {
    kernels<ConversionKernels>().narrow_half(in, n, out);
  } else {
    kernels<ConversionKernels>().narrow_bfloat16(in, n, out);
  }
}

/// Returns the row's elements as T: `in` itself if its elements are T, else a widened copy in `scratch`.
template <class T, class X>
const T* widened(const X* in, index_t n, T* scratch) {
  if constexpr (std::same_as<X, T>) {
    return in;
  } else {
    StorageTraits<X>::load(in, n, scratch);
    return scratch;
  }
}

/// Returns the row's elements as T, as widened does. It also accepts types without a conversion kernel.
template <class T, class X>
const T* converted(const X* in, index_t n, T* scratch) {
  if constexpr (std::same_as<ComputeType<X>, T>) {
    return widened(in, n, scratch);
  } else {
    for (index_t i = 0; i < n; ++i) scratch[i] = static_cast<T>(in[i]);
    return scratch;
  }
}

/// Returns the place to compute a block that ends in `out`: `out` if it holds T, else `scratch`. Call
/// narrow_to afterwards.
template <class T, class X>
T* staging(X* out, T* scratch) {
  if constexpr (std::same_as<X, T>) {
    return out;
  } else {
    return scratch;
  }
}

/// Stores a block that was computed in staging(out, scratch) to `out`.
template <class T, class X>
void narrow_to(X* out, index_t n, const T* staged) {
  if constexpr (!std::same_as<X, T>) StorageTraits<X>::store(staged, n, out);
}

SSMAX_END
