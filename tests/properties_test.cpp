// What must hold for any rows: accuracy next to a naive loop, agreement of all targets, invariances, in place
// as out of place, and not one element written outside. Over sizes around every vector width and block.
// [long_double]: minutes where long double is emulated.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <ssmax/ssmax.hpp>
#include <string>
#include <type_traits>
#include <vector>

#include "catch.hpp"
#include "reference.hpp"
#include "target_scope.hpp"

namespace properties_test {

using reference::Real;
using reference::worse;
using ssmax::bfloat16;
using ssmax::Constant;
using ssmax::Full;
using ssmax::half;
using ssmax::index_t;
using ssmax::Lengths;
using ssmax::Softmax;
using ssmax::SSMax;
using ssmax::Target;
using ssmax::View;

constexpr std::array<index_t, 25> sizes{0,  1,  2,  3,  5,   7,   8,   9,   13,   15,   16,   17,   31,
                                        33, 63, 64, 65, 100, 127, 255, 257, 1000, 1021, 4099, 65537};

// ---- Storage types
// -----------------------------------------------------------------------------------------------

template <class T>
struct Format;  // significant bits, and the exponent of the smallest subnormal
template <>
struct Format<float> {
  using Compute = float;
  using Bits = std::uint32_t;
  static constexpr int digits = 24, smallest = -149;
};
template <>
struct Format<double> {
  using Compute = double;
  using Bits = std::uint64_t;
  static constexpr int digits = 53, smallest = -1074;
};
template <>
struct Format<half> {
  using Compute = float;
  using Bits = std::uint16_t;
  static constexpr int digits = 11, smallest = -24;
};
template <>
struct Format<bfloat16> {
  using Compute = float;
  using Bits = std::uint16_t;
  static constexpr int digits = 8, smallest = -133;
};

template <class T>
using Compute = typename Format<T>::Compute;

/// The distance of two neighbours of T around value.
template <class T>
Real ulp(Real value) {
  if (value == 0) return std::ldexp(Real(1), Format<T>::smallest);
  return std::ldexp(Real(1), std::max(std::ilogb(value) + 1 - Format<T>::digits, Format<T>::smallest));
}

template <class T>
auto bits(T value) {
  return std::bit_cast<typename Format<T>::Bits>(value);
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// The largest error in ulps of T; a NaN counts as infinite.
template <class T>
Real error_in_ulps(std::span<const T> computed, const std::vector<Real>& exact) {
  Real worst = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const Real error = std::abs(reference::widen(computed[i]) - exact[i]) / ulp<T>(exact[i]);
    worst = worse(worst, error);
  }
  return worst;
}

/// Rows inside a larger buffer: an odd offset, gaps between the rows, and a sentinel wherever no row lies.
template <class T>
class Guarded {
 public:
  static constexpr index_t offset = 3, gap = 5;

  Guarded(index_t rows, index_t n) : rows_(rows), n_(n), storage_(size(rows, n), sentinel()) {}

  static T sentinel() { return reference::narrow<T>(-1234); }
  View<T, 2> view() { return {storage_.data() + offset, {rows_, n_}, {n_ + gap, 1}}; }
  View<const T, 2> constant() { return view(); }
  std::span<T> row(index_t r) {
    return std::span<T>(storage_).subspan(static_cast<std::size_t>(offset + r * (n_ + gap)),
                                          static_cast<std::size_t>(n_));
  }
  void fill(const std::vector<T>& values) {
    for (index_t r = 0; r < rows_; ++r) {
      std::copy_n(values.begin() + r * n_, n_, row(r).begin());
    }
  }
  std::vector<T> values() {
    std::vector<T> result;
    for (index_t r = 0; r < rows_; ++r) result.insert(result.end(), row(r).begin(), row(r).end());
    return result;
  }
  bool guards_untouched() const {
    for (index_t i = 0; i < static_cast<index_t>(storage_.size()); ++i) {
      const index_t in_row = (i - offset) % (n_ + gap);
      const bool inside = i >= offset && in_row < n_;
      if (!inside && bits(storage_[static_cast<std::size_t>(i)]) != bits(sentinel())) return false;
    }
    return true;
  }

 private:
  static std::size_t size(index_t rows, index_t n) {
    return static_cast<std::size_t>(offset + rows * (n + gap));
  }

