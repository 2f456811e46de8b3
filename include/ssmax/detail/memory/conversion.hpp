// Converts between storage types and compute types.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "../../storage.hpp"
#include "../kernels/convert.hpp"

SSMAX_BEGIN_DETAIL

/// Rounds a group of numbers as ggml does: eight_bit.hpp.
inline Q8_0 rounded_group(const float* in) {
  float most = 0, sum = 0;  // the sum of x · 0 is NaN if a number is not finite
  for (index_t i = 0; i < Q8_0::group; ++i) {
    most = std::max(most, std::abs(in[i]));
    sum += in[i] * 0;
  }
  const float factor = most / Int8::largest, inverse = factor > 0 ? 1 / factor : 0;
  Q8_0 result;
  result.scale = half(std::isnan(sum) ? sum : factor);
  if (std::isnan(sum) || inverse > std::numeric_limits<float>::max()) return result;
  for (index_t i = 0; i < Q8_0::group; ++i)
    result.values[i].value = static_cast<std::int8_t>(std::round(in[i] * inverse));
  return result;
}

template <class X>
void widen(const X* in, index_t n, float* out) {
  if constexpr (EightBitStorage<X>) {
    kernels<EightBitKernels<X>>().widen(in, n, out);
  } else if constexpr (std::same_as<X, Q8_0>) {
    kernels<ConversionKernels>().widen_q8_0(in, n, out);
  } else if constexpr (std::same_as<X, half>) {
    kernels<ConversionKernels>().widen_half(in, n, out);
  } else {
    kernels<ConversionKernels>().widen_bfloat16(in, n, out);
  }
}

template <class X>
void narrow(const float* in, index_t n, X* out) {
  if constexpr (std::same_as<X, Q8_0>) {
    for (index_t i = 0; i < n; i += Q8_0::group) *out++ = rounded_group(in + i);
  } else if constexpr (std::same_as<X, half>) {
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
  if constexpr (std::same_as<X, T>) return out;
  return scratch;
}

/// Stores a block that was computed in staging(out, scratch) to `out`.
template <class T, class X>
void narrow_to(X* out, index_t n, const T* staged) {
  if constexpr (!std::same_as<X, T>) StorageTraits<X>::store(staged, n, out);
}

SSMAX_END
