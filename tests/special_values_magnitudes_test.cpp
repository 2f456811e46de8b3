// Subnormals, overflow, cancellation, long rows, and a processor that flushes subnormals. On every target.

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "special_values.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace special_values::special_values_magnitudes_test {

using reference::relative_difference;

/// |y - exact| in units of the float or double rounding of exact times the given number of u.
template <class T>
Real relative_error(const std::vector<T>& y, const std::vector<Real>& exact) {
  Real worst = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    const Real value = reference::widen(y[i]);
    if (value == exact[i]) continue;
    worst = worse(worst, std::abs(value - exact[i]) / exact[i]);
  }
  return worst;
}

// ---- Magnitudes -------------------------------------------------------------------------------------------

TEST_CASE("the largest floats do not overflow", "[special]") {
  for_each_target([](const std::string&) {
    constexpr float big = 1e38f, max = std::numeric_limits<float>::max();
    for (const double c : {1.0, 10.0, 1e30}) {
      CAPTURE(c);
      CHECK(softmax<float>({big, -big, 0}, Constant{c}) == std::vector<float>{1, 0, 0});
      CHECK(softmax<float>({big, -big, 0}, Constant{-c}) == std::vector<float>{0, 1, 0});
      CHECK(softmax<float>({max, -max, max}, Constant{c}) == std::vector<float>{0.5f, 0, 0.5f});
      CHECK(softmax<float>({-max, -max, -max, -max}, Constant{c}) == std::vector<float>(4, 0.25f));
      CHECK(softmax<float>(std::vector<float>(40, max), Constant{-c}) == std::vector<float>(40, 1.f / 40));
      // The multiplier times the logit overflows, their difference does not.
      const std::vector<float> log_y = log_softmax<float>({max, max}, Constant{c});
      CHECK(relative_difference(log_y[0], -std::log(2.0)) <= 2e-7);
      CHECK(relative_difference(log_y[1], -std::log(2.0)) <= 2e-7);
      CHECK_FALSE(is_nan(log_softmax<float>({big, -big}, Constant{c})[1]));
    }
    CHECK(logsumexp<float>({big, -big, 0}) == big);
    CHECK(logsumexp<float>({big, -big, 0}, Constant{-1}) == big);
    CHECK(softmax<double>({1e308, -1e308, 0}, Constant{10}) == std::vector<double>{1, 0, 0});
    CHECK(softmax<double>({1e308, -1e308, 1e308}, Constant{10}) == std::vector<double>{0.5, 0, 0.5});
  });
}

TEST_CASE("huge spreads fall to 0 without NaN", "[special]") {
  for_each_target([](const std::string&) {
    for (const index_t n : sizes) {
      // 1, e^-1, ... down past the smallest float, in steps that visit every binade and the edge of the normal numbers.
      std::vector<float> z;
      for (index_t i = 0; i < n; ++i) z.push_back(-0.171f * static_cast<float>((i * 7) % 1031));
      const std::vector<float> y = softmax(z);
      const std::vector<Real> exact = reference::softmax(reference::whole_row(std::span<const float>(z), 1));
      Real worst = 0;
      for (std::size_t i = 0; i < y.size(); ++i) {
        const auto value = static_cast<Real>(y[i]);
        // Where the exponential lies below 2^-125 of the largest it may be 0, but nothing else that is wrong.
        if (value == 0 && exact[i] < 0x1p-125L) continue;
        // Two roundings of the exponent, 8 u of the rest, and the coarseness of subnormal numbers.
        const Real allowed = exact[i] * (8 - 2 * std::log(exact[i])) * 0x1p-24L + 0x1p-149L;
        worst = worse(worst, std::abs(value - exact[i]) / allowed);
      }
      CAPTURE(n);
      CHECK(worst <= 1);
    }
    CHECK(softmax<float>({0, -1e6f, -1e30f}) == std::vector<float>{1, 0, 0});
    CHECK(softmax<double>({0, -1e6, -1e300}) == std::vector<double>{1, 0, 0});
  });
}

TEST_CASE("whole blocks of a long row may lie too far down to count", "[special]") {
  for_each_target([](const std::string&) {
    std::vector<float> logits(8192, -1e6f);
    std::fill(logits.begin() + 4096, logits.end(), 1e6f);
    const std::vector<float> p = softmax(logits);
    CHECK(p.front() == 0);
    CHECK(p[4095] == 0);
    CHECK(p[4096] == 1.0f / 4096);
    CHECK(p.back() == 1.0f / 4096);
  });
}