  index_t rows_, n_;
  std::vector<T> storage_;
};

/// Enough rows that the naive loop's largest error over them is no matter of luck.
index_t rows_for(index_t n) { return n > 2000 ? 2 : n > 100 ? 12 : 48; }

template <class T>
std::vector<T> logits_for(index_t n, double deviation = 2) {
  return reference::normals<T>(static_cast<std::size_t>(n * rows_for(n)), static_cast<unsigned>(n + 1),
                               deviation);
}

// ---- Accuracy
// ----------------------------------------------------------------------------------------------------

/// The loop that anyone would write, in the type that the library computes in.
template <class T>
std::vector<T> naive_softmax(std::span<const T> logits, double multiplier) {
  using C = Compute<T>;
  const C c = static_cast<C>(multiplier);
  C top = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const C z = static_cast<C>(reference::widen(logits[i]));
    if (i == 0 || c * z > c * top) top = z;
  }
  std::vector<C> e;
  C sum = 0;
  for (const T logit : logits) {
    e.push_back(std::exp(c * (static_cast<C>(reference::widen(logit)) - top)));
    sum += e.back();
  }
  std::vector<T> y;
  for (const C value : e) y.push_back(static_cast<T>(value / sum));
  return y;
}

template <class T>
std::vector<T> naive_backward(std::span<const T> y, std::span<const T> g, double multiplier) {
  using C = Compute<T>;
  const C c = static_cast<C>(multiplier);
  const auto at = [](std::span<const T> values, std::size_t i) {
    return static_cast<C>(reference::widen(values[i]));
  };
  C inner = 0;
  for (std::size_t i = 0; i < y.size(); ++i) inner += at(g, i) * at(y, i);
  std::vector<T> dz;
  for (std::size_t i = 0; i < y.size(); ++i)
    dz.push_back(static_cast<T>(c * (at(y, i) * (at(g, i) - inner))));
  return dz;
}

/// By how much the library's error exceeds what is allowed: at most 0 is fine.
template <class T>
struct Excess {
  Real value = -reference::infinity;
  index_t n = 0;
  Real library = 0, naive = 0;

  void take(index_t size, Real library_error, Real naive_error) {
    const Real excess = library_error - (2 * naive_error + 1);
    if (excess <= value) return;
    *this = {excess, size, library_error, naive_error};
  }
};

template <class T>
void check_probabilities(double multiplier_of_ln_n, double constant) {
  std::vector<Excess<T>> excess_of_target;
  for_each_target([&](const std::string& target) {
    Excess<T> excess;
    bool guards = true;
    for (const index_t n : sizes) {
      Guarded<T> in(rows_for(n), n), out(rows_for(n), n);
      in.fill(logits_for<T>(n));
      const auto scaling = [&](const ssmax::Row& row) {
        return multiplier_of_ln_n * std::log(static_cast<double>(row.n)) + constant;
      };
      ssmax::softmax(in.constant(), out.view(), scaling);
      guards = guards && out.guards_untouched() && in.guards_untouched();
      Real library_error = 0, naive_error = 0;
      for (index_t r = 0; r < rows_for(n); ++r) {
        const std::span<const T> logits = in.row(r);
        const double c = scaling({.n = n});
        const std::vector<Real> exact =
            reference::softmax(reference::whole_row(logits, static_cast<Real>(c)));
        const std::vector<T> naive = naive_softmax<T>(logits, c);
        library_error = worse(library_error, error_in_ulps<T>(out.row(r), exact));
        naive_error = worse(naive_error, error_in_ulps<T>(naive, exact));
      }
      excess.take(n, library_error, naive_error);
    }
    INFO(target << ", worst at n = " << excess.n << ": " << static_cast<double>(excess.library)
                << " ulp, naive loop " << static_cast<double>(excess.naive) << " ulp");
    CHECK(excess.value <= 0);
    CHECK(guards);
  });
}

template <class T>
void check_all_probabilities() {
  SECTION("Softmax") { check_probabilities<T>(0, 1); }
  SECTION("SSMax") { check_probabilities<T>(0.43, 0); }
  SECTION("negative") { check_probabilities<T>(-0.1, -0.25); }
  SECTION("zero") { check_probabilities<T>(0, 0); }
}

TEST_CASE("probabilities are as good as a naive loop's: float", "[properties][long_double]") {
  check_all_probabilities<float>();
}
TEST_CASE("probabilities are as good as a naive loop's: double", "[properties][long_double]") {
  check_all_probabilities<double>();
}
TEST_CASE("probabilities are as good as a naive loop's: half", "[properties][long_double]") {
  check_all_probabilities<half>();
}
TEST_CASE("probabilities are as good as a naive loop's: bfloat16", "[properties][long_double]") {
  check_all_probabilities<bfloat16>();
}

