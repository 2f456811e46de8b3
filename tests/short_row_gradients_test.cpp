// Gradients of short rows, which are computed several at a time, against sums in long double. The bits of a
// row do not depend on the other rows of the call.

#include "reference.hpp"
#include "same_bits.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace short_row_gradients_test {

using namespace ssmax;
using reference::Real;
using ssmax::shared::GradientRows;

enum class Form { softmax, log_softmax };

constexpr index_t most_rows = 33;
constexpr index_t lengths[] = {0,  1,  2,   3,   15,  16,  17,  31,  33,  48,   64,
                               80, 90, 100, 128, 129, 255, 256, 257, 700, 2048, 2049};

std::size_t index(index_t i) { return static_cast<std::size_t>(i); }

/// most_rows rows of n elements. Each array has another stride.
template <class T>
struct Problem {
  Form form;
  index_t n;
  double c;
  index_t out_stride = n + 3, dout_stride = n + 5, logits_stride = n + 1, dlogits_stride = n + 2;
  std::vector<T> out, dout, logits;

  Problem(Form form_, index_t n_, double c_) : form(form_), n(n_), c(c_) {
    dout = reference::normals<T>(index(most_rows * dout_stride), 5);
    logits = reference::normals<T>(index(most_rows * logits_stride), 6, 1.5);
    out.assign(index(most_rows * out_stride), T{7});
    for (index_t r = 0; r < most_rows; ++r) {
      // Logits of weight 0: -inf, and with a negative c also +inf.
      constexpr T inf = std::numeric_limits<T>::infinity();
      for (index_t i = 0; i < n; i += 5) logit(r, i) = c < 0 && i % 2 == 0 ? inf : -inf;
      Real sum = 0;
      for (index_t i = 0; i < n; ++i) sum += weight(r, i);
      for (index_t i = 0; i < n; ++i) {
        const Real p = sum == 0 ? 0 : weight(r, i) / sum;
        out[index(r * out_stride + i)] = static_cast<T>(form == Form::softmax ? p : std::log(p));
      }
    }
  }

  T& logit(index_t r, index_t i) { return logits[index(r * logits_stride + i)]; }
  Real weight(index_t r, index_t i) {
    return std::isinf(logit(r, i)) ? 0 : std::exp(static_cast<Real>(c) * Real{logit(r, i)});
  }
};

template <class T>
struct Gradients {
  std::vector<T> dz;
  std::vector<double> dc;
};

/// Computes rows [first, first + rows) of `p` into their place in `to`.
template <class T>
double compute(const Problem<T>& p, index_t first, index_t rows, bool with_logits, Gradients<T>& to) {
  const detail::SoftmaxGradientKernels<T> tables{detail::kernels<shared::RowKernels<T>>(),
                                                 detail::kernels<shared::DotKernels<T>>(),
                                                 detail::kernels<shared::RowGradientKernels<T>>()};
  const GradientRows<T> work{.out = p.out.data() + first * p.out_stride,
                             .dout = p.dout.data() + first * p.dout_stride,
                             .logits = with_logits ? p.logits.data() + first * p.logits_stride : nullptr,
                             .dlogits = to.dz.data() + first * p.dlogits_stride,
                             .out_stride = p.out_stride,
                             .dout_stride = p.dout_stride,
                             .logits_stride = p.logits_stride,
                             .dlogits_stride = p.dlogits_stride,
                             .rows = rows,
                             .n = p.n};
  double* dc = with_logits ? to.dc.data() + first : nullptr;
  return p.form == Form::softmax ? compiled::softmax_gradient(tables, work, p.c, dc)
                                 : compiled::log_softmax_gradient(tables, work, p.c, dc);
}

/// Returns how many rows have one dc, that of the first of them.
template <class T>
index_t rows_of_dc(const Problem<T>& p) {
  return std::abs(p.c) < 0x1p-64 ? 1 : detail::rows_of_sum(p.n);
}

template <class T>
Gradients<T> empty(const Problem<T>& p) {
  return {std::vector<T>(index(most_rows * p.dlogits_stride), T{9}), std::vector<double>(most_rows)};
}

