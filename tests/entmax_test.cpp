// Sparsemax and entmax-1.5 against their definition in long double, the threshold found by bisection, and against
// the numbers of the PyPI package entmax 1.3.

#include "gradcheck.hpp"
#include "reference.hpp"
#include "refusal.hpp"
#include "same_bits.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace entmax_test {

using reference::Real;
using namespace ssmax;

template <class T>
using Compute = ssmax::ComputeType<T>;

// ---- The definition ---------------------------------------------------------------------------------------

Real power_of(Real height, int power) { return power == 1 ? height : height * height; }

/// Heights above the threshold: y is their power.
std::vector<Real> heights(const std::vector<Real>& z, Real c, int power) {
  std::vector<Real> x;
  Real top = -reference::infinity;
  for (const Real value : z) {
    x.push_back(value == -reference::infinity ? value : c * value / power);
    top = std::max(top, x.back());
  }
  if (top == -reference::infinity) return std::vector<Real>(z.size(), 0);
  Real low = -1, high = 0;
  for (int step = 0; step < 70; ++step) {  // more than a long double has digits
    const Real middle = (low + high) / 2;
    Real sum = 0;
    for (const Real value : x) sum += power_of(std::max(value - top - middle, Real(0)), power);
    (sum >= 1 ? low : high) = middle;
  }
  for (Real& value : x) value = std::max(value - top - low, Real(0));
  return x;
}

/// What a height may be off by: the roundings of a difference of logits, of its product, of the threshold.
template <class T>
constexpr Real height_error = std::same_as<T, double> ? 1e-15L : 5e-7L;

template <class T>
Real storing(Real value) {
  if (std::same_as<T, float> || std::same_as<T, double>)
    return std::numeric_limits<Compute<T>>::epsilon() * value;
  return std::same_as<T, half> ? std::max(value * 0x1p-11L, Real(0x1p-25)) : value * 0x1p-8L;
}

template <int power, class In, class Out, class... More>
void forward(const In& in, Out&& out, More&&... more) {
  if constexpr (power == 1) {
    ssmax::sparsemax(in, out, more...);
  } else {
    ssmax::entmax15(in, out, more...);
  }
}
template <int power, class T, int Rank, class... More>
void backward(const ssmax::RowsBackward<T, Rank>& rows, More&&... more) {
  if constexpr (power == 1) {
    ssmax::sparsemax_backward<T, Rank>(rows, more...);
  } else {
    ssmax::entmax15_backward<T, Rank>(rows, more...);
  }
}

template <class T>
std::vector<Real> wide(const std::vector<T>& values) {
  std::vector<Real> result;
  for (const T value : values) result.push_back(reference::widen(value));
  return result;
}

/// Compares one row's results with the definition, and their sum with 1, on every target.
template <int power, class T>
void check_row(const std::vector<T>& z, double c, const std::string& name) {
  const std::vector<Real> expected = heights(wide(z), static_cast<Real>(c), power);
  for_each_target([&](const std::string& target) {
    std::vector<T> y(z.size(), T(-7));
    forward<power>(View<const T, 1>(z), View<T, 1>(y), Constant{c});
    Real worst = 0, sum = 0, excess = 0;
    for (std::size_t i = 0; i < z.size(); ++i) {
      const Real got = reference::widen(y[i]), r = expected[i], error = height_error<Compute<T>>;
      const Real exact = power_of(r, power);
      const Real allowed = (power == 1 ? error : 2 * r * error + error * error) + storing<T>(exact);
      worst = std::max(worst, std::abs(got - exact) / allowed);
      if (!(got >= 0)) worst = reference::infinity;
      sum += got;
      excess += storing<T>(exact);
    }
    INFO(target << " " << name << " n " << z.size() << " c " << c << ": " << static_cast<double>(worst));
    CHECK(worst <= 1);
    CHECK(std::abs(sum - 1) <= excess + (std::same_as<T, double> ? 3e-15L : 1e-6L));
  });
}

