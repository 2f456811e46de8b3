// From storage to arithmetic and back: double computes in double, everything else in float.
#pragma once

#include <concepts>
#include <type_traits>

#include "../../half.hpp"
#include "../kernels/convert.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

template <class X>
concept Storage =
    std::same_as<X, float> || std::same_as<X, double> || std::same_as<X, half> || std::same_as<X, bfloat16>;

/// The type that rows of X are computed in.
template <class X>
using Compute = std::conditional_t<std::same_as<std::remove_cv_t<X>, double>, double, float>;

/// The block's elements as T: where they lie if they are T already, else widened into scratch.
template <class T, class X>
const T* widened(const X* in, index_t n, T* scratch) {
  if constexpr (std::same_as<X, T>) {
    return in;
  } else if constexpr (std::same_as<X, half>) {
    kernels<ConversionKernels<float>>().widen_half(in, n, scratch);
    return scratch;
  } else {
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
  }
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
