// What must hold for any rows: agreement of all targets, invariances, in place as out of place, any shape,
// and not one element written outside. Over sizes around every vector width and block.

#include "guarded_rows.hpp"
#include "same_bits.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace guarded_rows::properties_test {

// ---- Targets ----------------------------------------------------------------------------------------------

/// Every target may be off by 2 u in exp, 2 u in the division and 5e-7, that is 8.4 u, in the sum; by |a| u
/// in c (z - z_max). Two targets differ by at most twice that. One ulp of storage comes on top.
TEMPLATE_TEST_CASE("every target agrees with scalar", "[properties]", float, double, half, bfloat16) {
  using T = TestType;
  const Real u = std::ldexp(Real(1), -Format<Compute<T>>::digits);
  const TargetScope scope;
  for (const index_t n : sizes) {
    Guarded<T> in(rows_for(n), n), out(rows_for(n), n);
    in.fill(logits_for<T>(n));
    ssmax::set_active_target(Target::scalar);
    ssmax::softmax(in.constant(), out.view(), SSMax<float>{0.43f});
    const std::vector<T> scalar = out.values();
    for (const Target target : ssmax::available_targets()) {
      ssmax::set_active_target(target);
      ssmax::softmax(in.constant(), out.view(), SSMax<float>{0.43f});
      Real worst = 0;
      std::size_t i = 0;
      for (const T value : out.values()) {
        const Real expected = reference::widen(scalar[i++]);
        const Real exponent = expected > 0 ? -std::log(expected) : 0;
        const Real allowed = expected * u * (25 + 2 * exponent) + ulp<T>(expected);
        const Real error = std::abs(reference::widen(value) - expected) / allowed;
        worst = worse(worst, error);
      }
      INFO(ssmax::target_name(target) << " at n = " << n);
      CHECK(worst <= 1);
    }
  }
}

// ---- In place ---------------------------------------------------------------------------------------------

/// The same bits; but what is not a normal number may be flushed to 0 on one way and not on the other.
template <class T>
bool same_normal_bits(const std::vector<T>& a, const std::vector<T>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    const Real larger = std::max(std::abs(reference::widen(a[i])), std::abs(reference::widen(b[i])));
    if (bits(a[i]) != bits(b[i]) && !(larger < std::numeric_limits<Compute<T>>::min())) return false;
  }
  return a.size() == b.size();
}

TEMPLATE_TEST_CASE("in place is bit-identical to out of place", "[properties]", float, double, half,
                   bfloat16) {
  using T = TestType;
  for_each_target([&](const std::string&) {
    bool softmax_same = true, log_same = true, guards = true;
    const SSMax<float> scaling{0.43f, 0.25f};
    for (const index_t n : sizes) {
      const index_t rows = rows_for(n);
      Guarded<T> in(rows, n), out(rows, n), in_place(rows, n);
      const std::vector<T> logits = logits_for<T>(n);
      in.fill(logits);
      ssmax::softmax(in.constant(), out.view(), scaling);
      softmax_same = softmax_same && same_bits(in.values(), logits);
      in_place.fill(logits);
      ssmax::softmax(in_place.constant(), in_place.view(), scaling);
      softmax_same = softmax_same && same_normal_bits(in_place.values(), out.values());
      guards = guards && in_place.guards_untouched();
      ssmax::log_softmax(in.constant(), out.view(), scaling);
      in_place.fill(logits);
      ssmax::log_softmax(in_place.constant(), in_place.view(), scaling);
      log_same = log_same && same_bits(in_place.values(), out.values());
      guards = guards && in_place.guards_untouched();
    }
    CHECK(softmax_same);
    CHECK(log_same);
    CHECK(guards);
  });
}

// ---- Invariances ------------------------------------------------------------------------------------------

