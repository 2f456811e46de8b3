// The frequencies of a rope and what its scalings make of them: linear, NTK, YaRN and Llama 3.

#include <numbers>

#include "reference.hpp"
#include "rope_turns.hpp"
#include "same_bits.hpp"
#include "test.hpp"

namespace rope_turns::rope_scaling_test {

using reference::Real;

/// omega of every pair, read off the angle at position 1 (omega is at most 1).
std::vector<double> frequencies_of(const RopeOptions& options) {
  const Turns<double> turns(Rope<double>(options, 2), 1);
  std::vector<double> frequencies;
  for (std::size_t i = 0; i < turns.sine.size(); ++i) {
    frequencies.push_back(std::atan2(turns.sine[i], turns.cosine[i]));
  }
  return frequencies;
}

double worst_ratio(const std::vector<double>& values, const std::vector<double>& expected) {
  double worst = values.size() == expected.size() ? 0 : std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < std::min(values.size(), expected.size()); ++i) {
    worst = std::max(worst, std::abs(values[i] / expected[i] - 1));
  }
  return worst;
}

std::vector<double> unscaled(index_t width, double theta) {
  std::vector<double> frequencies;
  for (const Real omega : reference::rope_frequencies(width, static_cast<Real>(theta))) {
    frequencies.push_back(static_cast<double>(omega));
  }
  return frequencies;
}

constexpr double close = 2e-15;

TEST_CASE("frequencies without a scaling", "[rope]") {
  for (const double theta : {10'000.0, 500'000.0, 1.5}) {
    CHECK(worst_ratio(frequencies_of({.width = 64, .theta = theta}), unscaled(64, theta)) <= close);
  }
}

TEST_CASE("linear scaling divides positions by the factor", "[rope]") {
  std::vector<double> expected = unscaled(64, 10'000);
  for (double& omega : expected) omega /= 3;
  CHECK(worst_ratio(frequencies_of({.width = 64, .scaling = RopeScaling::linear(3)}), expected) <= close);

  // Division by a power of two is exact: position 4p is p to the bit.
  const Rope<float> stretched({.width = 64, .scaling = RopeScaling::linear(4)}, 401),
      plain({.width = 64}, 101);
  bool same = true;
  for (index_t p = 0; p <= 100; ++p) {
    const Turns<float> a(stretched, 4 * p), b(plain, p);
    same = same && same_bits(a.cosine, b.cosine) && same_bits(a.sine, b.sine);
  }
  CHECK(same);
}

TEST_CASE("NTK scaling keeps the fastest pair and divides the slowest by the factor", "[rope]") {
  const std::vector<double> plain = unscaled(64, 10'000);
  const std::vector<double> scaled = frequencies_of({.width = 64, .scaling = RopeScaling::ntk(8)});
  CHECK(scaled.front() == 1);
  CHECK(std::abs(scaled.back() * 8 / plain.back() - 1) <= 4 * close);
  const double theta = 10'000 * std::pow(8.0, 64.0 / 62.0);
  CHECK(worst_ratio(scaled, unscaled(64, theta)) <= 4 * close);
}

TEST_CASE("YaRN keeps fast pairs, divides slow ones and goes in a line between", "[rope]") {
  struct Case {
    index_t width;
    double theta, factor, length, low, high;
  };
  for (const Case& c : {Case{128, 10'000, 16, 4096, 1, 32}, Case{64, 1'000'000, 4, 32'768, 1, 32},
                        Case{64, 10'000, 40, 4096, 2, 8}}) {
    const std::vector<double> plain = unscaled(c.width, c.theta);
    const std::vector<double> scaled =
        frequencies_of({.width = c.width,
                        .theta = c.theta,
                        .scaling = RopeScaling::yarn(c.factor, c.length, c.low, c.high)});
    // The pair that makes a number of turns in the original length solves L / (2 pi turns) = theta^(2i/width).
    const auto pair = [&](double turns) {
      return static_cast<double>(c.width) / 2 * std::log(c.length / (2 * std::numbers::pi * turns)) /
             std::log(c.theta);
    };
    const double first = std::floor(pair(c.high)), last = std::ceil(pair(c.low));
    int kept = 0, divided = 0, between = 0;
    double worst_limit = 0, worst_between = 0;
    for (std::size_t i = 0; i < plain.size(); ++i) {
      const double wavelength = 2 * std::numbers::pi / plain[i];
      const double share = (static_cast<double>(i) - first) / (last - first);
      if (wavelength < c.length / c.high) {
        ++kept;
        worst_limit = std::max(worst_limit, std::abs(scaled[i] / plain[i] - 1));
      } else if (wavelength > c.length / c.low) {
        ++divided;
        worst_limit = std::max(worst_limit, std::abs(scaled[i] * c.factor / plain[i] - 1));
      } else {
        ++between;
        const double expected = plain[i] * (1 - share) + plain[i] / c.factor * share;
        worst_between = std::max(worst_between, std::abs(scaled[i] / expected - 1));
      }
    }
    CHECK((kept > 2 && divided > 2 && between > 2));
    CHECK(worst_limit <= 2 * close);
    CHECK(worst_between <= 4 * close);
  }
  CHECK(worst_ratio(frequencies_of({.width = 64, .scaling = RopeScaling::yarn(16, 4096)}),
                    frequencies_of({.width = 64, .scaling = RopeScaling::yarn(16, 4096, 1, 32)})) == 0);
}

TEST_CASE("Llama 3 keeps short wavelengths, divides long ones and blends between", "[rope]") {
  const double factor = 8, length = 8192, low = 1, high = 4;
  const std::vector<double> plain = unscaled(128, 500'000);
  const std::vector<double> scaled = frequencies_of(
      {.width = 128, .theta = 500'000, .scaling = RopeScaling::llama3(factor, length, low, high)});
  int kept = 0, divided = 0, between = 0;
  double worst = 0;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    const double wavelength = 2 * std::numbers::pi / plain[i];
    double expected = plain[i];
    if (wavelength > length / low) {
      ++divided;
      expected = plain[i] / factor;
    } else if (wavelength >= length / high) {
      ++between;
      const double smooth = (length / wavelength - low) / (high - low);
      expected = (1 - smooth) * plain[i] / factor + smooth * plain[i];
    } else {
      ++kept;
    }
    worst = std::max(worst, std::abs(scaled[i] / expected - 1));
  }
  CHECK((kept > 2 && divided > 2 && between > 2));
  CHECK(worst <= 8 * close);
  CHECK(worst_ratio(frequencies_of({.width = 64, .scaling = RopeScaling::llama3(8, 8192)}),
                    frequencies_of({.width = 64, .scaling = RopeScaling::llama3(8, 8192, 1, 4)})) == 0);
}

}  // namespace rope_turns::rope_scaling_test
