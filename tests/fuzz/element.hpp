// Element types chosen at run time. Values travel as double, which holds those of every type.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <ssmax/half.hpp>
#include <string>
#include <type_traits>

#include "random.hpp"

namespace fuzz {

using Real = long double;
inline constexpr double infinity = std::numeric_limits<double>::infinity();
inline constexpr double nan = std::numeric_limits<double>::quiet_NaN();

enum class Element { f32, f64, f16, bf16 };

inline const char* name_of(Element element) {
  constexpr const char* names[] = {"float", "double", "half", "bfloat16"};
  return names[static_cast<int>(element)];
}
inline bool is_wide(Element element) { return element == Element::f64; }

/// What elements of T are computed in.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
T narrow(double value) {
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(value);
  } else {
    return T(static_cast<float>(value));
  }
}
template <class T>
double widen(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<double>(value);
  } else {
    return static_cast<double>(static_cast<float>(value));
  }
}

/// Calls f(T{}) for the type that `element` names.
template <class F>
auto with_element(Element element, const F& f) {
  switch (element) {
    case Element::f32:
      return f(float{});
    case Element::f64:
      return f(double{});
    case Element::f16:
      return f(ssmax::half{});
    default:
      return f(ssmax::bfloat16{});
  }
}

inline double rounded(Element element, double value) {
  return with_element(element, [&](auto zero) { return widen(narrow<decltype(zero)>(value)); });
}

/// Half an ulp of one, in what the element is computed in.
inline double unit_of(Element element) { return is_wide(element) ? 0x1p-53 : 0x1p-24; }

/// Half an ulp of a number near `value`, stored as `element`.
inline double storing(Element element, double value) {
  constexpr int digits[] = {24, 53, 11, 8};
  constexpr double least[] = {0x1p-150, 0x1p-1074, 0x1p-25, 0x1p-134};
  const auto i = static_cast<std::size_t>(element);
  if (value == 0 || !std::isfinite(value)) return least[i];
  return std::max(least[i], std::ldexp(1.0, std::ilogb(value) - digits[i]));
}

/// Above it, a result may be infinite.
inline double largest(Element element) {
  constexpr double values[] = {3.4e38, 1.79e308, 65504, 3.38e38};
  return values[static_cast<std::size_t>(element)];
}

}  // namespace fuzz
