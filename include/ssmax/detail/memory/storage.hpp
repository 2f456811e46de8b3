// Element types: double computes in double, everything else in float.
#pragma once

#include <concepts>
#include <type_traits>

#include "../../half.hpp"

namespace ssmax {
inline namespace SSMAX_DATA_NAMESPACE {
namespace SSMAX_VISIBLE shared {

template <class X>
concept Storage =
    std::same_as<X, float> || std::same_as<X, double> || std::same_as<X, half> || std::same_as<X, bfloat16>;

/// The type that rows of X are computed in.
template <class X>
using Compute = std::conditional_t<std::same_as<std::remove_cv_t<X>, double>, double, float>;

}  // namespace shared
}  // namespace SSMAX_DATA_NAMESPACE
}  // namespace ssmax
