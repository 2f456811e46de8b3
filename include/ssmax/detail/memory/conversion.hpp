// From storage to arithmetic and back.
#pragma once

#include "../kernels/convert.hpp"
#include "storage.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// The block's elements as T: where they lie if they are T already, else widened into scratch.
template <class T, class X>
const T* widened(const X* in, index_t n, T* scratch) {
  if constexpr (std::same_as<X, T>) {
    return in;
  } else if constexpr (std::same_as<X, half>) {
    kernels<ConversionKernels<float>>().widen_half(in, n, scratch);
    return scratch;
  } else {
    static_assert(std::same_as<X, bfloat16>);
    kernels<ConversionKernels<float>>().widen_bfloat16(in, n, scratch);
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

template <class T, class X>
void narrow_to(X* out, index_t n, const T* staged) {
  if constexpr (std::same_as<X, half>) {
    kernels<ConversionKernels<float>>().narrow_half(staged, n, out);
  } else if constexpr (std::same_as<X, bfloat16>) {
    kernels<ConversionKernels<float>>().narrow_bfloat16(staged, n, out);
  } else {
    static_assert(std::same_as<X, T>);  // computed where it belongs
  }
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