template <int power, class T>
void check_rows(const std::string& name) {
  for (const std::size_t n :
       std::vector<std::size_t>{1, 2, 3, 7, 8, 9, 31, 100, 1000, 4095, 4096, 4097, 9000}) {
    for (const double deviation : {0.01, 1.0, 30.0}) {
      const auto z = reference::normals<T>(n, static_cast<unsigned>(n), deviation);
      check_row<power>(z, -2.0, name);
      if (n > 1000) continue;
      for (const double c : {1.0, 0.37, 0.0}) check_row<power>(z, c, name);
    }
    check_row<power>(std::vector<T>(n, T(3)), 1, name + " equal");
    std::vector<T> steps;  // many supports to go through
    for (std::size_t i = 0; i < n; ++i) steps.push_back(T(-std::sqrt(static_cast<float>(i)) / 8));
    check_row<power>(steps, 1, name + " steps");
    auto masked = reference::normals<T>(n, 5);
    for (std::size_t i = 0; i + 1 < n; i += 2) masked[i] = T(-std::numeric_limits<float>::infinity());
    for (const double c : {1.0, -1.0, 0.0}) check_row<power>(masked, c, name + " masked");
  }
}

TEST_CASE("sparsemax and entmax-1.5 are what their definitions say", "[entmax][slow]") {
  check_rows<1, float>("sparsemax float");
  check_rows<2, float>("entmax15 float");
  check_rows<1, double>("sparsemax double");
  check_rows<2, double>("entmax15 double");
  check_row<1>(reference::normals<half>(300, 1), 0.5, "half");
  check_row<2>(reference::normals<half>(5000, 2), 0.5, "half");
  check_row<1>(reference::normals<bfloat16>(300, 3), 0.5, "bfloat16");
  check_row<2>(reference::normals<bfloat16>(5000, 4), 2, "bfloat16");
}

TEST_CASE("the numbers of the package entmax", "[entmax]") {
  const std::vector<double> z{1.607, 0.35, 0.178, -1.227, 0.092, -2.737, 0.675},
      dy{1.011, -1.435, 0.977, 0.522, 1.238, -0.865, 0.299};
  const auto check = [&]<int power>(std::integral_constant<int, power>, double c,
                                    const std::vector<double>& y, const std::vector<double>& dz) {
    std::vector<double> got(7), gradient(7);
    forward<power>(View<const double, 1>(z), View<double, 1>(got), Constant{c});
    backward<power, double, 1>({.out = got, .dout = dy, .dlogits = gradient}, Constant{c});
    for (std::size_t i = 0; i < 7; ++i) {
      CHECK(std::abs(got[i] - y[i]) <= 1e-14);
      CHECK(std::abs(gradient[i] - dz[i]) <= 1e-14);
    }
  };
  const std::integral_constant<int, 1> sparsemax;
  const std::integral_constant<int, 2> entmax15;
  check(sparsemax, 1, {0.966, 0, 0, 0, 0, 0, 0.034}, {0.356, 0, 0, 0, 0, 0, -0.356});
  check(sparsemax, 0.3, {0.50798, 0.13088, 0.07928, 0, 0.05348, 0, 0.22838},
        {0.1779, -0.5559, 0.1677, 0, 0.246, 0, -0.0357});
  check(sparsemax, -1.5, {0, 0, 0, 0, 0, 1, 0}, {0, 0, 0, 0, 0, 0, 0});
  check(entmax15, 1,
        {0.749422192585124, 0.0562599225875583, 0.0228589429220202, 0, 0.0117054530892512, 0,
         0.159753488816046},
        {0.415331740565063, -0.466373844467999, 0.0673965356993425, 0, 0.0764665293647954, 0,
         -0.092820961161202});
  check(entmax15, 0.3,
        {0.345119085532153, 0.159135865775218, 0.139217317892806, 0.0263634875161206, 0.129757273951599, 0,
         0.200406969332103},
        {0.0987055095266309, -0.225700664049907, 0.0588849530136917, 0.00346143771888734, 0.0850541937031653,
         0, -0.0204054299124684});
  check(entmax15, -1.5, {0, 0, 0, 0, 0, 1, 0}, {0, 0, 0, 0, 0, 0, 0});
}

// ---- Rows of views, masks, scalings, gradients ------------------------------------------------------------

