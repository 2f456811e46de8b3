// Softmax of short rows under a causal mask, which are computed several at a time: against long double, and with the
// same bits whatever the other rows hold.

#include "reference.hpp"
#include "same_bits.hpp"
#include "target_scope.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace causal_short_rows_test {

using namespace ssmax;
using reference::Real;

constexpr index_t heads = 2;

/// A multiplier per query, of both signs.
struct OwnMultiplier {
  double operator()(const Row& row) const {
    return (row.position % 3 == 0 ? -0.5 : 0.75) + 0.01 * static_cast<double>(row.n);
  }
};

template <class T>
std::vector<T> logits_of(index_t n) {
  return reference::normals<T>(static_cast<std::size_t>(heads * n * n), 3, 2);
}

template <class T, class S, class M>
std::vector<T> computed(const std::vector<T>& z, index_t n, const S& scaling, const M& mask) {
  const std::array<index_t, 4> shape{1, heads, n, n};
  std::vector<T> y(z.size(), T{9});
  softmax(View<const T, 4>(z.data(), shape), View<T, 4>(y.data(), shape), scaling, mask);
  return y;
}

template <class T, class S>
void check_values(const S& scaling) {
  for_each_target([&](const std::string& target) {
    for (const index_t n : {1, 2, 3, 15, 16, 17, 31, 33, 64, 100, 255, 256, 257}) {
      const std::vector<T> z = logits_of<T>(n);
      const std::vector<T> y = computed(z, n, scaling, Causal{});
      Real worst = 0;
      bool masked_are_zero = true;
      for (index_t row = 0; row < heads * n; ++row) {
        const index_t visible = row % n + 1, head = row / n;
        const auto c = static_cast<double>(scaling({.head = head, .position = row % n, .n = visible}));
        const auto first = static_cast<std::size_t>(row * n);
        const auto in = std::span<const T>(z).subspan(first, static_cast<std::size_t>(visible));
        const std::vector<Real> expected = reference::softmax(reference::whole_row(in, static_cast<Real>(c)));
        for (std::size_t i = 0; i < expected.size(); ++i) {
          const Real lost = std::abs(Real{y[first + i]} - expected[i]) / expected[i];
          worst = reference::worse(worst, lost);
        }
        for (index_t i = visible; i < n; ++i)
          masked_are_zero = masked_are_zero && y[first + static_cast<std::size_t>(i)] == 0;
        if (visible == 1) CHECK(y[first] == 1);
      }
      CAPTURE(target, n);
      CHECK(worst <= 8 * Real{std::numeric_limits<T>::epsilon()});
      CHECK(masked_are_zero);
    }
  });
}

TEST_CASE("causal short rows against long double", "[softmax][long_double]") {
  SECTION("float, Softmax") { check_values<float>(Softmax{}); }
  SECTION("float, SSMax") { check_values<float>(SSMax<float>{0.43f}); }
  SECTION("float, own multiplier") { check_values<float>(OwnMultiplier{}); }
  SECTION("double, Softmax") { check_values<double>(Softmax{}); }
  SECTION("double, own multiplier") { check_values<double>(OwnMultiplier{}); }
}

TEST_CASE("special values in a causal short row do not affect the other rows", "[softmax]") {
  constexpr float inf = std::numeric_limits<float>::infinity();
  for_each_target([&](const std::string& target) {
    for (const index_t n : {3, 16, 17, 64, 100}) {
      const std::vector<float> z = logits_of<float>(n);
      const std::vector<float> clean = computed(z, n, SSMax<float>{0.43f}, Causal{});
      for (const float special : {std::numeric_limits<float>::quiet_NaN(), inf, 1e30f, -inf}) {
        std::vector<float> changed_z = z;
        const std::array<index_t, 3> rows{1, n / 2, n - 1};
        for (const index_t row : rows)
          std::fill_n(changed_z.begin() + row * n, special == -inf ? row + 1 : 1, special);
        const std::vector<float> y = computed(changed_z, n, SSMax<float>{0.43f}, Causal{});
        bool same = true;
        for (index_t row = 0; row < heads * n; ++row) {
          const bool is_changed = std::find(rows.begin(), rows.end(), row) != rows.end();
          for (index_t i = 0; i < n; ++i) {
            const auto at = static_cast<std::size_t>(row * n + i);
            if (!is_changed) same = same && same_bits(y[at], clean[at]);
            if (!is_changed || i > row) continue;
            const float expected = special == 1e30f ? (i == 0 ? 1.0f : 0.0f) : special == -inf ? 0.0f : inf;
            same = same && (expected == inf ? std::isnan(y[at]) : y[at] == expected);
          }
        }
        CAPTURE(target, n, special);
        CHECK(same);
      }
    }
  });
}

TEST_CASE("causal short rows have the same bits in place and for every division among threads", "[softmax]") {
  for_each_target([&](const std::string& target) {
    for (const index_t n : {5, 16, 70, 200, 300}) {
      const std::array<index_t, 4> shape{1, heads, n, n};
      const std::vector<float> z = logits_of<float>(n);
      const std::vector<float> expected = computed(z, n, OwnMultiplier{}, Causal{});
      std::vector<float> in_place = z, divided(z.size());
      softmax(View<const float, 4>(in_place.data(), shape), View<float, 4>(in_place.data(), shape),
              OwnMultiplier{}, Causal{});
      test_executors::Reverse reverse;
      softmax(View<const float, 4>(z.data(), shape), View<float, 4>(divided.data(), shape), OwnMultiplier{},
              Causal{}, reverse);
      CAPTURE(target, n);
      CHECK(same_bits(in_place, expected));
      CHECK(same_bits(divided, expected));
    }
  });
}

}  // namespace causal_short_rows_test
