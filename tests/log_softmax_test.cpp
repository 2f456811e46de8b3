// log_softmax cancels nothing: never above 0, and within a few roundings of 1 and of itself, however large
// the logits are. On every target.

#include "reference.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace log_softmax_test {

using reference::Real;
using reference::worse;
using ssmax::Constant;
using ssmax::View;

template <class T>
constexpr Real bound = std::is_same_v<T, double> ? 1e-15L : 5e-7L;

/// The largest error in units of bound · (1 + |log p|), infinite where a log-probability is above 0.
template <class T>
Real error_of(const std::vector<T>& z, double c) {
  std::vector<T> log_p(z.size(), T(7));
  ssmax::log_softmax(View<const T, 1>(z), View<T, 1>(log_p), Constant{c});
  // From the largest product down, so that the reference does not cancel either.
  const T origin = c < 0 ? *std::ranges::min_element(z) : *std::ranges::max_element(z);
  const auto distance = [&](T value) {
    return static_cast<Real>(c) * (static_cast<Real>(value) - static_cast<Real>(origin));
  };
  Real rest = 0;  // Σ exp but for the origin's 1, so that log1p sees what is near 0
  bool skipped = false;
  for (const T value : z) {
    if (value == origin && !skipped) {
      skipped = true;
    } else {
      rest += std::exp(distance(value));
    }
  }
  Real worst = 0;
  for (std::size_t i = 0; i < z.size(); ++i) {
    const Real exact = distance(z[i]) - std::log1p(rest);
    if (log_p[i] > 0) return reference::infinity;
    worst = worse(worst, std::abs(static_cast<Real>(log_p[i]) - exact) / (bound<T> * (1 + std::abs(exact))));
  }
  return worst;
}

TEMPLATE_TEST_CASE("two logits far from zero: no log-probability above 0", "[log_softmax]", float, double) {
  using T = TestType;
  for_each_target([](const std::string&) {
    Real worst = 0;
    const auto take = [&](T a, T b) {
      for (const double c : {1.0, 0.7, 2.1, -1.0, -3.3}) worst = worse(worst, error_of<T>({a, b}, c));
    };
    take(T(588.2), 0);  // +1.1e-13 in double once
    for (T z = T(0.1); z < 800; z += T(0.73)) {
      take(z, 0);
      take(-z, 0);
      take(z, z - T(0.5));
    }
    for (const double size : {1e4, 1e6, 1e15, 1e30}) {
      for (const T z : {static_cast<T>(size), static_cast<T>(-size)}) {
        take(z, 0);
        take(z, std::nextafter(z, T(0)));
        take(z, z);
      }
    }
    if (sizeof(T) == 8) {
      take(static_cast<T>(1e300), 0);
      take(static_cast<T>(1e300), std::nextafter(static_cast<T>(1e300), T(0)));
    }
    CHECK(static_cast<double>(worst) <= 1);
  });
}

TEMPLATE_TEST_CASE("rows around any mean", "[log_softmax][long_double]", float, double) {
  for_each_target([](const std::string&) {
    Real worst = 0;
    for (const std::size_t n : {1u, 2u, 9u, 100u, 5000u}) {
      for (const double mean : {0.0, 588.2, -588.2, 1e4, -1e4, 7e5}) {
        for (const double deviation : {1e-3, 1.0, 30.0}) {
          for (const double c : {1.0, 1.7, -0.6}) {
            worst = worse(worst, error_of(reference::normals<TestType>(n, 3, deviation, mean), c));
          }
        }
      }
    }
    CHECK(static_cast<double>(worst) <= 1);
  });
}

}  // namespace log_softmax_test
