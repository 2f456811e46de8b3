// The rotary embedding against the long double reference, on every target: pairings, widths, strides,
// positions, scalings of the frequencies, the transpose, and what it refuses.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <numbers>
#include <span>
#include <ssmax/ssmax.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "catch.hpp"
#include "reference.hpp"
#include "target_scope.hpp"

namespace rope_test {

using reference::Pairs;
using reference::Real;
using reference::worse;
using ssmax::index_t;
using ssmax::Pairing;
using ssmax::Rope;
using ssmax::RopeOptions;
using ssmax::RopeScaling;
using ssmax::View;

constexpr std::array<index_t, 6> widths{2, 6, 10, 32, 64, 66};
constexpr std::array<Pairing, 2> pairings{Pairing::half_split, Pairing::interleaved};

/// Half an ulp of one.
template <class T>
constexpr Real rounding = std::numeric_limits<T>::epsilon() / Real(2);

Pairs pairs_of(Pairing pairing) {
  return pairing == Pairing::half_split ? Pairs::half_split : Pairs::interleaved;
}

/// The two channels of pair i.
std::array<std::size_t, 2> channels_of(Pairing pairing, index_t width, index_t i) {
  const bool neighbours = pairing == Pairing::interleaved;
  return {static_cast<std::size_t>(neighbours ? 2 * i : i),
          static_cast<std::size_t>(neighbours ? 2 * i + 1 : i + width / 2)};
}

/// [batch, position, head, channel] in memory, seen as [batch, head, position, channel], with gaps after
/// every head and every position.
template <class T>
struct Heads {
  static constexpr index_t batch = 2, heads = 3, positions = 5, gap = 3, offset = 5;
  static constexpr T sentinel = T{-1234};

  explicit Heads(index_t count)
      : channels(count), storage(static_cast<std::size_t>(offset + batch * positions * pitch()), sentinel) {}

  index_t pitch() const { return heads * (channels + gap) + 7; }
  View<T, 4> view() {
    return {storage.data() + offset,
            {batch, heads, positions, channels},
            {positions * pitch(), channels + gap, pitch(), 1}};
  }
  template <class Visit>
  void for_each_row(Visit visit) {
    const View<T, 4> all = view();
    for (index_t b = 0; b < batch; ++b) {
      for (index_t h = 0; h < heads; ++h) {
        for (index_t p = 0; p < positions; ++p) {
          visit(std::span<T>(&all(b, h, p, 0), static_cast<std::size_t>(channels)), p);
        }
      }
    }
  }
  void fill(unsigned seed) {
    const auto count = static_cast<std::size_t>(batch * heads * positions * channels);
    const std::vector<T> values = reference::normals<T>(count, seed);
    auto next = values.begin();
    for_each_row([&](std::span<T> row, index_t) {
      std::copy_n(next, row.size(), row.begin());
      next += static_cast<std::ptrdiff_t>(row.size());
    });
  }
  bool only_rows_differ_from(T value) {
    std::vector<T> copy = storage;
    copy.swap(storage);
    for_each_row([&](std::span<T> row, index_t) { std::ranges::fill(row, value); });
    copy.swap(storage);
    return std::ranges::all_of(copy, [&](T element) { return element == value; });
  }

