// Multipliers of any sign and size, and logits of any size: as exact as c = 1 on ordinary logits. On every target.

#include "reference.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace softmax_multiplier_test {

using reference::Real;
using reference::worse;
using namespace ssmax;

template <class T>
constexpr T inf = std::numeric_limits<T>::infinity();

/// The bounds of softmax.hpp. Probabilities below `smallest` of the largest may be flushed.
template <class T>
struct Bounds;
template <>
struct Bounds<float> {
  static constexpr Real probability = 5e-7L, log = 5e-7L, smallest = 0x1p-125L;
};
template <>
struct Bounds<double> {
  static constexpr Real probability = 2e-15L, log = 1e-15L, smallest = 0x1p-1021L;
};

/// Errors of a row as fractions of what is allowed.
struct Worst {
  Real probability = 0, log = 0, lse = 0, online = 0;
  bool log_above_zero = false;
  std::string where;

  void take(Real& of, Real error, const std::string& name) {
    if (error > of || std::isnan(error)) where = name;
    of = worse(of, error);
  }
  void check(const std::string& target) const {
    INFO(target << ", last worst at " << where);
    CHECK(static_cast<double>(probability) <= 1);
    CHECK(static_cast<double>(log) <= 1);
    CHECK(static_cast<double>(lse) <= 1);
    CHECK(static_cast<double>(online) <= 1);
    CHECK_FALSE(log_above_zero);
  }
};

template <class T>
std::vector<T> softmax(const std::vector<T>& z, double c) {
  std::vector<T> y(z.size(), T(-7));
  ssmax::softmax(View<const T, 1>(z), View<T, 1>(y), Constant{c});
  return y;
}

template <class T>
std::vector<T> log_softmax(const std::vector<T>& z, double c) {
  std::vector<T> y(z.size(), T(7));
  ssmax::log_softmax(View<const T, 1>(z), View<T, 1>(y), Constant{c});
  return y;
}

/// |value - exact| / allowed, 0 where both are the same infinity.
Real error_in(Real value, Real exact, Real allowed) {
  return value == exact ? 0 : std::abs(value - exact) / allowed;
}

/// Every function on one row of finite logits or -inf.
template <class T>
void measure(const std::vector<T>& z, double c, const std::string& name, Worst& worst) {
  const auto row = reference::whole_row(std::span<const T>(z), static_cast<Real>(c));
  const std::vector<Real> exact = reference::softmax(row);
  const Real largest = *std::ranges::max_element(exact), smallest = Bounds<T>::smallest * largest;
  const std::vector<T> y = softmax(z, c), log_y = log_softmax(z, c);
  std::vector<T> weights(z.size()), in_place = z;
  ssmax::softmax(in_place, in_place, Constant{c});
  ssmax::OnlineSoftmax<T> online(c);
  online.update(z.data(), static_cast<index_t>(z.size()), weights.data());
  Real origin = 0, nearest = inf<Real>;  // the logit with the largest c·z
  for (std::size_t i = 0; i < z.size(); ++i) {
    if (exact[i] == largest) origin = static_cast<Real>(z[i]);
  }
  for (std::size_t i = 0; i < z.size(); ++i) {
    const Real allowed = Bounds<T>::probability * exact[i] + smallest;
    worst.take(worst.probability, error_in(y[i], exact[i], allowed), name);
    worst.take(worst.probability, error_in(in_place[i], exact[i], allowed), name + " (in place)");
    worst.take(worst.online, error_in(weights[i] * online.finish(), exact[i], allowed), name + " (online)");
    worst.log_above_zero = worst.log_above_zero || log_y[i] > 0;
    if (z[i] == -inf<T>) {
      nearest = log_y[i] == -inf<T> ? nearest : reference::not_a_number;
      continue;
    }
    const Real distance = static_cast<Real>(c) * (static_cast<Real>(z[i]) - origin);
    const Real exact_log = distance + std::log(largest);
    if (exact_log < static_cast<Real>(std::numeric_limits<T>::lowest())) {
      worst.take(worst.log, log_y[i] == -inf<T> ? 0 : inf<Real>, name + " (log)");
    } else {
      worst.take(worst.log, error_in(log_y[i], exact_log, Bounds<T>::log * (1 + std::abs(exact_log))),
                 name + " (log)");
    }
  }
  worst.take(worst.log, std::isnan(nearest) ? inf<Real> : 0, name + " (masked)");
  const Real exact_lse = reference::logsumexp(row);
  if (std::abs(exact_lse) <= static_cast<Real>(std::numeric_limits<T>::max())) {
    worst.take(
        worst.lse,
        error_in(ssmax::logsumexp(z, Constant{c}), exact_lse, Bounds<T>::log * (1 + std::abs(exact_lse))),
        name + " (lse)");
  }
}