/// |y - expected| in units of u (factor + 2 |ln expected|) expected, u half an ulp of one in T.
template <class T>
Real worst_ratio(const std::vector<T>& y, const std::vector<T>& expected, Real factor) {
  const Real u = std::ldexp(Real(1), -Format<T>::digits);
  Real worst = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    const Real value = reference::widen(expected[i]);
    const Real error = std::abs(reference::widen(y[i]) - value) /
                       (u * value * (factor + 2 * std::abs(std::log(static_cast<double>(value)))));
    worst = worse(worst, error);
  }
  return worst;
}

template <class T>
std::vector<T> one_row(std::vector<T> logits) {
  ssmax::softmax(View<const T, 1>(logits), View<T, 1>(logits), Constant{1.25});
  return logits;
}

/// Logits on a grid of 1/64, so that adding a power of two is exact in float.
template <class T>
std::vector<T> grid_row(index_t n) {
  std::vector<T> logits = reference::normals<T>(static_cast<std::size_t>(n), static_cast<unsigned>(n + 9), 2);
  for (T& value : logits) value = std::round(value * 64) / 64;
  return logits;
}

TEMPLATE_TEST_CASE("a shift keeps the result, a permutation permutes it, sums are one", "[properties]", float,
                   double) {
  using T = TestType;
  for_each_target([&](const std::string&) {
    Real shifted_worst = 0, permuted_worst = 0, sum_worst = 0;
    const Real u = std::ldexp(Real(1), -Format<T>::digits);
    for (const index_t n : sizes) {
      if (n == 0) continue;
      const std::vector<T> logits = grid_row<T>(n), y = one_row(logits);

      for (const T shift : {T(1024), T(-4096)}) {
        std::vector<T> shifted = logits;
        for (T& value : shifted) value += shift;
        shifted_worst = worse(shifted_worst, worst_ratio(one_row(shifted), y, 8));
      }

      std::vector<T> turned = logits;
      std::rotate(turned.begin(), turned.begin() + n / 3, turned.end());
      std::reverse(turned.begin(), turned.end());
      std::vector<T> back = one_row(turned);
      std::reverse(back.begin(), back.end());
      std::rotate(back.begin(), back.end() - n / 3, back.end());
      permuted_worst = worse(permuted_worst, worst_ratio(back, y, 8));

      // Every probability may be off by a few u of itself, in one direction: exp, sum, division.
      Real sum = 0;
      for (const T value : y) sum += reference::widen(value);
      sum_worst = worse(sum_worst, std::abs(sum - 1) / (8 * u));
    }
    CHECK(shifted_worst <= 1);
    CHECK(permuted_worst <= 1);
    CHECK(sum_worst <= 1);
  });
}

/// Rounding to storage may push every probability the same way by half an ulp of its own.
TEMPLATE_TEST_CASE("sums are one up to the rounding of the storage type", "[properties]", half, bfloat16) {
  using T = TestType;
  for (const index_t n : sizes) {
    if (n == 0) continue;
    std::vector<T> y = reference::normals<T>(static_cast<std::size_t>(n), static_cast<unsigned>(n), 2);
    ssmax::softmax(View<const T, 1>(y), View<T, 1>(y));
    Real sum = 0, allowed = 1e-6L;
    for (const T value : y) {
      sum += reference::widen(value);
      allowed += ulp<T>(reference::widen(value)) / 2;
    }
    CAPTURE(n);
    CHECK(std::abs(sum - 1) <= allowed);
  }
}

// ---- Shapes -----------------------------------------------------------------------------------------------