/// dz in ulps of the largest c y_i (|g_i| + <|g|, y>) of the row: what dz is the difference of. Where that
/// cancels, dz itself is no measure for anybody's rounding.
template <class T>
Real error_of_row(std::span<const T> computed, const std::vector<Real>& exact, Real terms) {
  Real worst = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    worst = worse(worst, std::abs(reference::widen(computed[i]) - exact[i]) / ulp<T>(terms));
  }
  return worst;
}

template <class T>
void check_gradients() {
  for_each_target([&](const std::string& target) {
    Excess<T> excess;
    bool guards = true, in_place = true;
    for (const index_t n : sizes) {
      const index_t rows = rows_for(n);
      Guarded<T> in(rows, n), y(rows, n), g(rows, n), dz(rows, n);
      in.fill(logits_for<T>(n));
      g.fill(reference::normals<T>(static_cast<std::size_t>(n * rows), static_cast<unsigned>(n + 2)));
      const Constant scaling{1.5};
      ssmax::softmax(in.constant(), y.view(), scaling);
      ssmax::softmax_backward<T, 2>({.out = y.view(), .dout = g.view(), .dlogits = dz.view()}, scaling);
      guards = guards && dz.guards_untouched();
      Real library_error = 0, naive_error = 0;
      for (index_t r = 0; r < rows; ++r) {
        const std::span<const T> given_y = y.row(r), given_g = g.row(r);
        Real inner = 0, inner_terms = 0, terms = 0;
        for (std::size_t i = 0; i < given_y.size(); ++i) {
          const Real product = reference::widen(given_y[i]) * reference::widen(given_g[i]);
          inner += product;
          inner_terms += std::abs(product);
        }
        std::vector<Real> exact;
        for (std::size_t i = 0; i < given_y.size(); ++i) {
          const Real y_i = reference::widen(given_y[i]), g_i = reference::widen(given_g[i]);
          exact.push_back(1.5L * y_i * (g_i - inner));
          terms = std::max(terms, 1.5L * y_i * (std::abs(g_i) + inner_terms));
        }
        const std::vector<T> naive = naive_backward<T>(given_y, given_g, 1.5);
        library_error = worse(library_error, error_of_row<T>(dz.row(r), exact, terms));
        naive_error = worse(naive_error, error_of_row<T>(naive, exact, terms));
      }
      excess.take(n, library_error, naive_error);
      const std::vector<T> apart = dz.values();
      ssmax::softmax_backward<T, 2>({.out = y.view(), .dout = g.view(), .dlogits = g.view()}, scaling);
      in_place = in_place && same_bits(g.values(), apart) && g.guards_untouched();
    }
    INFO(target << ", worst at n = " << excess.n << ": " << static_cast<double>(excess.library)
                << " ulp, naive loop " << static_cast<double>(excess.naive) << " ulp");
    CHECK(excess.value <= 0);
    CHECK(guards);
    CHECK(in_place);
  });
}

TEST_CASE("gradients are as good as a naive loop's", "[properties][long_double]") {
  SECTION("float") { check_gradients<float>(); }
  SECTION("double") { check_gradients<double>(); }
  SECTION("half") { check_gradients<half>(); }
  SECTION("bfloat16") { check_gradients<bfloat16>(); }
}

