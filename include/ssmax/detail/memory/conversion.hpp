// From storage to arithmetic and back.
#pragma once

#include "../../storage.hpp"
#include "../kernels/convert.hpp"

SSMAX_BEGIN_DETAIL

template <class X>
void widen(const X* in, index_t n, float* out) {
  if constexpr (std::same_as<X, half>) {
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

/// The row's elements as T: where they lie if they are T already, else widened into scratch.
template <class T, class X>
const T* widened(const X* in, index_t n, T* scratch) {
  if constexpr (std::same_as<X, T>) {
    return in;
  } else {
    StorageTraits<X>::load(in, n, scratch);
    return scratch;
  }
}

/// The same for numbers of any type, which have no kernel to convert them.
template <class T, class X>
const T* converted(const X* in, index_t n, T* scratch) {
  if constexpr (std::same_as<Compute<X>, T>) {
    return widened(in, n, scratch);
  } else {
    for (index_t i = 0; i < n; ++i) scratch[i] = static_cast<T>(in[i]);
    return scratch;
  }
}

/// Where to compute a block that ends in `out`: in place if it is T, else in scratch, for narrow_to to bring
/// over.
template <class T, class X>
T* staging(X* out, T* scratch) {
  if constexpr (std::same_as<X, T>) {
    return out;
  } else {
    return scratch;
  }
}

/// Stores what was computed in staging(out, scratch).
template <class T, class X>
void narrow_to(X* out, index_t n, const T* staged) {
  if constexpr (!std::same_as<X, T>) StorageTraits<X>::store(staged, n, out);
}

SSMAX_END