/// dz and dc of one row, of the y that was stored.
template <int power>
Real exact_gradient(const std::vector<Real>& y, const std::vector<Real>& dy, const std::vector<Real>& z,
                    Real c, std::vector<Real>& dz) {
  Real sum = 0, weighed = 0, dc = 0;
  const auto weight = [](Real value) {
    return value == 0 ? Real(0) : power == 1 ? Real(1) : std::sqrt(value);
  };
  for (std::size_t i = 0; i < y.size(); ++i) {
    sum += weight(y[i]);
    if (y[i] != 0) weighed += weight(y[i]) * dy[i];
  }
  dz.assign(y.size(), 0);
  for (std::size_t i = 0; i < y.size(); ++i) {
    if (y[i] == 0) continue;
    const Real u = weight(y[i]) * (dy[i] - weighed / sum);
    dz[i] = c * u;
    dc += u * z[i];
  }
  return dc;
}

template <int power, class T, class M>
void check_views(const M& mask, const std::string& name) {
  // Strided rows [batch, head, query, key], longer ones over several blocks.
  for (const index_t keys : {17, 5000}) {
    const index_t batch = 2, heads = 2, queries = 9, pitch = keys + 3;
    const auto count = static_cast<std::size_t>(batch * heads * queries * pitch);
    const auto z = reference::normals<T>(count, 11);
    auto dy = reference::normals<T>(count, 12);
    std::vector<T> y(count, T(-7)), dz(count, T(-7));
    const std::array<index_t, 4> extents{batch, heads, queries, keys},
        strides{queries * heads * pitch, pitch, heads * pitch, 1};
    const View<const T, 4> logits(z.data(), extents, strides), dout(dy.data(), extents, strides);
    const View<T, 4> out(y.data(), extents, strides), dlogits(dz.data(), extents, strides);
    using P = Compute<T>;
    const std::vector<P> s{P(0.4), P(-0.2)}, b{P(0.5), P(0.1)};
    std::vector<P> ds(2), db(2), ds_threads(2), db_threads(2);
    const SSMax<P> scaling{s, b};
    forward<power>(logits, out, scaling, mask);
    ssmax::ThreadPool pool(3);
    std::vector<T> threaded(count, T(-7));
    forward<power>(logits, View<T, 4>(threaded.data(), extents, strides), scaling, mask, pool);
    CHECK(same_bits(y, threaded));
    const ssmax::RowsBackward<T, 4> rows{.out = out, .dout = dout, .logits = logits, .dlogits = dlogits};
    backward<power, T, 4>(rows, scaling.gradient(ds_threads, db_threads), mask, pool);
    threaded = dz;
    backward<power, T, 4>(rows, scaling.gradient(ds, db), mask);
    CHECK(same_bits(dz, threaded));
    CHECK(same_bits(ds, ds_threads));
    std::vector<Real> expected_ds(2), expected_db(2);
    Real worst = 0, worst_gradient = 0, size = 0;
    for (index_t row = 0; row < batch * heads * queries; ++row) {
      const ssmax::Query query{
          row / (heads * queries), row / queries % heads, row % queries, {batch, heads, queries, keys}};
      const ssmax::KeyRange seen = mask.keys(query);
      const T* first = &logits(query.batch, query.head, query.index, 0);
      const auto at = static_cast<std::size_t>(first - z.data());
      const auto n = static_cast<Real>(std::max<index_t>(seen.size(), 1));
      const Real c = Real(s[static_cast<std::size_t>(query.head)]) * std::log(n) +
                     Real(b[static_cast<std::size_t>(query.head)]);
      std::vector<Real> row_z, row_y, row_dy, row_dz;
      for (index_t key = 0; key < seen.end; ++key) {
        const std::size_t i = at + static_cast<std::size_t>(key);
        row_z.push_back(reference::widen(z[i]));
        row_y.push_back(reference::widen(y[i]));
        row_dy.push_back(reference::widen(dy[i]));
      }
      for (index_t key = seen.end; key < keys; ++key) {
        CHECK(reference::widen(y[at + static_cast<std::size_t>(key)]) == 0);
        CHECK(reference::widen(dz[at + static_cast<std::size_t>(key)]) == 0);
      }
      const std::vector<Real> r = heights(row_z, c, power);
      const Real dc = exact_gradient<power>(row_y, row_dy, row_z, c, row_dz);
      expected_ds[static_cast<std::size_t>(query.head)] += std::log(n) * dc;
      expected_db[static_cast<std::size_t>(query.head)] += dc;
      for (std::size_t i = 0; i < r.size(); ++i) {
        const Real exact = power_of(r[i], power), error = height_error<P>;
        const Real allowed = (power == 1 ? error : 2 * r[i] * error + error * error) + storing<T>(exact);
        worst = std::max(worst, std::abs(row_y[i] - exact) / allowed);
        const Real tolerance = (std::same_as<P, double> ? 1e-13L : 1e-5L) + storing<T>(std::abs(row_dz[i]));
        worst_gradient =
            std::max(worst_gradient, std::abs(reference::widen(dz[at + i]) - row_dz[i]) / tolerance);
      }
      size += std::abs(dc);
    }
    INFO(name << " keys " << keys << ": " << static_cast<double>(worst) << ", gradient "
              << static_cast<double>(worst_gradient));
    CHECK(worst <= 1);
    CHECK(worst_gradient <= 1);
    for (std::size_t head = 0; head < 2; ++head) {
      const Real tolerance = (std::same_as<P, double> ? 1e-13L : 1e-5L) * (1 + 10 * size);
      CHECK(std::abs(Real(ds[head]) - expected_ds[head]) <= tolerance);
      CHECK(std::abs(Real(db[head]) - expected_db[head]) <= tolerance);
    }
    // What lies between the rows is not touched.
    for (index_t row = 0; row < batch * heads * queries; ++row) {
      for (index_t i = keys; i < pitch; ++i) {
        CHECK(reference::widen(y[static_cast<std::size_t>(row * pitch + i)]) == -7);
      }
    }
  }
}

