// What the headers say of the other rounding modes: results stay finite and near, by the bounds of
// softmax.hpp and attention.hpp. On every target.

#include <cfenv>

#include "reference.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace rounding_modes_test {

using reference::Real;
using reference::worse;
using namespace ssmax;

class RoundingMode {
 public:
  explicit RoundingMode(int mode) { std::fesetround(mode); }
  RoundingMode(const RoundingMode&) = delete;
  RoundingMode& operator=(const RoundingMode&) = delete;
  ~RoundingMode() { std::fesetround(before_); }

 private:
  int before_ = std::fegetround();
};

constexpr int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};

template <class T>
void check_rows(Real probability_bound, Real log_bound) {
  for_each_target([&](const std::string&) {
    Real worst = 0, worst_log = 0, worst_lse = 0;
    for (const std::size_t n : {1u, 2u, 3u, 8u, 16u, 17u, 64u, 100u, 256u, 1000u, 5000u, 100'000u}) {
      for (const double c : {1.0, 2.5, -1.0}) {
        const std::size_t rows = n > 2000 ? 1 : 20;
        const std::vector<T> z = reference::normals<T>(rows * n, static_cast<unsigned>(n), 3);
        for (const int mode : modes) {
          const std::array<index_t, 2> shape{static_cast<index_t>(rows), static_cast<index_t>(n)};
          std::vector<T> y(z.size()), log_y(z.size()), lse(rows);
          {
            const RoundingMode scope(mode);
            const View<const T, 2> in(z.data(), shape);
            ssmax::softmax(in, View<T, 2>(y.data(), shape), Constant{c});
            ssmax::log_softmax(in, View<T, 2>(log_y.data(), shape), Constant{c});
            ssmax::logsumexp(in, View<T, 1>(lse), Constant{c});
          }
          for (std::size_t r = 0; r < rows; ++r) {
            const auto row =
                reference::whole_row(std::span<const T>(z).subspan(r * n, n), static_cast<Real>(c));
            const std::vector<Real> exact = reference::softmax(row), exact_log = reference::log_softmax(row);
            for (std::size_t i = 0; i < n; ++i) {
              worst = worse(worst, std::abs(y[r * n + i] - exact[i]) / exact[i]);
              worst_log =
                  worse(worst_log, std::abs(log_y[r * n + i] - exact_log[i]) / (1 + std::abs(exact_log[i])));
            }
            const Real exact_lse = reference::logsumexp(row);
            worst_lse = worse(worst_lse, std::abs(lse[r] - exact_lse) / (1 + std::abs(exact_lse)));
          }
        }
      }
    }
    CHECK(static_cast<double>(worst) <= static_cast<double>(probability_bound));
    CHECK(static_cast<double>(worst_log) <= static_cast<double>(log_bound));
    CHECK(static_cast<double>(worst_lse) <= static_cast<double>(log_bound));
  });
}

TEST_CASE("rows in the other rounding modes", "[rounding][slow]") {
  SECTION("float") { check_rows<float>(5e-5L, 5e-5L); }
  SECTION("double") { check_rows<double>(5e-11L, 5e-11L); }
}

/// out against Σ p |v|, lse against 1 + |lse|.
template <class T>
void check_attention(Real bound) {
  static constexpr index_t heads = 2, keys = 130, width = 16;
  for_each_target([&](const std::string&) {
    Real worst = 0, worst_lse = 0;
    for (const index_t queries : {index_t{3}, index_t{70}}) {  // both ways that attention is computed
      const auto values = [](index_t rows, unsigned seed) {
        return reference::normals<T>(static_cast<std::size_t>(heads * rows * width), seed);
      };
      const std::vector<T> q = values(queries, 1), k = values(keys, 2), v = values(keys, 3);
      std::vector<T> size_of_v = v;
      for (T& value : size_of_v) value = std::abs(value);
      const auto view = [](const std::vector<T>& x, index_t rows) {
        return View<const T, 4>(x.data(), {1, heads, rows, width});
      };
      const auto visible = [queries](index_t, index_t query) {
        return reference::Keys{0, query + keys - queries + 1};
      };
      const auto one = [](index_t, index_t, index_t) { return Real(1); };
      const auto exact = reference::attention(view(q, queries), view(k, keys), view(v, keys),
                                              1 / std::sqrt(Real(width)), visible, one);
      const auto sizes = reference::attention(view(q, queries), view(k, keys), view(size_of_v, keys),
                                              1 / std::sqrt(Real(width)), visible, one);
      for (const int mode : modes) {
        std::vector<T> out(q.size()), lse(static_cast<std::size_t>(heads * queries));
        {
          const RoundingMode scope(mode);
          ssmax::attention<ssmax::ComputeType<T>>({.q = view(q, queries),
                                                   .k = view(k, keys),
                                                   .v = view(v, keys),
                                                   .out = {out.data(), {1, heads, queries, width}},
                                                   .lse = {lse.data(), {1, heads, queries}}},
                                                  Causal{});
        }
        for (std::size_t i = 0; i < out.size(); ++i) {
          worst = worse(worst, std::abs(out[i] - exact.out[i]) / sizes.out[i]);
        }
        for (std::size_t i = 0; i < lse.size(); ++i) {
          worst_lse = worse(worst_lse, std::abs(lse[i] - exact.lse[i]) / (1 + std::abs(exact.lse[i])));
        }
      }
    }
    CHECK(static_cast<double>(worst) <= static_cast<double>(bound));
    CHECK(static_cast<double>(worst_lse) <= static_cast<double>(bound));
  });
}

TEST_CASE("attention in the other rounding modes", "[rounding]") {
  SECTION("float") { check_attention<float>(5e-5L); }
  SECTION("double") { check_attention<double>(5e-11L); }
}

}  // namespace rounding_modes_test
