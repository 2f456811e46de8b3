// The rotary embedding against the long double reference, on every target: pairings, widths, strides,
// positions, and the transpose.

#include "reference.hpp"
#include "rope_turns.hpp"
#include "same_bits.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace rope_turns::rope_test {

using reference::Pairs;
using reference::Real;
using reference::rounding;
using reference::worse;

constexpr std::array<index_t, 6> widths{2, 6, 10, 32, 64, 66};
constexpr std::array<Pairing, 2> pairings{Pairing::half_split, Pairing::interleaved};

Pairs pairs_of(Pairing pairing) {
  return pairing == Pairing::half_split ? Pairs::half_split : Pairs::interleaved;
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
    reference::for_each_index({batch, heads, positions}, [&](index_t b, index_t h, index_t p) {
      visit(std::span<T>(&all(b, h, p, 0), static_cast<std::size_t>(channels)), p);
    });
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

// ---- Against the reference --------------------------------------------------------------------------------

TEMPLATE_TEST_CASE("rotations agree with the reference", "[rope]", float, double) {
  using T = TestType;
  for_each_target([](const std::string&) {
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

// ---- Far positions ----------------------------------------------------------------------------------------

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
  for_each_target([](const std::string&) {
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

// ---- What a rotation is -----------------------------------------------------------------------------------

template <class T>
Real inner(const std::vector<T>& x, const std::vector<T>& y) {
  Real sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += Real(x[i]) * Real(y[i]);
  return sum;
}

TEMPLATE_TEST_CASE("backward is the transpose and the inverse, and lengths stay", "[rope]", float, double) {
  using T = TestType;
  for_each_target([](const std::string&) {
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

TEST_CASE("a product of query and key depends on their distance alone", "[rope]") {
  for_each_target([](const std::string&) {
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

}  // namespace rope_turns::rope_test