TEST_CASE("views, masks, scalings and gradients of sparse rows", "[entmax][slow]") {
  for_each_target([&](const std::string& target) {
    check_views<1, float>(Causal{}, target + " sparsemax float");
    check_views<2, float>(Causal{}, target + " entmax15 float");
    check_views<1, double>(Full{}, target + " sparsemax double");
    check_views<2, double>(Causal{}, target + " entmax15 double");
    check_views<2, half>(Causal{}, target + " entmax15 half");
    check_views<1, bfloat16>(Full{}, target + " sparsemax bfloat16");
  });
}

TEST_CASE("gradients of sparse rows by finite differences", "[entmax]") {
  std::vector<double> z = reference::normals<double>(12, 3), y(12), dz(12), s{0.7}, ds(1);
  const auto dy = reference::normals<double>(12, 4);
  const View<const double, 2> logits(z.data(), {2, 6}), dout(dy.data(), {2, 6});
  const View<double, 2> out(y.data(), {2, 6}), dlogits(dz.data(), {2, 6});
  const auto check = [&]<int power>(std::integral_constant<int, power>) {
    const auto loss = [&] {
      forward<power>(logits, out, SSMax<double>{s});
      double sum = 0;
      for (std::size_t i = 0; i < 12; ++i) sum += dy[i] * y[i];
      return sum;
    };
    const auto of_z = gradcheck::finite_differences(z, loss), of_s = gradcheck::finite_differences(s, loss);
    loss();
    ds[0] = 0;
    backward<power, double, 2>({.out = out, .dout = dout, .logits = logits, .dlogits = dlogits},
                               SSMax<double>{s}.gradient(ds));
    for (std::size_t i = 0; i < 12; ++i) CHECK(std::abs(dz[i] - of_z[i]) <= 1e-7);
    CHECK(std::abs(ds[0] - of_s[0]) <= 1e-7);
  };
  check(std::integral_constant<int, 1>{});
  check(std::integral_constant<int, 2>{});
}

// ---- Special values ---------------------------------------------------------------------------------------