  index_t channels;
  std::vector<T> storage;
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

/// The largest error in units of what a rotation may cost: a rounding of each factor, product and sum, and in
/// double those of the angle: omega, its exponent (times ln omega), and the product with the position.
template <class T>
Real rotation_error(Heads<T>& in, Heads<T>& out, const RopeOptions& options,
                    const std::vector<index_t>& positions, int direction) {
  const std::vector<Real> frequencies =
      reference::rope_frequencies(options.width, static_cast<Real>(options.theta));
  std::vector<std::vector<T>> inputs;
  in.for_each_row([&](std::span<T> row, index_t) { inputs.emplace_back(row.begin(), row.end()); });
  Real worst = 0;
  std::size_t at = 0;
  out.for_each_row([&](std::span<T> computed, index_t p) {
    const std::vector<T>& row = inputs[at++];
    const auto position = static_cast<Real>(positions[static_cast<std::size_t>(p)]);
    const std::vector<Real> exact =
        reference::rope(std::span<const T>(row), position, frequencies, pairs_of(options.pairing), direction);
    for (index_t i = 0; i < options.width / 2; ++i) {
      const auto [a, b] = channels_of(options.pairing, options.width, i);
      const Real size = std::abs(Real(row[a])) + std::abs(Real(row[b]));
      const Real omega = frequencies[static_cast<std::size_t>(i)], angle = position * omega;
      const Real angle_error = angle * (3 + std::abs(std::log(omega))) * rounding<double>;
      const Real allowed = (4 * rounding<T> + angle_error) * size;
      worst = worse(worst, std::abs(Real(computed[a]) - exact[a]) / allowed);
      worst = worse(worst, std::abs(Real(computed[b]) - exact[b]) / allowed);
    }
    for (auto c = static_cast<std::size_t>(options.width); c < row.size(); ++c) {
      worst = worse(worst, computed[c] == row[c] ? 0 : reference::infinity);
    }
  });
  return worst;
}

/// Visits every width, whole and partial, and both pairings.
template <class Visit>
void for_each_shape(Visit visit) {
  for (const index_t width : widths) {
    for (const index_t passed : {0, 1, 5}) {
      for (const Pairing pairing : pairings) visit(width, width + passed, pairing);
    }
  }
}

// ---- Against the reference
// ---------------------------------------------------------------------------------------

template <class T>
void check_rotations() {
  for_each_target([](const std::string& target) {
    INFO(target);
    Real forward = 0, backward = 0, unsorted = 0, unsorted_backward = 0;
    bool guards = true, in_place = true;
    for_each_shape([&](index_t width, index_t channels, Pairing pairing) {
      for (const index_t first : {0, 3, 4090}) {
        const RopeOptions options{.width = width, .pairing = pairing, .first_position = first};
        const Rope<T> rope(options, 9);
        Heads<T> in(channels), out(channels);
        in.fill(static_cast<unsigned>(width + first));

        const index_t start = first + 4;  // up to the last position of the tables
        const std::vector<index_t> consecutive{start, start + 1, start + 2, start + 3, start + 4};
        ssmax::rope<T>(in.view(), out.view(), rope, start);
        forward = worse(forward, rotation_error(in, out, options, consecutive, +1));
        guards = guards && out.only_rows_differ_from(Heads<T>::sentinel);
        Heads<T> same = in;
        ssmax::rope<T>(same.view(), same.view(), rope, start);
        in_place = in_place && same_bits(same.storage, out.storage);

        ssmax::rope_backward<T>(in.view(), out.view(), rope, start);
        backward = worse(backward, rotation_error(in, out, options, consecutive, -1));
        same = in;
        ssmax::rope_backward<T>(same.view(), same.view(), rope, start);
        in_place = in_place && same_bits(same.storage, out.storage);

        const std::vector<index_t> positions{first + 7, first, first + 8, first + 7, first + 2};
        ssmax::rope<T>(in.view(), out.view(), rope, positions);
        unsorted = worse(unsorted, rotation_error(in, out, options, positions, +1));
        same = in;
        ssmax::rope<T>(same.view(), same.view(), rope, positions);
        in_place = in_place && same_bits(same.storage, out.storage);
        ssmax::rope_backward<T>(in.view(), out.view(), rope, positions);
        unsorted_backward = worse(unsorted_backward, rotation_error(in, out, options, positions, -1));
        guards = guards && out.only_rows_differ_from(Heads<T>::sentinel);
      }
    });
    CHECK(forward <= 1);
    CHECK(backward <= 1);
    CHECK(unsorted <= 1);
    CHECK(unsorted_backward <= 1);
    CHECK(guards);
    CHECK(in_place);
  });
}

TEST_CASE("rotations agree with the reference: float", "[rope]") { check_rotations<float>(); }
TEST_CASE("rotations agree with the reference: double", "[rope]") { check_rotations<double>(); }

TEST_CASE("views of rank 2 and 3 rotate as those of rank 4", "[rope]") {
  const Rope<float> rope({.width = 6}, 20);
  const std::vector<float> in = reference::normals<float>(2 * 5 * 8, 11);
  const std::vector<index_t> positions{4, 1, 19, 0, 3};
  std::vector<float> expected(in.size()), three(in.size()), two(in.size());
  ssmax::rope<float>(View<const float, 4>(in.data(), {1, 2, 5, 8}),
                     View<float, 4>(expected.data(), {1, 2, 5, 8}), rope, positions);
  ssmax::rope<float>(View<const float, 3>(in.data(), {2, 5, 8}), View<float, 3>(three.data(), {2, 5, 8}),
                     rope, positions);
  for (const std::ptrdiff_t half : {0, 40}) {
    ssmax::rope<float>(View<const float, 2>(in.data() + half, {5, 8}),
                       View<float, 2>(two.data() + half, {5, 8}), rope, positions);
  }
  CHECK(in != expected);
  CHECK(same_bits(three, expected));
  CHECK(same_bits(two, expected));
}

TEST_CASE("the options are kept and theta is used", "[rope]") {
  const Rope<double> rope({.width = 4, .theta = 100, .pairing = Pairing::interleaved, .first_position = 2},
                          3);
  CHECK(rope.width() == 4);
  CHECK(rope.first_position() == 2);
  CHECK(rope.positions() == 3);
  CHECK(rope.options().theta == 100);
  const std::vector<double> in{1, 0, 1, 0};
  std::vector<double> out(4);
  ssmax::rope<double>(View<const double, 2>(in.data(), {1, 4}), View<double, 2>(out.data(), {1, 4}), rope, 3);
  const std::array<double, 4> expected{std::cos(3.0), std::sin(3.0), std::cos(0.3), std::sin(0.3)};
  double worst = 0;
  for (std::size_t i = 0; i < 4; ++i) worst = std::max(worst, std::abs(out[i] - expected[i]));
  CHECK(worst <= 1e-15);
}

TEST_CASE("no rows are rotated without complaint", "[rope]") {
  const Rope<float> rope({.width = 4}, 3);
  CHECK_NOTHROW(
      ssmax::rope<float>(View<const float, 2>(nullptr, {0, 4}), View<float, 2>(nullptr, {0, 4}), rope, 3));
  CHECK_NOTHROW(ssmax::rope<float>(View<const float, 2>(nullptr, {0, 4}), View<float, 2>(nullptr, {0, 4}),
                                   rope, std::span<const index_t>{}));
}

// ---- Far positions
// -----------------------------------------------------------------------------------------------

/// cos and sin of every pair at a position: what (1, 0) turns to. The kernels add only a product by one and a
/// difference with zero, so this is what the tables hold.
template <class T>
struct Turns {
  std::vector<T> cosine, sine;