TEST_CASE("a huge common offset costs no accuracy", "[special]") {
  for_each_target([](const std::string&) {
    for (const index_t n : sizes) {
      CAPTURE(n);
      // Offsets that float holds on a coarse grid; the multiplier brings neighbours of that grid a fraction apart.
      for (const float offset : {1e6f, -1e6f, 1e30f, -1e30f}) {
        const float step = std::abs(std::nextafter(offset, inf) - offset);
        std::vector<float> z;
        for (index_t i = 0; i < n; ++i) z.push_back(offset + step * static_cast<float>((i * 29) % 13));
        for (const double c : {0.375 / static_cast<double>(step), -0.375 / static_cast<double>(step)}) {
          const auto row = reference::whole_row(std::span<const float>(z), static_cast<Real>(c));
          CHECK(relative_error(softmax(z, Constant{c}), reference::softmax(row)) <= 24 * 0x1p-24L);
        }
      }
      std::vector<double> z;
      for (index_t i = 0; i < n; ++i) z.push_back(1e12 + 0.125 * static_cast<double>((i * 29) % 41));
      const auto row = reference::whole_row(std::span<const double>(z), 1);
      CHECK(relative_error(softmax(z), reference::softmax(row)) <= 24 * 0x1p-53L);
    }
  });
}

TEST_CASE("subnormal logits are as good as zero", "[special]") {
  for_each_target([](const std::string&) {
    for (const index_t n : sizes) {
      std::vector<float> z(static_cast<std::size_t>(n), std::numeric_limits<float>::denorm_min());
      for (std::size_t i = 0; i < z.size(); i += 2) z[i] = -1e-39f;
      const std::vector<float> y = softmax(z), zero = softmax(std::vector<float>(z.size(), 0.f));
      CHECK(y == zero);
      CHECK(std::abs(zero[0] - 1 / static_cast<float>(n)) <= 1e-7f / static_cast<float>(n));
      CHECK(softmax(z, Constant{1e6}) == zero);
    }
  });
}

TEST_CASE("a multiplier outside of float's range still counts", "[special]") {
  // c z is an ordinary number, while c or its inverse leaves the normal floats.
  for_each_target([](const std::string&) {
    const std::vector<float> large{1e38f, 2e38f, 0}, small{1e-38f, 2e-38f, 0};
    for (const auto& [z, c] : {std::pair{large, 1e-38}, std::pair{small, 1e38}}) {
      const auto row = reference::whole_row(std::span<const float>(z), static_cast<Real>(c));
      CHECK(relative_error(softmax(z, Constant{c}), reference::softmax(row)) <= 24 * 0x1p-24L);
    }
  });
}

TEST_CASE("a multiplier is not rounded to float", "[special]") {
  // Rounding this one to 1, or its product with log2(e) to float, would cost up to 75 * 2^-25 = 38 * 2^-24.
  constexpr double c = 1 + 0x1p-25;
  for_each_target([](const std::string&) {
    for (const index_t n : sizes) {
      std::vector<float> z;
      for (index_t i = 0; i < n; ++i) z.push_back(-0.75f * static_cast<float>((i * 37) % 101));
      const auto row = reference::whole_row(std::span<const float>(z), static_cast<Real>(c));
      CHECK(relative_error(softmax(z, Constant{c}), reference::softmax(row)) <= 8 * 0x1p-24L);
    }
  });
}

TEST_CASE("-0.0 is 0.0", "[special]") {
  for_each_target([](const std::string&) {
    for (const index_t n : sizes) {
      std::vector<float> z = reference::normals<float>(static_cast<std::size_t>(n), 8), minus = z;
      for (std::size_t i = 0; i < z.size(); i += 2) {
        z[i] = 0.f;
        minus[i] = -0.f;
      }
      for (const double c : {1.0, -1.0, 0.0}) {
        CHECK(softmax(z, Constant{c}) == softmax(minus, Constant{c}));
        CHECK(softmax(z, Constant{c}) == softmax(z, Constant{c}));
      }
    }
    const std::vector<float> zeros = softmax(std::vector<float>(9, -0.f), Constant{-0.0});
    CHECK(std::none_of(zeros.begin(), zeros.end(), [](float y) { return std::signbit(y); }));
  });
}

// ---- Long rows --------------------------------------------------------------------------------------------

