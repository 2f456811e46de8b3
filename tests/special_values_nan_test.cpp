// NaN and infinities, on every target: what they make of their row, and that they reach no other.

#include <bit>

#include "special_values.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace special_values::special_values_nan_test {

// ---- NaN --------------------------------------------------------------------------------------------------

/// Rounding may go another way in another kernel: a relative 2e-6 in float holds logits down to 12 below the maximum.
template <class T>
bool nearly_same(T a, T b) {
  const Real larger = std::max(reference::widen(a), reference::widen(b));
  const Real tolerance = std::is_same_v<T, double> ? 1e-14L : std::is_same_v<T, float> ? 2e-6L : 0x1p-7L;
  return std::abs(reference::widen(a) - reference::widen(b)) <= tolerance * larger + 1e-7L * (sizeof(T) == 2);
}

template <class T, class Bits>
void check_nan_everywhere(std::initializer_list<Bits> payloads) {
  for_each_target([&](const std::string&) {
    bool row_is_nan = true, log_is_nan = true, lse_is_nan = true, neighbours_kept = true;
    for (const index_t n : sizes) {
      // Three rows, the NaN in the middle one: rows that share a vector must not share it.
      const std::vector<T> clean = reference::normals<T>(static_cast<std::size_t>(3 * n), 1, 3);
      std::vector<T> clean_y(clean.size());
      ssmax::softmax(View<const T, 2>(clean.data(), {3, n}), View<T, 2>(clean_y.data(), {3, n}));
      const index_t step = n > 100 ? 37 : 1;
      for (index_t position = 0; position < n; position += step) {
        for (const Bits payload : payloads) {
          std::vector<T> z = clean, y(z.size()), lse(3);
          z[static_cast<std::size_t>(n + position)] = std::bit_cast<T>(payload);
          const View<const T, 2> in(z.data(), {3, n});
          const View<T, 2> out(y.data(), {3, n});
          ssmax::softmax(in, out);
          row_is_nan = row_is_nan && std::all_of(y.begin() + n, y.begin() + 2 * n, is_nan<T>);
          for (index_t i = 0; i < n; ++i) {
            for (const index_t other : {i, 2 * n + i}) {
              const auto at = static_cast<std::size_t>(other);
              neighbours_kept = neighbours_kept && nearly_same(y[at], clean_y[at]);
            }
          }
          ssmax::log_softmax(in, out);
          log_is_nan = log_is_nan && std::all_of(y.begin() + n, y.begin() + 2 * n, is_nan<T>) &&
                       std::none_of(y.begin(), y.begin() + n, is_nan<T>) &&
                       std::none_of(y.begin() + 2 * n, y.end(), is_nan<T>);
          ssmax::logsumexp(in, View<T, 1>(lse));
          lse_is_nan = lse_is_nan && !is_nan(lse[0]) && is_nan(lse[1]) && !is_nan(lse[2]);
        }
      }
    }
    CHECK(row_is_nan);
    CHECK(log_is_nan);
    CHECK(lse_is_nan);
    CHECK(neighbours_kept);
  });
}

TEST_CASE("NaN of any payload at any position makes its row NaN, and only its row", "[special]") {
  SECTION("float") {
    check_nan_everywhere<float, std::uint32_t>(
        {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0xFF800001u, 0xFFFFFFFFu});
  }
  SECTION("double") {
    check_nan_everywhere<double, std::uint64_t>(
        {0x7FF8000000000000u, 0xFFF8000000000000u, 0x7FF0000000000001u, 0xFFFFFFFFFFFFFFFFu});
  }
  SECTION("half") { check_nan_everywhere<half, std::uint16_t>({0x7E00u, 0xFE00u, 0x7C01u, 0xFFFFu}); }
  SECTION("bfloat16") { check_nan_everywhere<bfloat16, std::uint16_t>({0x7FC0u, 0xFFC0u, 0x7F81u, 0xFFFFu}); }
}

TEST_CASE("NaN beside infinities, under any multiplier", "[special]") {
  for_each_target([](const std::string&) {
    for (const double c : {1.0, 0.0, -1.0, 1e30}) {
      CAPTURE(c);
      for (const float other : {-inf, inf, 0.f}) {
        std::vector<float> z(19, other);
        z[11] = nan;
        // A key at -inf is hidden: whether a NaN row overwrites its 0 is not part of the contract.
        const std::vector<float> y = softmax(z, Constant{c});
        CHECK(is_nan(y[11]));
        if (other != -inf) CHECK(std::all_of(y.begin(), y.end(), is_nan<float>));
        CHECK(is_nan(logsumexp(z, Constant{c})));
      }
    }
  });
}

