// Functions over rows are as accurate as a naive loop, over sizes around every vector width and block.
// [long_double]: minutes where long double is emulated.

#include "guarded_rows.hpp"
#include "same_bits.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace guarded_rows::properties_accuracy_test {

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

TEMPLATE_TEST_CASE("probabilities are as good as a naive loop's", "[properties][long_double]", float, double,
                   half, bfloat16) {
  using T = TestType;
  SECTION("Softmax") { check_probabilities<T>(0, 1); }
  SECTION("SSMax") { check_probabilities<T>(0.43, 0); }
  SECTION("negative") { check_probabilities<T>(-0.1, -0.25); }
  SECTION("zero") { check_probabilities<T>(0, 0); }
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

TEMPLATE_TEST_CASE("gradients are as good as a naive loop's", "[properties][long_double]", float, double,
                   half, bfloat16) {
  using T = TestType;
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

/// log y and lse round c z and a sum of its size: u (2 |log y| + 2 |c z| + 8), u half an ulp of one in the
/// type of computation, and half an ulp of the storage type.
TEMPLATE_TEST_CASE("log_softmax and logsumexp against the reference", "[properties][long_double]", float,
                   double, half, bfloat16) {
  using T = TestType;
  const Real u = std::ldexp(Real(1), -Format<Compute<T>>::digits);
  for_each_target([&](const std::string&) {
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

/// dc = <u, z> in units of 2^-24 or 2^-53 of the terms that it is summed from.
TEMPLATE_TEST_CASE("the multiplier's gradient against the reference", "[properties]", float, double, half,
                   bfloat16) {
  using T = TestType;
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

}  // namespace guarded_rows::properties_accuracy_test