TEST_CASE("a row's result does not depend on where it lies", "[properties]") {
  // The same rows as [row, key], as [batch, head, query, key] with odd strides, and one by one.
  constexpr index_t batch = 2, head_count = 3, queries = 5;
  for_each_target([&](const std::string&) {
    Real worst = 0;
    for (const index_t n : {1, 3, 7, 8, 9, 16, 17, 33, 64, 100, 257}) {
      const std::size_t count = static_cast<std::size_t>(batch * head_count * queries * n);
      const std::vector<float> logits = reference::normals<float>(count, 21, 2);
      std::vector<float> matrix(count), single(count);
      ssmax::softmax(View<const float, 2>(logits.data(), {batch * head_count * queries, n}),
                     View<float, 2>(matrix.data(), {batch * head_count * queries, n}), Constant{0.75});
      for (index_t row = 0; row < batch * head_count * queries; ++row) {
        ssmax::softmax(View<const float, 1>(logits.data() + row * n, {n}),
                       View<float, 1>(single.data() + row * n, {n}), Constant{0.75});
      }
      worst = worse(worst, worst_ratio(matrix, single, 8));

      // Heads innermost of the leading dimensions, as in [batch, query, head, key], and padded keys.
      const index_t padded = n + 3;
      const std::array<index_t, 4> shape{batch, head_count, queries, n};
      const std::array<index_t, 4> strides{queries * head_count * padded, padded, head_count * padded, 1};
      std::vector<float> in(static_cast<std::size_t>(batch * queries * head_count * padded), -7), out = in;
      const View<float, 4> in_view(in.data(), shape, strides), out_view(out.data(), shape, strides);
      const View<const float, 4> contiguous(logits.data(), shape), expected(single.data(), shape);
      reference::for_each_index(shape, [&](auto... i) { in_view(i...) = contiguous(i...); });
      ssmax::softmax(View<const float, 4>(in_view), out_view, Constant{0.75});
      std::vector<float> strided;
      reference::for_each_index(shape, [&](auto... i) { strided.push_back(out_view(i...)); });
      worst = worse(worst, worst_ratio(strided, single, 8));
      CHECK(std::count(out.begin(), out.end(), -7.f) == static_cast<std::ptrdiff_t>(out.size() - count));
    }
    CHECK(worst <= 1);
  });
}

TEST_CASE("ragged rows equal rows of that length, and masked keys are 0", "[properties]") {
  constexpr index_t n = 70, rows = n + 1;
  const std::vector<float> logits = reference::normals<float>(rows * n, 31, 2);
  std::vector<index_t> visible;
  for (index_t row = 0; row < rows; ++row)
    visible.push_back((row * 37) % rows);  // every length from 0 to n, shuffled
  for_each_target([&](const std::string&) {
    std::vector<float> y(logits.size(), -7), log_y(logits.size(), -7), lse(rows, -7);
    const View<const float, 2> in(logits.data(), {rows, n});
    ssmax::softmax(in, View<float, 2>(y.data(), {rows, n}), Softmax{}, Lengths{visible});
    ssmax::log_softmax(in, View<float, 2>(log_y.data(), {rows, n}), Softmax{}, Lengths{visible});
    ssmax::logsumexp(in, View<float, 1>(lse), Softmax{}, Lengths{visible});
    Real worst = 0, worst_log = 0;
    for (index_t row = 0; row < rows; ++row) {
      const auto span = std::span<const float>(logits).subspan(static_cast<std::size_t>(row * n), n);
      const reference::Row<float> reference_row{span, 1, {0, visible[static_cast<std::size_t>(row)]}};
      const std::vector<Real> expected = reference::softmax(reference_row);
      const std::vector<Real> expected_log = reference::log_softmax(reference_row);
      for (std::size_t i = 0; i < n; ++i) {
        const auto at = static_cast<std::size_t>(row) * n + i;
        const auto value = static_cast<Real>(y[at]), log_value = static_cast<Real>(log_y[at]);
        // Hidden keys must be exactly 0 and -inf, the others near: |a| < 16, so 40 u relative.
        if (value != expected[i])
          worst = worse(worst, std::abs(value - expected[i]) / (expected[i] * 40 * 0x1p-24L));
        if (log_value != expected_log[i]) worst_log = worse(worst_log, std::abs(log_value - expected_log[i]));
      }
      const auto lse_value = static_cast<Real>(lse[static_cast<std::size_t>(row)]);
      const Real expected_lse = reference::logsumexp(reference_row);
      if (lse_value != expected_lse) worst_log = worse(worst_log, std::abs(lse_value - expected_lse));
    }
    CHECK(worst <= 1);
    CHECK(worst_log <= 4e-6L);
  });
}