constexpr std::array<std::size_t, 9> sizes{1, 2, 3, 8, 17, 100, 257, 4096, 9001};

std::string name_of(double c, std::size_t n, double size = 1) {
  return "c = " + std::to_string(c) + ", n = " + std::to_string(n) + ", logits of size 2^" +
         std::to_string(std::log2(size));
}

TEST_CASE("negative multipliers are as exact as positive ones", "[softmax][multiplier]") {
  for_each_target([](const std::string& target) {
    Worst worst;
    // Two logits, and rows of all lengths whose probabilities reach far down.
    for (float z = -20; z < 20; z += 0.37f) measure<float>({z, 0.1f}, -3.7, "two logits", worst);
    for (const std::size_t n : sizes) {
      for (const double c : {-3.7, -1.0, -0.1, -25.0, 3.7}) {
        measure(reference::normals<float>(n, 3, 4), c, name_of(c, n), worst);
        measure(reference::normals<double>(n, 3, 4), c, name_of(c, n), worst);
      }
    }
    worst.check(target);
  });
}

TEST_CASE("a million normals under a negative multiplier", "[softmax][multiplier][slow]") {
  constexpr std::size_t n = 1'000'000;
  const std::vector<float> z = reference::normals<float>(n, 10);
  const std::vector<Real> exact = reference::softmax(reference::whole_row(std::span<const float>(z), -1));
  for_each_target([&](const std::string&) {
    const std::vector<float> y = softmax(z, -1.0);
    Real worst = 0;
    for (std::size_t i = 0; i < n; ++i) worst = worse(worst, std::abs(y[i] - exact[i]) / exact[i]);
    CHECK(static_cast<double>(worst) <= 5e-7);
  });
}

/// c·z of ordinary size, whatever the sizes of c and z.
template <class T>
void check_sizes(int lowest, int highest, int step) {
  for_each_target([&](const std::string& target) {
    Worst worst;
    for (int exponent = lowest; exponent <= highest; exponent += step) {
      for (const std::size_t n : {2u, 5u, 40u, 300u, 5000u}) {
        std::vector<T> z = reference::normals<T>(n, static_cast<unsigned>(n), 1);
        for (T& value : z)
          value = std::clamp(std::ldexp(value, exponent), std::numeric_limits<T>::lowest(),
                             std::numeric_limits<T>::max());
        for (const double size : {0.01, 1.3, 9.1}) {
          for (const double sign : {1.0, -1.0}) {
            const double c = sign * std::ldexp(size, -exponent);
            if (std::isfinite(c)) measure(z, c, name_of(c, n, std::ldexp(1.0, exponent)), worst);
          }
        }
      }
    }
    worst.check(target);
  });
}

TEST_CASE("multipliers and logits of all sizes whose product is ordinary", "[softmax][multiplier][slow]") {
  SECTION("float") { check_sizes<float>(-149, 127, 12); }
  SECTION("double") { check_sizes<double>(-1074, 1023, 99); }
}

/// Logits whose c·z lies around `offset`, where its rounding to T is far above 1.
template <class T>
void check_offsets(std::initializer_list<double> offsets) {
  for_each_target([&](const std::string& target) {
    Worst worst;
    for (const double offset : offsets) {
      const T base = static_cast<T>(offset);
      const T step = std::abs(std::nextafter(base, inf<T>) - base);
      for (const std::size_t n : {2u, 9u, 300u, 5000u}) {
        std::vector<T> z;
        for (std::size_t i = 0; i < n; ++i) z.push_back(base + step * static_cast<T>((i * 29) % 131));
        for (const double c : {0.375, 0.06, -0.375, -0.06}) {
          measure(z, c / static_cast<double>(step), name_of(c, n, std::abs(offset)), worst);
        }
      }
    }
    worst.check(target);
  });
}

TEST_CASE("a large common offset keeps the accuracy", "[softmax][multiplier]") {
  SECTION("float") { check_offsets<float>({1e4, -1e4, 1e6, -1e6, 1e15, 1e30, -1e30, 3e38}); }
  SECTION("double") { check_offsets<double>({1e4, -1e4, 1e15, -1e15, 1e100, 1e300, -1e300}); }
}