TEST_CASE("NaN after the visible keys does not affect the result", "[special]") {
  struct Window {
    KeyRange keys(const Query& query) const { return {query.index % 3, query.shape.keys - 2}; }
  };
  for_each_target([](const std::string&) {
    for (const index_t n : sizes) {
      CAPTURE(n);
      constexpr index_t rows = 6;
      std::vector<index_t> visible;
      for (index_t row = 0; row < rows; ++row) visible.push_back(std::max<index_t>(0, n - 2 * row));
      const auto check = [&](const auto& mask) {
        const index_t stride = n + 2;  // the gap holds NaN as well
        std::vector<float> clean = reference::normals<float>(static_cast<std::size_t>(rows * stride), 3),
                           dirty = clean;
        for (index_t row = 0; row < rows; ++row) {
          const KeyRange seen = mask.keys({.index = row, .shape = {.queries = rows, .keys = n}});
          for (index_t key = 0; key < stride; ++key) {
            if (key < seen.begin || key >= seen.end)
              dirty[static_cast<std::size_t>(row * stride + key)] = nan;
          }
        }
        const auto run = [&](const std::vector<float>& z) {
          std::vector<float> y(static_cast<std::size_t>(rows * n)), log_y(y), lse(rows);
          const View<const float, 2> in(z.data(), {rows, n}, {stride, 1});
          ssmax::softmax(in, View<float, 2>(y.data(), {rows, n}), Softmax{}, mask);
          ssmax::log_softmax(in, View<float, 2>(log_y.data(), {rows, n}), Softmax{}, mask);
          ssmax::logsumexp(in, View<float, 1>(lse), Softmax{}, mask);
          y.insert(y.end(), log_y.begin(), log_y.end());
          y.insert(y.end(), lse.begin(), lse.end());
          return y;
        };
        const std::vector<float> expected = run(clean);
        CHECK(std::none_of(expected.begin(), expected.end(), is_nan<float>));
        CHECK(run(dirty) == expected);
      };
      check(Causal{});
      check(Lengths{visible});
      if (n > 4) check(Window{});
    }
  });
}

// ---- Infinities -------------------------------------------------------------------------------------------

TEMPLATE_TEST_CASE("a logit of -inf has the weight 0 under every multiplier, and a row of -inf is 0",
                   "[special]", float, double, half, bfloat16) {
  using T = TestType;
  const T hidden = reference::narrow<T>(-reference::infinity);
  for_each_target([&](const std::string&) {
    for (const index_t n : sizes) {
      CAPTURE(n);
      std::vector<T> z = reference::normals<T>(static_cast<std::size_t>(n), 4);
      for (std::size_t i = 0; i < z.size(); i += 3) z[i] = hidden;
      for (const double c : {1.0, 0.0, -1.0, 1e-30, -3.0}) {
        CAPTURE(c);
        const std::vector<T> y = softmax(z, Constant{c}), log_y = log_softmax(z, Constant{c});
        const auto row = reference::whole_row(std::span<const T>(z), static_cast<Real>(c));
        const std::vector<Real> exact = reference::softmax(row), exact_log = reference::log_softmax(row);
        bool zero = true, same_log = true;
        Real worst = 0;
        for (std::size_t i = 0; i < z.size(); ++i) {
          const Real value = reference::widen(y[i]), log_value = reference::widen(log_y[i]);
          if (z[i] == hidden) {
            zero = zero && value == 0 && log_value == -reference::infinity;
          } else {
            worst = worse(worst, std::abs(value - exact[i]));
            same_log = same_log && std::abs(log_value - exact_log[i]) < 0.02L * (1 + std::abs(exact_log[i]));
          }
        }
        CHECK(zero);
        CHECK(same_log);
        CHECK(worst < (sizeof(T) == 2 ? 4e-3L : 1e-6L));
      }

      // All of them: a row with nothing to see.
      std::fill(z.begin(), z.end(), hidden);
      for (const double c : {1.0, 0.0, -1.0}) {
        const std::vector<T> y = softmax(z, Constant{c}), log_y = log_softmax(z, Constant{c});
        CHECK(std::all_of(y.begin(), y.end(), [](T value) { return reference::widen(value) == 0; }));
        CHECK(std::all_of(log_y.begin(), log_y.end(), [&](T value) { return value == hidden; }));
        CHECK(logsumexp(z, Constant{c}) == hidden);
      }
    }
  });
}

TEST_CASE("+inf has no softmax: its row is NaN", "[special]") {
  for_each_target([](const std::string&) {
    bool all = true, lse = true;
    for (const index_t n : sizes) {
      for (index_t position = 0; position<n; position += n> 100 ? 37 : 1) {
        std::vector<float> z = reference::normals<float>(static_cast<std::size_t>(n), 5);
        z[static_cast<std::size_t>(position)] = inf;
        for (const double c : {1.0, 0.5}) {
          const std::vector<float> y = softmax(z, Constant{c}), log_y = log_softmax(z, Constant{c});
          all = all && std::all_of(y.begin(), y.end(), is_nan<float>);
          all = all && std::all_of(log_y.begin(), log_y.end(), is_nan<float>);
          lse = lse && !std::isfinite(logsumexp(z, Constant{c}));
        }
      }
    }
    CHECK(all);
    CHECK(lse);
  });
}

}  // namespace special_values::special_values_nan_test