template <class T>
void check_large_matrix(index_t rows, index_t n) {
  // Every row is the same logits turned by its number, so that one row's results are the expectation of all.
  const std::vector<T> logits = reference::normals<T>(static_cast<std::size_t>(n), 41, 2);
  const std::vector<T> expected = one_row(logits);
  for_each_target([&](const std::string& target) {
    Guarded<T> in(rows, n), out(rows, n);
    for (index_t r = 0; r < rows; ++r) {
      const auto row = in.row(r);
      std::rotate_copy(logits.begin(), logits.begin() + r % n, logits.end(), row.begin());
    }
    ssmax::softmax(in.constant(), out.view(), Constant{1.25});
    Real worst = 0;
    for (const index_t r : {index_t{1}, rows - 1}) {
      std::vector<T> row(out.row(r).begin(), out.row(r).end());
      std::rotate(row.begin(), row.end() - r % n, row.end());
      worst = worse(worst, worst_ratio(row, expected, 25));
    }
    INFO(target << ", " << rows << " rows of " << n);
    CHECK(worst <= 1);
    CHECK(out.guards_untouched());
  });
}

TEST_CASE("results that leave the caches are the same ones", "[properties]") {
  SECTION("one block a row") { check_large_matrix<float>(1100, 4000); }
  SECTION("many blocks a row") { check_large_matrix<float>(5, 1'000'003); }
  SECTION("short rows") { check_large_matrix<float>(70'001, 63); }
  SECTION("double") { check_large_matrix<double>(5, 450'001); }
}

/// Logits in one storage, probabilities in another: rounded once, from what float computes.
template <class From, class To>
void check_storage_pair() {
  for (const index_t n : sizes) {
    const std::vector<From> logits = reference::normals<From>(static_cast<std::size_t>(n), 51, 2);
    std::vector<To> y(logits.size()), rounded;
    std::vector<float> wide, exact(logits.size());
    for (const From value : logits) wide.push_back(static_cast<float>(value));
    ssmax::softmax(View<const From, 1>(logits), View<To, 1>(y));
    ssmax::softmax(View<const float, 1>(wide), View<float, 1>(exact));
    for (const float value : exact) rounded.push_back(static_cast<To>(value));
    CAPTURE(n);
    CHECK(same_bits(y, rounded));
  }
}

TEST_CASE("input and output may be stored differently", "[properties]") {
  SECTION("half to float") { check_storage_pair<half, float>(); }
  SECTION("bfloat16 to float") { check_storage_pair<bfloat16, float>(); }
  SECTION("float to half") { check_storage_pair<float, half>(); }
  SECTION("float to bfloat16") { check_storage_pair<float, bfloat16>(); }
  SECTION("half to bfloat16") { check_storage_pair<half, bfloat16>(); }
}

TEST_CASE("empty views are accepted", "[properties]") {
  std::vector<float> none, lse;
  ssmax::softmax(View<const float, 1>(none), View<float, 1>(none));
  ssmax::softmax(View<const float, 2>(nullptr, {0, 8}), View<float, 2>(nullptr, {0, 8}));
  ssmax::softmax(View<const float, 2>(nullptr, {8, 0}), View<float, 2>(nullptr, {8, 0}), SSMax<float>{1.f});
  ssmax::logsumexp(View<const float, 2>(nullptr, {0, 8}), View<float, 1>(lse));
  std::vector<float> empty_rows(3, 5);
  ssmax::logsumexp(View<const float, 2>(nullptr, {3, 0}), View<float, 1>(empty_rows));
  CHECK(empty_rows == std::vector<float>(3, -std::numeric_limits<float>::infinity()));
}

}  // namespace guarded_rows::properties_test