TEST_CASE("ordinary logits beside blocks of logits far below, in one row", "[softmax][multiplier][slow]") {
  for_each_target([](const std::string& target) {
    Worst worst;
    for (const std::size_t n : {5000u, 20'000u}) {
      for (const float far : {-1e6f, -1e9f, -3e38f}) {
        for (const double c : {1.0, 3.7, -3.7}) {
          std::vector<float> z = reference::normals<float>(n, 17, 3);
          std::fill_n(z.begin() + 4096, 800, c > 0 ? far : -far);
          measure(z, c, "far last", worst);
          std::fill_n(z.begin(), 4096, c > 0 ? far : -far);
          measure(z, c, "far first", worst);
          std::fill_n(z.begin() + 4096, n - 4096, c > 0 ? far : -far);
          measure(z, c, "all far", worst);
        }
      }
    }
    worst.check(target);
  });
}

TEMPLATE_TEST_CASE("no finite multiplier is too large or too small", "[softmax][multiplier]", float, double) {
  using T = TestType;
  static constexpr T most = std::numeric_limits<T>::max(), least = std::numeric_limits<T>::denorm_min();
  using Row = std::vector<T>;
  for_each_target([](const std::string& target) {
    for (const double c : {1e30, 2.3e38, 2.4e38, 3e38, 1e39, 1e45, 1e60, 1e150, 1e308, 1.7e308}) {
      CAPTURE(c);
      CHECK(softmax<T>({1, 2, 2, -5}, c) == Row{0, 0.5, 0.5, 0});
      CHECK(softmax<T>({1, 2, 2, -5}, -c) == Row{0, 0, 0, 1});
      CHECK(softmax<T>({-1, -2, -1}, c) == Row{0.5, 0, 0.5});
      CHECK(softmax<T>({most, -most, most}, c) == Row{0.5, 0, 0.5});
      CHECK(softmax<T>({most, -most, most}, -c) == Row{0, 1, 0});
      CHECK(softmax<T>({-most, -most, -most, -most}, c) == Row(4, T(0.25)));
      CHECK(softmax<T>({0, -inf<T>, 0}, -c) == Row{0.5, 0, 0.5});
      CHECK(softmax<T>({-inf<T>, -inf<T>}, -c) == Row{0, 0});
      CHECK(softmax<T>(Row(5000, most), -c) == Row(5000, T(1) / 5000));
      CHECK(log_softmax<T>({2, 2}, c) == Row(2, static_cast<T>(-std::log(2.0L))));
      CHECK(log_softmax<T>({most, -most}, c) == Row{0, -inf<T>});
      CHECK(log_softmax<T>({3, 3, most}, -c)[2] == -inf<T>);
    }
    for (const double c : {1e-30, 1e-60, 1e-310, 5e-324, 0.0, -0.0, -5e-324, -1e-60}) {
      CAPTURE(c);
      CHECK(softmax<T>({1, 2, -inf<T>, -5, 3}, c) == Row{0.25, 0.25, 0, 0.25, 0.25});
      CHECK(softmax<T>({least, 0, -inf<T>}, c) == Row{0.5, 0.5, 0});
      CHECK(std::abs(log_softmax<T>({1, -inf<T>}, c)[0]) <= T(1e-30));
      CHECK(log_softmax<T>({most}, c) == Row{0});
    }
    CHECK(softmax<T>({most, -most}, 0.0) == Row{0.5, 0.5});
    Worst worst;
    // The smallest numbers under multipliers that tell them apart.
    for (const double c : {1e44, 1e45, -1e45, 1e300, 1.7e308, -1.7e308}) {
      for (const std::size_t n : {3u, 40u, 5000u}) {
        Row z;
        for (std::size_t i = 0; i < n; ++i) z.push_back(least * static_cast<T>((i * 29) % 131));
        measure(z, c, name_of(c, n, 1e-45), worst);
      }
    }
    worst.check(target);
  });
}

TEMPLATE_TEST_CASE("infinite logits, and multipliers that are no numbers", "[softmax][multiplier]", float,
                   double) {
  using T = TestType;
  for_each_target([](const std::string&) {
    const auto all_nan = [](const std::vector<T>& y) {
      return std::ranges::all_of(y, [](T value) { return std::isnan(value); });
    };
    for (const std::size_t n : {1u, 4u, 40u, 5000u}) {
      const std::vector<T> z = reference::normals<T>(n, 5);
      for (const double c : {inf<double>, -inf<double>, std::numeric_limits<double>::quiet_NaN()}) {
        CHECK(all_nan(softmax(z, c)));
        CHECK(all_nan(log_softmax(z, c)));
        CHECK(std::isnan(ssmax::logsumexp(z, Constant{c})));
        ssmax::OnlineSoftmax<T> online(c);
        std::vector<T> weights(n);
        online.update(z.data(), static_cast<index_t>(n), weights.data());
        CHECK(std::isnan(online.finish()));
      }
      for (const double c : {-1.0, -1e-30, -1e30, -1e300}) {
        // +inf is a weight of 0 under c < 0, NaN is NaN.
        std::vector<T> with_inf = z, without = z;
        with_inf.back() = inf<T>;
        without.back() = -inf<T>;
        CHECK(softmax(with_inf, c) == softmax(without, c));
        CHECK(log_softmax(with_inf, c) == log_softmax(without, c));
        with_inf.front() = std::numeric_limits<T>::quiet_NaN();
        CHECK(all_nan(softmax(with_inf, c)));
      }
      for (const double c : {0.0, 1e-300, 1e-30, 1.0, 1e30, 1e300}) {
        std::vector<T> with_inf = z;
        with_inf.back() = inf<T>;
        CHECK(all_nan(softmax(with_inf, c)));
        CHECK(all_nan(log_softmax(with_inf, c)));
      }
    }
  });
}

/// dz in units of |c|·(|dout| + ...) where that is no more than T holds.
TEMPLATE_TEST_CASE("gradients under multipliers of any sign and size", "[softmax][multiplier]", float,
                   double) {
  using T = TestType;
  for_each_target([](const std::string&) {
    const std::vector<T> direction = reference::normals<T>(40, 6), g = reference::normals<T>(40, 7);
    for (const double size : {1e-320, 1e-60, 1e-20, 1.0, 1e20, 1e30, 1e37, 1e39, 1e44}) {
      for (const double c : {size, -size}) {
        CAPTURE(c);
        std::vector<T> z = direction, y(40), log_y(40), dz(40), log_dz(40);
        for (T& value : z) value = static_cast<T>(std::clamp(value / size, -1e37, 1e37));
        z[3] = -inf<T>;
        if (c < 0) z[5] = inf<T>;
        std::vector<double> ds(1), db(1), log_ds(1), log_db(1);
        const ssmax::SSMax<double> scaling{0.0, c};
        const View<const T, 1> in(z), dout(g);
        ssmax::softmax(in, View<T, 1>(y), scaling);
        ssmax::log_softmax(in, View<T, 1>(log_y), scaling);
        ssmax::softmax_backward<T, 1>(
            {.out = View<const T, 1>(y), .dout = dout, .logits = in, .dlogits = View<T, 1>(dz)},
            scaling.gradient(ds, db));
        ssmax::log_softmax_backward<T, 1>(
            {.out = View<const T, 1>(log_y), .dout = dout, .logits = in, .dlogits = View<T, 1>(log_dz)},
            scaling.gradient(log_ds, log_db));
        std::vector<T> finite = z;
        if (c < 0) finite[5] = -inf<T>;
        const auto row = reference::whole_row(std::span<const T>(finite), static_cast<Real>(c));
        const auto exact = reference::softmax_backward(row, std::span<const T>(g));
        const auto exact_log = reference::log_softmax_backward(row, std::span<const T>(g));
        const Real u = std::numeric_limits<T>::epsilon(), least = std::numeric_limits<T>::min();
        Real worst = 0;
        for (std::size_t i = 0; i < 40; ++i) {
          const Real allowed = 80 * u * std::abs(static_cast<Real>(c)) + least;
          const Real most = std::numeric_limits<T>::max();
          worst = worse(worst, error_in(dz[i], std::clamp(exact.dz[i], -most, most), allowed));
          worst = worse(worst, error_in(log_dz[i], std::clamp(exact_log.dz[i], -most, most), allowed));
        }
        if (size <= 1e37) CHECK(static_cast<double>(worst) <= 1);
        // Beyond the range of T a gradient is infinite; where it is 0 it stays 0.
        CHECK(dz[3] == 0);
        CHECK(std::ranges::none_of(dz, [](T value) { return std::isnan(value); }));
        CHECK(std::ranges::none_of(log_dz, [](T value) { return std::isnan(value); }));
        Real terms = 0;
        for (const T value : finite) terms += std::isfinite(value) ? std::abs(static_cast<Real>(value)) : 0;
        CHECK(std::abs(static_cast<Real>(db[0]) - exact.dc) <= 80 * u * terms + least);
        CHECK(std::abs(static_cast<Real>(log_db[0]) - exact_log.dc) <= 200 * u * terms + least);
      }
    }
    // The gradient of what is decided: 0, not 0·inf.
    std::vector<T> z{1, 2, 0}, y(3), dz(3);
    for (const double c : {1e39, 1e300, -1e300}) {
      ssmax::softmax(View<const T, 1>(z), View<T, 1>(y), Constant{c});
      ssmax::softmax_backward<T, 1>(
          {.out = View<const T, 1>(y), .dout = View<const T, 1>(g.data(), {3}), .dlogits = View<T, 1>(dz)},
          Constant{c});
      CHECK(dz == std::vector<T>{0, 0, 0});
    }
  });
}

}  // namespace softmax_multiplier_test