template <int power, class T>
void check_special(const std::string& target) {
  INFO(target);
  const T inf = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
  const auto of = [](const std::vector<T>& z, double c) {
    std::vector<T> y(z.size(), T(-7));
    forward<power>(z, y, Constant{c});
    return y;
  };
  const auto all_nan = [](const std::vector<T>& y) {
    return std::ranges::all_of(y, [](T v) { return std::isnan(v); });
  };
  const auto nearly = [](const std::vector<T>& y, const std::vector<T>& expected) {
    return std::ranges::equal(y, expected, [](T a, T b) {
      return b == 0 ? a == 0 : std::abs(a - b) <= 2 * std::numeric_limits<T>::epsilon() * b;
    });
  };
  CHECK(of({-inf, -inf, -inf}, 1) == std::vector<T>{0, 0, 0});
  CHECK(of({-inf, -inf, -inf}, -1) == std::vector<T>{0, 0, 0});
  CHECK(of({-inf, 3, -inf}, -2) == std::vector<T>{0, 1, 0});
  CHECK(all_nan(of({1, nan, 2}, 1)));
  CHECK(all_nan(of({1, inf, 2}, 1)));
  CHECK(all_nan(of({1, inf, 2}, 0)));
  CHECK(of({1, inf, 9}, -1) == std::vector<T>{1, 0, 0});
  for (const double c : {std::nan(""), HUGE_VAL, -HUGE_VAL}) CHECK(all_nan(of({1, 2}, c)));
  CHECK(of({5, 5, -inf, 5, 5}, 0) == std::vector<T>{T(0.25), T(0.25), 0, T(0.25), T(0.25)});
  const T huge = std::numeric_limits<T>::max();
  CHECK(nearly(of({huge, -huge, huge, 0}, 1), std::vector<T>{T(0.5), 0, T(0.5), 0}));
  CHECK(of({huge, -huge, 0}, -1e308) == std::vector<T>{0, 1, 0});
  CHECK(nearly(of({1, 1, 0}, 1e308), std::vector<T>{T(0.5), T(0.5), 0}));
  CHECK(nearly(of({huge, -huge}, 0), std::vector<T>{T(0.5), T(0.5)}));
  CHECK(of({7}, 0.1) == std::vector<T>{1});
  CHECK(of({}, 1).empty());

  // The gradient does not look at what has no probability, and NaN spreads over its row.
  const std::vector<T> y{T(0.25), 0, T(0.75), 0}, dy{1, nan, 3, inf}, z{1, -inf, 2, nan};
  std::vector<T> dz(4, T(-7)), ds(1);
  backward<power, T, 1>({.out = y, .dout = dy, .logits = z, .dlogits = dz}, SSMax<T>{T(1)}.gradient(ds));
  CHECK((dz[0] < 0 && dz[1] == 0 && dz[2] > 0 && dz[3] == 0));
  CHECK((std::isfinite(dz[0]) && std::isfinite(ds[0]) && ds[0] != 0));
  const std::vector<T> poisoned{nan, nan}, ones{1, 1};
  std::vector<T> gradient(2);
  backward<power, T, 1>({.out = poisoned, .dout = ones, .dlogits = gradient});
  CHECK(all_nan(gradient));
  const std::vector<T> nothing{0, 0};
  backward<power, T, 1>({.out = nothing, .dout = ones, .dlogits = gradient});
  CHECK(gradient == std::vector<T>{0, 0});
}

TEST_CASE("special values in sparse rows", "[entmax]") {
  for_each_target([&](const std::string& target) {
    check_special<1, float>(target);
    check_special<2, float>(target);
    check_special<1, double>(target);
    check_special<2, double>(target);
  });
}

TEST_CASE("sparse rows in place, and what they refuse", "[entmax]") {
  auto z = reference::normals<float>(9000, 1);
  std::vector<float> y(9000);
  ssmax::entmax15(z, y);
  ssmax::entmax15(z, z);
  CHECK(same_bits(y, z));
  std::vector<float> shorter(8999);
  check_refused({"entmax15", "out", "8999", "9000"}, [&] { ssmax::entmax15(z, shorter); });
  check_refused({"sparsemax", "out", "overlaps"}, [&] {
    ssmax::sparsemax(View<const float, 1>(z.data(), {8000}), View<float, 1>(z.data() + 1, {8000}));
  });
  check_refused({"s", "8999"},
                [&] { ssmax::sparsemax(z, y, SSMax<float>{std::span<const float>(shorter)}); });
}

}  // namespace entmax_test