/// Returns the largest error of the rows, in units of the bound.
template <class T>
Real error(const Problem<T>& p, const Gradients<T>& result) {
  const Real bound = static_cast<Real>(12 + p.n) * Real{std::numeric_limits<T>::epsilon()};
  const auto c = static_cast<Real>(p.c);
  Real worst = 0, dc = 0, size_of_dc = 0;
  for (index_t r = 0; r < most_rows; ++r) {
    const auto y = [&](index_t i) { return Real{p.out[index(r * p.out_stride + i)]}; };
    const auto g = [&](index_t i) { return Real{p.dout[index(r * p.dout_stride + i)]}; };
    const auto weight = [&](index_t i) { return p.form == Form::softmax ? y(i) : std::exp(y(i)); };
    Real total = 0, size = 0;
    for (index_t i = 0; i < p.n; ++i) {
      const Real term = p.form == Form::softmax ? y(i) * g(i) : weight(i) == 0 ? 0 : g(i);
      total += term;
      size += std::abs(term);
    }
    for (index_t i = 0; i < p.n; ++i) {
      const bool masked = weight(i) == 0;
      const Real u = masked ? 0 : p.form == Form::softmax ? y(i) * (g(i) - total) : g(i) - weight(i) * total;
      const Real size_of_u = masked                    ? 0
                             : p.form == Form::softmax ? y(i) * (std::abs(g(i)) + size)
                                                       : std::abs(g(i)) + weight(i) * size;
      const Real z = masked ? 0 : Real{p.logits[index(r * p.logits_stride + i)]};
      dc += u * z;
      size_of_dc += size_of_u * std::abs(z);
      const Real lost = std::abs(Real{result.dz[index(r * p.dlogits_stride + i)]} - c * u);
      const Real allowed = bound * std::abs(c) * size_of_u;
      if (!(lost <= 0)) worst = reference::worse(worst, lost / allowed);
    }
    if ((r + 1) % rows_of_dc(p) != 0 && r + 1 < most_rows) continue;
    const Real lost = std::abs(static_cast<Real>(result.dc[index(r / rows_of_dc(p) * rows_of_dc(p))]) - dc);
    if (!(lost <= 0)) worst = reference::worse(worst, lost / (bound * size_of_dc));
    dc = size_of_dc = 0;
  }
  return worst;
}

template <class T, class Check>
void for_each_problem(const Check& check) {
  for_each_target([&](const std::string& target) {
    for (const Form form : {Form::softmax, Form::log_softmax}) {
      for (const double c : {1.0, -0.75, 0x1p-70}) {
        for (const index_t n : lengths) {
          CAPTURE(target, static_cast<int>(form), c, n);
          check(Problem<T>(form, n, c));
        }
      }
    }
  });
}

TEMPLATE_TEST_CASE("gradients of short rows against long double", "[softmax_backward][long_double]", float,
                   double) {
  using T = TestType;
  for_each_problem<T>([](const Problem<T>& p) {
    Gradients<T> all = empty(p), without_logits = empty(p);
    const double sum = compute(p, 0, most_rows, true, all);
    CHECK(error(p, all) <= 1);
    double dc = 0;
    for (const double of_row : all.dc) dc += of_row;
    CHECK(sum == dc);
    CHECK(compute(p, 0, most_rows, false, without_logits) == 0);
    without_logits.dc = all.dc;
    CHECK(error(p, without_logits) <= 1);
    bool untouched = true;
    for (index_t r = 0; r < most_rows; ++r) {
      for (index_t i = p.n; i < p.dlogits_stride; ++i)
        untouched = untouched && all.dz[index(r * p.dlogits_stride + i)] == 9;
    }
    CHECK(untouched);
  });
}

TEMPLATE_TEST_CASE("gradients of a short row do not depend on the number of rows", "[softmax_backward][slow]",
                   float, double) {
  using T = TestType;
  for_each_problem<T>([](const Problem<T>& p) {
    for (const bool with_logits : {false, true}) {
      Gradients<T> all = empty(p);
      compute(p, 0, most_rows, with_logits, all);
      for (const index_t rows : {1, 2, 15, 16, 17}) {
        Gradients<T> divided = empty(p);
        for (index_t r = 0; r < most_rows; r += rows)
          compute(p, r, std::min(rows, most_rows - r), with_logits, divided);
        CAPTURE(rows, with_logits);
        CHECK(same_bits(divided.dz, all.dz));
        if (rows % rows_of_dc(p) == 0) CHECK(same_bits(divided.dc, all.dc));
      }
    }
  });
}

