// A number together with what arithmetic in float (or double) may have put it off by: running error analysis. The loops
// of the references, which are templates, compute in it, so that every expected value brings its own bound.
//
// Each operation adds one rounding of its result, as if the loop had been run in that precision, and passes
// on the errors of its operands to first order. NaN and infinity have no error: they are to be met exactly.
#pragma once

#include <algorithm>
#include <cmath>
#include <compare>
#include <limits>

#include "element.hpp"

namespace fuzz {

struct Bounded {
  /// Half an ulp of one in the precision that the library computes the present case in; below which it may flush to 0.
  static inline Real unit = 0x1p-24L, flushed = 0x1p-118L;
  /// What rounding to bfloat16 for a product may cost each weight, or each gradient of a logit: where all is float, 0.
  static inline Real rounded_weight = 0;

  Real value = 0, error = 0;

  Bounded() = default;
  Bounded(Real v) : value(v) {}
  Bounded(Real v, Real e) : value(v), error(std::isfinite(v) ? e : 0) {}

  static Bounded rounded(Real value, Real error) { return {value, error + unit * std::abs(value)}; }

  friend Bounded operator-(const Bounded& a) { return {-a.value, a.error}; }
  friend Bounded operator+(const Bounded& a, const Bounded& b) {
    return rounded(a.value + b.value, a.error + b.error);
  }
  friend Bounded operator-(const Bounded& a, const Bounded& b) {
    return rounded(a.value - b.value, a.error + b.error);
  }
  friend Bounded operator*(const Bounded& a, const Bounded& b) {
    return rounded(a.value * b.value,
                   a.error * std::abs(b.value) + b.error * std::abs(a.value) + a.error * b.error);
  }
  friend Bounded operator/(const Bounded& a, const Bounded& b) {
    const Real quotient = a.value / b.value, least = std::abs(b.value) - b.error;
    const Real moved = a.error + std::abs(quotient) * b.error;
    return rounded(quotient, moved == 0 ? 0 : least > 0 ? moved / least : std::numeric_limits<Real>::max());
  }
  Bounded& operator+=(const Bounded& other) { return *this = *this + other; }
  Bounded& operator*=(const Bounded& other) { return *this = *this * other; }

  friend bool operator==(const Bounded& a, const Bounded& b) { return a.value == b.value; }
  friend std::partial_ordering operator<=>(const Bounded& a, const Bounded& b) { return a.value <=> b.value; }

  friend bool isfinite(const Bounded& x) { return std::isfinite(x.value); }
  friend Bounded abs(const Bounded& x) { return {std::abs(x.value), x.error}; }
  friend Bounded exp(const Bounded& x) {
    const Real e = std::exp(x.value);
    return {e, e * (std::expm1(std::min(x.error, Real(100))) + 2 * unit + rounded_weight) + flushed};
  }
  friend Bounded log(const Bounded& x) {
    const Real least = x.value - x.error;
    return rounded(std::log(x.value), least > 0 ? x.error / least : std::numeric_limits<Real>::max());
  }
  /// What the library says of its own is a few ulps.
  friend Bounded tanh(const Bounded& x) {
    const Real t = std::tanh(x.value);
    return {t,
            std::min(x.error, Real(2)) * std::min<Real>(1, 1 - t * t + 2 * x.error) + 4 * unit * std::abs(t)};
  }
};

}  // namespace fuzz

template <>
struct std::numeric_limits<fuzz::Bounded> {
  static fuzz::Bounded infinity() { return std::numeric_limits<fuzz::Real>::infinity(); }
};