TEST_CASE("a million normals stay within 5e-7", "[special][slow]") {
  constexpr std::size_t n = 1'000'000;
  const std::vector<float> z = reference::normals<float>(n, 10);
  const std::vector<Real> exact = reference::softmax(reference::whole_row(std::span<const float>(z), 1));
  const Real exact_lse = reference::logsumexp(reference::whole_row(std::span<const float>(z), 1));
  for_each_target([&](const std::string&) {
    CHECK(relative_error(softmax(z), exact) <= 5e-7L);
    CHECK(std::abs(static_cast<Real>(logsumexp(z)) - exact_lse) <= 5e-7L * exact_lse);
  });
}

TEST_CASE("a multiplier that vanishes in float still leaves masked keys at 0", "[special]") {
  for_each_target([](const std::string&) {
    for (const index_t n : {3, 4, 20, 300}) {
      std::vector<float> z(static_cast<std::size_t>(64 * n), 1.0f), y(z.size());
      for (std::size_t i = 0; i < z.size(); i += static_cast<std::size_t>(n)) {
        z[i] = -std::numeric_limits<float>::infinity();
      }
      ssmax::softmax(View<const float, 2>(z.data(), {64, n}), View<float, 2>(y.data(), {64, n}),
                     Constant{1e-60});
      bool right = true;
      for (std::size_t i = 0; i < y.size(); ++i) {
        const float share = i % static_cast<std::size_t>(n) == 0 ? 0.0f : 1.0f / static_cast<float>(n - 1);
        right = right && std::abs(y[i] - share) <= 1e-6f * share;
      }
      CAPTURE(n);
      CHECK(right);
    }
  });
}

TEST_CASE("equal logits share equally, however many they are", "[special]") {
  // Here a float sum errs in the same direction at every step: it drifts by 1e-5 within 1024 additions.
  for_each_target([](const std::string&) {
    Real worst = 0;
    for (const std::size_t n : {1000u, 4096u, 65536u, 1'000'000u}) {
      for (const float z : {3.f, 0.f, 0.1f, -2.7f}) {
        const std::vector<float> y = softmax(std::vector<float>(n, z));
        const std::vector<Real> exact(n, 1 / static_cast<Real>(n));
        worst = worse(worst, relative_error(y, exact));
      }
    }
    CHECK(worst <= 5e-7L);
  });
}

// ---- Flush to zero ----------------------------------------------------------------------------------------

#if defined(__SSE__)
TEST_CASE("flush-to-zero and denormals-are-zero change no ordinary result", "[special]") {
  constexpr unsigned flush_to_zero = 0x8000, denormals_are_zero = 0x0040;
  class Mode {
   public:
    Mode() { _mm_setcsr(before_ | flush_to_zero | denormals_are_zero); }
    Mode(const Mode&) = delete;
    Mode& operator=(const Mode&) = delete;
    ~Mode() { _mm_setcsr(before_); }

   private:
    unsigned before_ = _mm_getcsr();
  };
  for_each_target([](const std::string&) {
    for (const index_t n : sizes) {
      CAPTURE(n);
      std::vector<float> z = reference::normals<float>(static_cast<std::size_t>(n), 9, 20);
      z[0] = 1e-40f;
      if (n > 2) z[2] = -inf;
      const std::vector<float> usual = softmax(z), usual_log = log_softmax(z);
      const std::vector<float> hidden(z.size(), -inf);
      std::vector<float> flushed, flushed_log, flushed_hidden, flushed_nan, flushed_small;
      unsigned mode_after = 0;
      {
        const Mode mode;
        flushed = softmax(z);
        flushed_log = log_softmax(z);
        flushed_hidden = softmax(hidden);
        flushed_small = softmax(std::vector<float>(z.size(), 1e-40f), Constant{1e-40});
        std::vector<float> with_nan = z;
        with_nan.back() = nan;
        flushed_nan = softmax(with_nan);
        mode_after = _mm_getcsr();
      }
      // The caller's mode is the caller's: it is still on after the calls.
      CHECK((mode_after & (flush_to_zero | denormals_are_zero)) == (flush_to_zero | denormals_are_zero));
      bool same = true;
      for (std::size_t i = 0; i < z.size(); ++i) {
        same = same && std::abs(flushed[i] - usual[i]) <= 0x1p-125f;
        same =
            same && (flushed_log[i] == usual_log[i] || std::abs(flushed_log[i] - usual_log[i]) <= 0x1p-125f);
      }
      CHECK(same);
      CHECK(flushed_hidden == std::vector<float>(z.size(), 0.f));
      CHECK(is_nan(flushed_nan.back()));
      CHECK(flushed_small == softmax(std::vector<float>(z.size(), 0.f)));
    }
  });
}
#endif

}  // namespace special_values::special_values_magnitudes_test