TEST_CASE("NaN and infinity in a short row do not affect the other rows", "[softmax_backward]") {
  constexpr float inf = std::numeric_limits<float>::infinity();
  for_each_problem<float>([](const Problem<float>& p) {
    Gradients<float> clean = empty(p);
    compute(p, 0, most_rows, true, clean);
    for (const float special : {std::numeric_limits<float>::quiet_NaN(), inf}) {
      if (p.n < 2) continue;
      Problem<float> changed = p;
      const index_t at = p.n - 1 - (p.n % 5 == 1 ? 1 : 0);  // not a masked element
      for (const index_t r : {3, 20, 32}) changed.dout[index(r * p.dout_stride + at)] = special;
      Gradients<float> result = empty(p);
      compute(changed, 0, most_rows, true, result);
      bool others_same = true, has_nan = true;
      const index_t step = rows_of_dc(p);
      for (index_t r = 0; r < most_rows; ++r) {
        const bool is_changed = r == 3 || r == 20 || r == 32;
        const index_t first = r / step * step;  // of the rows with the same dc
        const bool changes_dc =
            first == 3 / step * step || first == 20 / step * step || first == 32 / step * step;
        bool nan_in_row = false;
        for (index_t i = 0; i < p.n; ++i) {
          const std::size_t k = index(r * p.dlogits_stride + i);
          nan_in_row = nan_in_row || !std::isfinite(result.dz[k]);
          if (!is_changed) others_same = others_same && same_bits(result.dz[k], clean.dz[k]);
        }
        if (is_changed) has_nan = has_nan && nan_in_row && !std::isfinite(result.dc[index(first)]);
        if (!changes_dc) others_same = others_same && same_bits(result.dc[index(r)], clean.dc[index(r)]);
      }
      CHECK(others_same);
      CHECK(has_nan);
    }
  });
}

TEST_CASE("gradients of short rows may overwrite dout or out", "[softmax_backward]") {
  for_each_target([](const std::string& target) {
    for (const bool over_out : {false, true}) {
      for (const index_t n : lengths) {
        for (const index_t rows : {1, 2, 15, 16, 17, 33}) {
          CAPTURE(target, over_out, n, rows);
          if (n == 0) continue;
          const auto size = index(rows * n);
          std::vector<float> z = reference::normals<float>(size, 1), g = reference::normals<float>(size, 2);
          std::vector<float> y(size), dz(size);
          const std::array<index_t, 2> shape{rows, n};
          const auto in = [&](const std::vector<float>& v) { return View<const float, 2>(v.data(), shape); };
          const auto to = [&](std::vector<float>& v) { return View<float, 2>(v.data(), shape); };
          const auto backward = [&](Form form, std::vector<float>& dlogits) {
            std::vector<float> ds(1);
            const RowsBackward<float, 2> arguments{
                .out = in(y), .dout = in(g), .logits = in(z), .dlogits = to(dlogits)};
            if (form == Form::softmax) {
              softmax_backward<float, 2>(arguments, SSMax<float>{0.5f, 0.25f}.gradient(ds));
            } else {
              log_softmax_backward<float, 2>(arguments, SSMax<float>{0.5f, 0.25f}.gradient(ds));
            }
            return ds[0];
          };
          for (const Form form : {Form::softmax, Form::log_softmax}) {
            g = reference::normals<float>(size, 2);
            if (form == Form::softmax) {
              softmax(in(z), to(y), SSMax<float>{0.5f, 0.25f});
            } else {
              log_softmax(in(z), to(y), SSMax<float>{0.5f, 0.25f});
            }
            const float ds = backward(form, dz);
            CHECK(same_bits(backward(form, over_out ? y : g), ds));
            CHECK(same_bits(over_out ? y : g, dz));
          }
        }
      }
    }
  });
}

TEST_CASE("one sum has at most 16 rows and at most 256 elements", "[softmax][gradient]") {
  for (const auto& [n, rows] : {std::pair{1, 16}, {16, 16}, {17, 8}, {128, 2}, {129, 1}, {256, 1}}) {
    CHECK(detail::rows_of_sum(n) == rows);
  }
}

}  // namespace short_row_gradients_test