/// log y and lse round c z and a sum of its size: u (2 |log y| + 2 |c z| + 8), u half an ulp of one in the
/// type of computation, and half an ulp of the storage type.
template <class T>
void check_logarithms() {
  const Real u = std::ldexp(Real(1), -Format<Compute<T>>::digits);
  for_each_target([&](const std::string& target) {
    INFO(target);
    Real worst_log = 0, worst_lse = 0;
    bool guards = true;
    for (const index_t n : sizes) {
      const index_t rows = rows_for(n);
      Guarded<T> in(rows, n), out(rows, n);
      in.fill(logits_for<T>(n));
      std::vector<T> lse(static_cast<std::size_t>(rows));
      const Constant scaling{-1.5};
      ssmax::log_softmax(in.constant(), out.view(), scaling);
      ssmax::logsumexp(in.constant(), View<T, 1>(lse), scaling);
      guards = guards && out.guards_untouched();
      for (index_t r = 0; r < rows; ++r) {
        const auto row = reference::whole_row(std::span<const T>(in.row(r)), -1.5L);
        const std::vector<Real> exact = reference::log_softmax(row);
        Real largest = 0;
        for (index_t i = 0; i < n; ++i) {
          const Real scaled = std::abs(1.5L * row.logit(i)), value = exact[static_cast<std::size_t>(i)];
          largest = std::max(largest, scaled);
          const Real allowed = u * (2 * std::abs(value) + 2 * scaled + 8) + ulp<T>(value);
          const Real error =
              std::abs(reference::widen(out.row(r)[static_cast<std::size_t>(i)]) - value) / allowed;
          worst_log = worse(worst_log, error);
        }
        const Real exact_lse = reference::logsumexp(row);
        const T computed = lse[static_cast<std::size_t>(r)];
        if (n == 0) {
          worst_lse = worse(worst_lse, reference::widen(computed) == exact_lse ? 0 : reference::infinity);
          continue;
        }
        const Real allowed = u * (2 * std::abs(exact_lse) + 2 * largest + 8) + ulp<T>(exact_lse);
        const Real error = std::abs(reference::widen(computed) - exact_lse) / allowed;
        worst_lse = worse(worst_lse, error);
      }
    }
    CHECK(worst_log <= 1);
    CHECK(worst_lse <= 1);
    CHECK(guards);
  });
}

TEST_CASE("log_softmax and logsumexp against the reference", "[properties][long_double]") {
  SECTION("float") { check_logarithms<float>(); }
  SECTION("double") { check_logarithms<double>(); }
  SECTION("half") { check_logarithms<half>(); }
  SECTION("bfloat16") { check_logarithms<bfloat16>(); }
}

// ---- Targets
// -----------------------------------------------------------------------------------------------------

/// Every target may be off by 2 u in exp, 2 u in the division and 5e-7, that is 8.4 u, in the sum; by |a| u
/// in c (z - z_max). Two targets differ by at most twice that. One ulp of storage comes on top.
template <class T>
void check_targets_agree() {
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

TEST_CASE("every target agrees with scalar", "[properties]") {
  SECTION("float") { check_targets_agree<float>(); }
  SECTION("double") { check_targets_agree<double>(); }
  SECTION("half") { check_targets_agree<half>(); }
  SECTION("bfloat16") { check_targets_agree<bfloat16>(); }
}

// ---- In place
// ----------------------------------------------------------------------------------------------------

/// The same bits; but what is not a normal number may be flushed to 0 on one way and not on the other.
template <class T>
bool same_normal_bits(const std::vector<T>& a, const std::vector<T>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    const Real larger = std::max(std::abs(reference::widen(a[i])), std::abs(reference::widen(b[i])));
    if (bits(a[i]) != bits(b[i]) && !(larger < std::numeric_limits<Compute<T>>::min())) return false;
  }
  return a.size() == b.size();
}