  Turns(const Rope<T>& rope, index_t position) {
    const index_t width = rope.width();
    const Pairing pairing = rope.options().pairing;
    std::vector<T> row(static_cast<std::size_t>(width), T{0});
    for (index_t i = 0; i < width / 2; ++i) row[channels_of(pairing, width, i)[0]] = T{1};
    const View<T, 2> view(row.data(), {1, width});
    ssmax::rope<T>(view, view, rope, position);
    for (index_t i = 0; i < width / 2; ++i) {
      const auto [a, b] = channels_of(pairing, width, i);
      cosine.push_back(row[a]);
      sine.push_back(row[b]);
    }
  }
};

/// The largest absolute error of cos and sin around a position.
template <class T>
Real error_at(index_t position, index_t width, Pairing pairing) {
  const Rope<T> rope({.width = width, .pairing = pairing, .first_position = position - 100}, 201);
  const std::vector<Real> frequencies = reference::rope_frequencies(width, 10'000);
  Real worst = 0;
  for (index_t p = position - 100; p <= position + 100; ++p) {
    const Turns<T> turns(rope, p);
    for (std::size_t i = 0; i < frequencies.size(); ++i) {
      const Real angle = static_cast<Real>(p) * frequencies[i];
      worst = worse(worst, std::abs(Real(turns.cosine[i]) - std::cos(angle)));
      worst = worse(worst, std::abs(Real(turns.sine[i]) - std::sin(angle)));
    }
  }
  return worst;
}

TEST_CASE("angles stay accurate at position 10^6", "[rope]") {
  for_each_target([](const std::string& target) {
    INFO(target);
    // In float half an ulp of one and no more: forming p omega in float would err by 0.03. In double, omega
    // is off by an ulp at most and the product by half of one: 2e-10 + 6e-11 at an angle of 10^6.
    for (const Pairing pairing : pairings) {
      CHECK(error_at<float>(1'000'000, 32, pairing) <= rounding<float> * 1.01L);
      CHECK(error_at<double>(1'000'000, 32, pairing) <= 3e-10L);
      CHECK(error_at<double>(1'000'000, 66, pairing) <= 3e-10L);
      CHECK(error_at<float>(100, 32, pairing) <= rounding<float> * 1.01L);
      CHECK(error_at<double>(100, 32, pairing) <= 1e-13L);
    }
  });
}

// ---- What a rotation is
// ------------------------------------------------------------------------------------------

template <class T>
Real inner(const std::vector<T>& x, const std::vector<T>& y) {
  Real sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += Real(x[i]) * Real(y[i]);
  return sum;
}

template <class T>
void check_transpose() {
  for_each_target([](const std::string& target) {
    INFO(target);
    Real transpose = 0, inverse = 0, norm = 0;
    for_each_shape([&](index_t width, index_t channels, Pairing pairing) {
      const Rope<T> rope({.width = width, .pairing = pairing}, 50);
      const std::array<index_t, 2> extents{6, channels};
      const auto count = static_cast<std::size_t>(6 * channels);
      const std::vector<T> x = reference::normals<T>(count, 1), y = reference::normals<T>(count, 2);
      std::vector<T> turned(count), turned_back(count), round_trip(count);
      ssmax::rope<T>(View<const T, 2>(x.data(), extents), View<T, 2>(turned.data(), extents), rope, 44);
      ssmax::rope_backward<T>(View<const T, 2>(y.data(), extents), View<T, 2>(turned_back.data(), extents),
                              rope, 44);
      ssmax::rope_backward<T>(View<const T, 2>(turned.data(), extents),
                              View<T, 2>(round_trip.data(), extents), rope, 44);
      const Real unit = 4 * rounding<T> * std::sqrt(inner(x, x) * inner(y, y));
      transpose = worse(transpose, std::abs(inner(turned, y) - inner(x, turned_back)) / unit);
      for (std::size_t i = 0; i < count; ++i) {
        inverse = worse(inverse, std::abs(Real(round_trip[i]) - Real(x[i])) / (24 * rounding<T>));
      }
      norm = worse(norm, std::abs(inner(turned, turned) / inner(x, x) - 1) / (8 * rounding<T>));
    });
    CHECK(transpose <= 1);
    CHECK(inverse <= 1);
    CHECK(norm <= 1);
  });
}

TEST_CASE("backward is the transpose and the inverse, and lengths stay", "[rope]") {
  SECTION("float") { check_transpose<float>(); }
  SECTION("double") { check_transpose<double>(); }
}

TEST_CASE("a product of query and key depends on their distance alone", "[rope]") {
  for_each_target([](const std::string& target) {
    INFO(target);
    Real across_positions = 0, across_distances = reference::infinity;
    for (const Pairing pairing : pairings) {
      const Rope<double> rope({.width = 64, .pairing = pairing}, 10'000);
      const std::vector<double> q = reference::normals<double>(64, 3), k = reference::normals<double>(64, 4);
      const auto product = [&](index_t query, index_t key) {
        std::vector<double> turned_q(64), turned_k(64);
        ssmax::rope<double>(View<const double, 2>(q.data(), {1, 64}),
                            View<double, 2>(turned_q.data(), {1, 64}), rope, query);
        ssmax::rope<double>(View<const double, 2>(k.data(), {1, 64}),
                            View<double, 2>(turned_k.data(), {1, 64}), rope, key);
        return inner(turned_q, turned_k);
      };
      for (const index_t distance : {0, 1, 37, 1000}) {
        const Real near_start = product(distance, 0);
        for (const index_t key : {1, 500, 8999}) {
          across_positions = worse(across_positions, std::abs(product(key + distance, key) - near_start));
        }
        across_distances = std::min(across_distances, std::abs(product(distance + 1, 0) - near_start));
      }
    }
    CHECK(across_positions <= 1e-10L);  // 64 products of size one at angles of 10^4, which round at 2e-12
    CHECK(across_distances >= 1e-3L);
  });
}

// ---- Scalings
// ----------------------------------------------------------------------------------------------------

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

TEST_CASE("linear scaling stretches positions", "[rope]") {
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
    // The pair that makes a number of turns in the original length solves L / (2 pi turns) =
    // theta^(2i/width).
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

// ---- Errors
// ------------------------------------------------------------------------------------------------------

/// The message of the std::invalid_argument, which must hold all the words.
template <class Call>
void check_refused(Call call, std::initializer_list<const char*> words) {
  std::string message = "(nothing was thrown)";
  try {
    call();
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  for (const char* word : words) {
    INFO('"' << message << "\" should mention " << word);
    CHECK(message.find(word) != std::string::npos);
  }
}

TEST_CASE("options that make no rotation are refused", "[rope]") {
  const auto refused = [](const RopeOptions& options, index_t positions,
                          std::initializer_list<const char*> words) {
    check_refused([&] { Rope<float>(options, positions); }, words);
  };
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(),
                   inf = std::numeric_limits<double>::infinity();
  refused({.width = 65}, 4, {"width", "65", "even"});
  refused({.width = 0}, 4, {"width", "0"});
  refused({.width = 8}, 0, {"positions", "0"});
  refused({.width = 8, .first_position = -3}, 4, {"first_position", "-3"});
  for (const double theta : {1.0, inf, nan}) refused({.width = 8, .theta = theta}, 4, {"theta"});
  for (const double factor : {0.0, -2.0, inf, nan}) {
    refused({.width = 8, .scaling = RopeScaling::linear(factor)}, 4, {"factor"});
  }
  refused({.width = 2, .scaling = RopeScaling::ntk(2)}, 4, {"ntk", "width"});
  refused({.width = 8, .scaling = RopeScaling::yarn(2, 0)}, 4, {"original_positions"});
  refused({.width = 8, .scaling = RopeScaling::yarn(2, 4096, 32, 1)}, 4, {"low", "high"});
  refused({.width = 8, .scaling = RopeScaling::llama3(2, -1)}, 4, {"original_positions"});
  refused({.width = 8, .scaling = RopeScaling::llama3(2, 4096, 0, 4)}, 4, {"low", "high"});
}

TEST_CASE("calls outside of the tables or with views that do not fit write nothing", "[rope]") {
  constexpr float sentinel = -1234;
  const Rope<float> rope({.width = 8, .first_position = 5}, 10);  // positions 5 to 14
  const std::vector<float> in(256, 1.f);
  std::vector<float> storage(256, sentinel);
  const auto extents = std::array<index_t, 2>{4, 10};
  const View<const float, 2> x(in.data(), extents);
  const View<float, 2> y(storage.data(), extents);
  const auto refused = [&](View<const float, 2> from, View<float, 2> to, auto positions,
                           std::initializer_list<const char*> words) {
    check_refused([&] { ssmax::rope<float>(from, to, rope, positions); }, words);
    check_refused([&] { ssmax::rope_backward<float>(from, to, rope, positions); }, words);
  };
  constexpr index_t furthest = std::numeric_limits<index_t>::max();
  const std::string furthest_name = std::to_string(furthest);
  SECTION("start") {
    refused(x, y, index_t{12}, {"15", "14"});
    refused(x, y, index_t{4}, {"4", "5"});
    refused(x, y, index_t{-1}, {"-1", "5"});
    refused(x, y, furthest - 1, {"position", "14"});
  }
  SECTION("positions: the last one is wrong") {
    const std::vector<index_t> past{5, 6, 7, 15}, negative{5, 6, 7, -1}, far{5, 6, 7, furthest};
    const std::vector<index_t> few{5, 6, 7}, many{5, 6, 7, 8, 9};
    refused(x, y, std::span<const index_t>(past), {"positions", "15", "14"});
    refused(x, y, std::span<const index_t>(negative), {"positions", "-1", "5"});
    refused(x, y, std::span<const index_t>(far), {"positions", furthest_name.c_str(), "14"});
    refused(x, y, std::span<const index_t>(few), {"positions", "3", "4"});
    refused(x, y, std::span<const index_t>(many), {"positions", "5", "4"});
  }
  SECTION("views") {
    refused({in.data(), {4, 7}}, {storage.data(), {4, 7}}, index_t{5}, {"channels", "7", "8"});
    refused(x, {storage.data(), {4, 9}}, index_t{5}, {"out", "9", "10"});
    refused(x, {storage.data(), {5, 10}}, index_t{5}, {"out", "5", "4"});
    refused({nullptr, extents}, y, index_t{5}, {"in", "null"});
    refused(x, {nullptr, extents}, index_t{5}, {"out", "null"});
    refused({in.data(), extents, {20, 2}}, y, index_t{5}, {"in", "stride", "2"});
    refused(x, {storage.data(), extents, {20, 2}}, index_t{5}, {"out", "stride", "2"});
    refused(x, {storage.data(), extents, {9, 1}}, index_t{5}, {"out", "stride", "9"});
    refused({storage.data() + 1, extents}, y, index_t{5}, {"out", "overlaps"});
    refused({storage.data(), extents, {12, 1}}, y, index_t{5}, {"out", "overlaps"});
  }
  CHECK(std::ranges::all_of(storage, [](float value) { return value == sentinel; }));
}

}  // namespace rope_test