template <class T>
void check_in_place() {
  for_each_target([&](const std::string& target) {
    INFO(target);
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

TEST_CASE("in place gives the bits of out of place", "[properties]") {
  SECTION("float") { check_in_place<float>(); }
  SECTION("double") { check_in_place<double>(); }
  SECTION("half") { check_in_place<half>(); }
  SECTION("bfloat16") { check_in_place<bfloat16>(); }
}

// ---- Invariances
// -------------------------------------------------------------------------------------------------

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

template <class T>
void check_invariances() {
  for_each_target([&](const std::string& target) {
    INFO(target);
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

TEST_CASE("shifts change nothing, permutations permute, sums are one", "[properties]") {
  SECTION("float") { check_invariances<float>(); }
  SECTION("double") { check_invariances<double>(); }
}

/// Rounding to storage may push every probability the same way by half an ulp of its own.
template <class T>
void check_storage_sum() {
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

TEST_CASE("sums are one up to the rounding of the storage type", "[properties]") {
  SECTION("half") { check_storage_sum<half>(); }
  SECTION("bfloat16") { check_storage_sum<bfloat16>(); }
}

// ---- Shapes
// ------------------------------------------------------------------------------------------------------

TEST_CASE("a row's result does not depend on where it lies", "[properties]") {
  // The same rows as [row, key], as [batch, head, query, key] with odd strides, and one by one.
  constexpr index_t batch = 2, head_count = 3, queries = 5;
  for_each_target([&](const std::string& target) {
    INFO(target);
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
      const auto for_all = [&](auto visit) {
        for (index_t b = 0; b < batch; ++b) {
          for (index_t h = 0; h < head_count; ++h) {
            for (index_t q = 0; q < queries; ++q) {
              for (index_t k = 0; k < n; ++k) visit(b, h, q, k);
            }
          }
        }
      };
      for_all([&](auto... i) { in_view(i...) = contiguous(i...); });
      ssmax::softmax(View<const float, 4>(in_view), out_view, Constant{0.75});
      std::vector<float> strided;
      for_all([&](auto... i) { strided.push_back(out_view(i...)); });
      worst = worse(worst, worst_ratio(strided, single, 8));
      CHECK(std::count(out.begin(), out.end(), -7.f) == static_cast<std::ptrdiff_t>(out.size() - count));
    }
    CHECK(worst <= 1);
  });
}

TEST_CASE("ragged rows equal rows of that length, and hidden keys are 0", "[properties]") {
  constexpr index_t n = 70, rows = n + 1;
  const std::vector<float> logits = reference::normals<float>(rows * n, 31, 2);
  std::vector<index_t> visible;
  for (index_t row = 0; row < rows; ++row)
    visible.push_back((row * 37) % rows);  // every length from 0 to n, shuffled
  for_each_target([&](const std::string& target) {
    INFO(target);
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

/// dc = <u, z> in units of 2^-24 or 2^-53 of the terms that it is summed from.
template <class T>
void check_multiplier_gradient() {
  using C = Compute<T>;
  for_each_target([&](const std::string& target) {
    Real worst = 0;
    index_t worst_n = 0;
    for (const index_t n : sizes) {
      const std::vector<T> logits = reference::normals<T>(static_cast<std::size_t>(n), 61, 2);
      const std::vector<T> g = reference::normals<T>(static_cast<std::size_t>(n), 62);
      std::vector<T> y(logits.size()), dz(logits.size());
      std::vector<C> ds(1), db(1);
      const SSMax<C> scaling{C(0), C(1.25)};
      ssmax::softmax(View<const T, 1>(logits), View<T, 1>(y), scaling);
      ssmax::softmax_backward<T, 1>({.out = View<const T, 1>(y),
                                     .dout = View<const T, 1>(g),
                                     .logits = View<const T, 1>(logits),
                                     .dlogits = View<T, 1>(dz)},
                                    scaling.gradient(ds, db));
      Real inner = 0, inner_terms = 0, exact = 0, terms = std::numeric_limits<Real>::min();
      for (std::size_t i = 0; i < y.size(); ++i) {
        inner += reference::widen(y[i]) * reference::widen(g[i]);
        inner_terms += std::abs(reference::widen(y[i]) * reference::widen(g[i]));
      }
      for (std::size_t i = 0; i < y.size(); ++i) {
        const Real y_i = reference::widen(y[i]), g_i = reference::widen(g[i]),
                   z_i = reference::widen(logits[i]);
        exact += y_i * (g_i - inner) * z_i;
        terms += y_i * (std::abs(g_i) + inner_terms) * std::abs(z_i);
      }
      const Real u = std::ldexp(Real(1), -Format<C>::digits);
      const Real error = std::abs(static_cast<Real>(db[0]) - exact) / (terms * u);
      if (error > worst) worst_n = n;
      worst = worse(worst, error);
    }
    INFO(target << ", worst at n = " << worst_n);
    // Both sums round a few times at their size; blocks keep the number of additions that matter small.
    CHECK(worst <= 8);
  });
}

TEST_CASE("the multiplier's gradient against the reference", "[properties]") {
  SECTION("float") { check_multiplier_gradient<float>(); }
  SECTION("double") { check_multiplier_gradient<double>(); }
  SECTION("half") { check_multiplier_gradient<half>(); }
  SECTION("bfloat16") { check_multiplier_gradient<bfloat16>(); }
}

TEST_CASE("nothing to do is fine", "[properties]") {
  std::vector<float> none, lse;
  ssmax::softmax(View<const float, 1>(none), View<float, 1>(none));
  ssmax::softmax(View<const float, 2>(nullptr, {0, 8}), View<float, 2>(nullptr, {0, 8}));
  ssmax::softmax(View<const float, 2>(nullptr, {8, 0}), View<float, 2>(nullptr, {8, 0}), SSMax<float>{1.f});
  ssmax::logsumexp(View<const float, 2>(nullptr, {0, 8}), View<float, 1>(lse));
  std::vector<float> empty_rows(3, 5);
  ssmax::logsumexp(View<const float, 2>(nullptr, {3, 0}), View<float, 1>(empty_rows));
  CHECK(empty_rows == std::vector<float>(3, -std::numeric_limits<float>::infinity()));
}

}  // namespace properties_test
