// The multipliers, the closed forms of the paper's Figure 1, and the trap that several ports fell into: s ln
// n and b multiply the logits. Adding them does nothing.

#include "reference.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace scaling_test {

using reference::largest_difference;
using reference::relative_difference;
using namespace ssmax;

template <class T, class Scaling>
std::vector<T> row_of(const std::vector<T>& logits, const Scaling& scaling) {
  std::vector<T> y(logits.size());
  ssmax::softmax(View<const T, 1>(logits), View<T, 1>(y), scaling);
  return y;
}

TEST_CASE("the multipliers of the table", "[scaling]") {
  const std::vector<double> s{0.43, -1.5}, b{0.25, 2}, p{0, 0.5, 0.75};

  CHECK(Softmax{}(Row{.head = 5, .position = 17, .n = 18}) == 1);
  CHECK(relative_difference(LogN{}(Row{.n = 1000}), 6.907755278982137) <= 1e-14);
  CHECK(relative_difference(SSMax<double>{0.43}(Row{.n = 10}), 0.43 * 2.302585092994046) <= 1e-14);
  CHECK(relative_difference(SSMax<double>{0.43, 0.25}(Row{.n = 10}), 0.43 * 2.302585092994046 + 0.25) <=
        1e-14);
  CHECK(relative_difference(SSMax<double>{s}(Row{.head = 1, .n = 10}), -1.5 * 2.302585092994046) <= 1e-14);
  CHECK(relative_difference(SSMax<double>{s, b}(Row{.head = 0, .n = 10}), 0.43 * 2.302585092994046 + 0.25) <=
        1e-14);
  CHECK(relative_difference(SSMax<double>{s, b}(Row{.head = 1, .n = 10}), -1.5 * 2.302585092994046 + 2) <=
        1e-14);
  CHECK(SSMax<double>{s, b}(Row{.head = 1, .n = 1}) == 2);
  CHECK(relative_difference(SSMax<double>{1.0}(Row{.n = 1'000'000}), 13.815510557964274) <= 1e-14);

  const SizeTable<double> table{p, s, b};
  CHECK(relative_difference(table(Row{.head = 0, .n = 1}), 0.25) <= 1e-14);
  CHECK(relative_difference(table(Row{.head = 1, .n = 3}), -1.5 * 0.75 + 2) <= 1e-14);

  const QwenLogN qwen{1024};
  CHECK(qwen(Row{.position = 0, .n = 1}) == 1);
  CHECK(qwen(Row{.position = 1023, .n = 1024}) == 1);
  CHECK(relative_difference(qwen(Row{.position = 1024, .n = 7}), std::log(1025.0) / std::log(1024.0)) <=
        1e-14);
  CHECK(relative_difference(qwen(Row{.position = 1024 * 1024 - 1, .n = 7}), 2) <= 1e-14);

  const Llama4Temperature llama;
  CHECK(llama(Row{.position = 8190}) == 1);
  CHECK(relative_difference(llama(Row{.position = 8191}), 1 + 0.1 * std::log(2.0)) <= 1e-14);
  CHECK(relative_difference(llama(Row{.position = 3 * 8192 - 1}), 1 + 0.1 * std::log(4.0)) <= 1e-14);
  CHECK(relative_difference(Llama4Temperature(0.5, 4)(Row{.position = 3}), 1 + 0.5 * std::log(2.0)) <= 1e-14);

  const MinistralTemperature ministral;
  CHECK(ministral(Row{.position = 16383}) == 1);
  CHECK(relative_difference(ministral(Row{.position = 16384}), 1 + 0.1 * std::log(2.0)) <= 1e-14);
  CHECK(relative_difference(MinistralTemperature(0.5, 4)(Row{.position = 11}), 1 + 0.5 * std::log(3.0)) <=
        1e-14);

  const ssmax::InklingTemperature inkling;
  CHECK(inkling(Row{.position = 127'999}) == 1);
  CHECK(relative_difference(inkling(Row{.position = 191'999}), 1 + 0.1 * std::log(1.5)) <= 1e-14);
  CHECK(relative_difference(ssmax::InklingTemperature(0.5, 4)(Row{.position = 4}),
                            1 + 0.5 * std::log(1.25)) <= 1e-14);

  CHECK(Constant{0.125}(Row{.n = 9}) == 0.125);
}

TEST_CASE("n with an offset and a floor", "[scaling]") {
  const std::vector<double> s{0.43, -1.5}, b{0.25, 2}, p{0, 0.5, 0.75};
  const auto near = [](double a, double e) { return relative_difference(a, e) <= 1e-14; };
  CHECK(near(AdjustedSize{LogN{}, 1}(Row{.n = 9}), std::log(10.0)));
  CHECK(near(AdjustedSize{LogN{}, 0, 2}(Row{.n = 1}), std::log(2.0)));
  CHECK(near(AdjustedSize{LogN{}, -3}(Row{.n = 2}), 0));
  CHECK(near(AdjustedSize{SSMax<double>{s, b}, 1, 4}(Row{.head = 1, .n = 2}), -1.5 * std::log(4.0) + 2));
  CHECK(near(AdjustedSize{SizeTable<double>{p, s}, -1}(Row{.head = 0, .n = 4}), 0.43 * 0.75));
  CHECK(AdjustedSize{QwenLogN{4}, 7}(Row{.position = 2, .n = 9}) == 1);
  const std::vector<double> of_query{3, 4};
  const ssmax::PerQuery per_query(View<const double, 3>(of_query.data(), {1, 1, 2}));
  CHECK(AdjustedSize{per_query, 1}(ssmax::PlacedRow{{.n = 9}, 0, 1}) == 4);

  // As a functor, on rows; what it learns, it learns for that n.
  const std::vector<float> z{0.5F, -1, 2};
  CHECK(AdjustedSize{LogN{}, 7}(z) == Constant{std::log(10.0)}(z));
  std::vector<double> ds(2), db(2), dp(3);
  AdjustedSize{SSMax<double>{s}.gradient(ds, db), 0, 5}.accumulate(Row{.head = 1, .n = 2}, 3);
  CHECK(near(ds[1], 3 * std::log(5.0)));
  CHECK(db == std::vector<double>{0, 3});
  AdjustedSize{SizeTable<double>{p}.gradient(dp), 1}.accumulate(Row{.n = 2}, 3);
  CHECK(dp == std::vector<double>{0, 0, 3});
  static_assert(ssmax::LearnableScaling<AdjustedSize<ssmax::SSMaxGradient<double>>> &&
                !ssmax::LearnableScaling<AdjustedSize<LogN>>);
  static_assert(ssmax::detail::reads_query<AdjustedSize<ssmax::PerQuery<double>>> &&
                !ssmax::detail::reads_query<AdjustedSize<LogN>>);

  std::vector<double> y(4);
  const View<const double, 2> logits(y.data(), {1, 4});
  const View<double, 2> out(y.data(), {1, 4});
  CHECK_NOTHROW(ssmax::softmax(logits, out, AdjustedSize{SizeTable<double>{p}, -1}));
  CHECK_THROWS_AS(ssmax::softmax(logits, out, AdjustedSize{SizeTable<double>{p}}), std::invalid_argument);
  CHECK_THROWS_AS(ssmax::softmax(logits, out, AdjustedSize{LogN{}, 0, 0}), std::invalid_argument);
  CHECK_THROWS_AS(ssmax::softmax(logits, out, AdjustedSize{LogN{}, std::numeric_limits<index_t>::max()}),
                  std::invalid_argument);
}

/// The paper's Figure 1: z = (-2, ..., -2, +3).
template <class T>
std::vector<T> figure_1(std::size_t n) {
  std::vector<T> z(n, T(-2));
  z.back() = T(3);
  return z;
}

template <class T>
void check_figure_1(double tolerance) {
  struct Expected {
    std::size_t n;
    double softmax, ssmax;  // to the digits that the paper's figure is quoted with
    double quoted_to;
  };
  for (const Expected& e : {Expected{10, 0.943, 0.940, 1e-3}, Expected{1'000, 0.129, 0.99965, 1e-3},
                            Expected{1'000'000, 1.48e-4, 1, 1e-6}}) {
    const std::vector<T> z = figure_1<T>(e.n);
    const auto n = static_cast<double>(e.n);
    const std::vector<T> softmax = row_of(z, Softmax{});
    const std::vector<T> ssmax = row_of(z, SSMax<T>{T(0.43)});
    const double softmax_max = 1 / (1 + (n - 1) * std::exp(-5.0));
    const double ssmax_max = 1 / (1 + (n - 1) * std::pow(n, -5 * static_cast<double>(T(0.43))));
    CAPTURE(e.n);
    CHECK(relative_difference(static_cast<double>(softmax.back()), softmax_max) <= tolerance);
    CHECK(relative_difference(static_cast<double>(ssmax.back()), ssmax_max) <= tolerance);
    CHECK(std::abs(static_cast<double>(softmax.back()) - e.softmax) <= e.quoted_to);
    CHECK(std::abs(static_cast<double>(ssmax.back()) - e.ssmax) <= e.quoted_to);
    // The other keys share what is left, equally: the same exponential divided by the same sum, in every lane.
    const auto [low, high] = std::minmax_element(ssmax.begin(), ssmax.end() - 1);
    CHECK(static_cast<double>(*high) <= static_cast<double>(*low) * (1 + tolerance));
    CHECK(relative_difference(static_cast<double>(*low),
                              ssmax_max * std::pow(n, -5 * static_cast<double>(T(0.43)))) <= 40 * tolerance);
  }
}

// In float the exponent -5 is exact and s ln n z carries a rounding of up to 30 * 2^-24 where n = 10^6, which acts on
// the small probabilities (hence 40 times the tolerance there); the largest one sees a hundredth of it.
TEST_CASE("Figure 1 in closed form", "[scaling]") {
  check_figure_1<double>(1e-13);
  check_figure_1<float>(5e-7);
}

TEST_CASE("SSMax's bounds on the largest probability", "[scaling]") {
  // y_max >= 1 / ((n-1) n^(-s (z_max - z_2nd)) + 1), with equality where all others share z_2nd.
  for (const std::size_t n : {2u, 16u, 1024u}) {
    std::vector<double> z = reference::normals<double>(n, 7);
    const auto top = std::max_element(z.begin(), z.end());
    *top += 1.5;
    double second = -1e9;
    for (const double& value : z) {
      if (&value != &*top) second = std::max(second, value);
    }
    const double s = 0.8;
    const double bound =
        1 / (static_cast<double>(n - 1) * std::pow(static_cast<double>(n), -s * (*top - second)) + 1);
    const std::vector<double> y = row_of(z, SSMax<double>{s});
    CHECK(*std::max_element(y.begin(), y.end()) >= bound * (1 - 1e-13));
  }
}

TEST_CASE("adding s ln n or b to the logits keeps the weights, multiplying changes them", "[scaling]") {
  constexpr std::size_t n = 257;
  const double s = 0.7, b = 0.4, ln_n = std::log(static_cast<double>(n));
  const std::vector<double> z = reference::normals<double>(n, 1);
  const std::vector<double> plain = row_of(z, Softmax{});

  std::vector<double> added = z;
  for (double& value : added) value += s * ln_n + b;
  CHECK(largest_difference(row_of(added, Softmax{}), plain) < 1e-15);

  std::vector<double> multiplied = z;
  for (double& value : multiplied) value *= s * ln_n + b;
  const std::vector<double> ssmax = row_of(z, SSMax<double>{s, b});
  CHECK(largest_difference(ssmax, row_of(multiplied, Softmax{})) < 1e-14);
  CHECK(largest_difference(ssmax, plain) > 0.1);
  CHECK(largest_difference(ssmax, row_of(z, SSMax<double>{s})) > 0.01);  // b counts as well
}

TEST_CASE("negative multipliers turn the order round", "[scaling]") {
  const std::vector<float> z{3, -1, 0.5f, -1, 2}, y = row_of(z, SSMax<float>{-2.f});
  const float c = -2.f * std::log(5.f);
  float sum = 0;
  for (const float value : z) sum += std::exp(c * (value + 1));
  CHECK(relative_difference(y[1], 1 / sum) <= 1e-6);
  CHECK(y[1] == y[3]);
  CHECK(relative_difference(y[0], std::exp(c * 4) / sum) <= 1e-5);
  // b below zero alone does the same.
  const std::vector<float> by_bias = row_of(z, SSMax<float>{0.f, -1.f});
  CHECK(std::max_element(by_bias.begin(), by_bias.end()) - by_bias.begin() == 1);
}

TEST_CASE("a zero multiplier makes the visible keys equal", "[scaling]") {
  for (const std::size_t n : {1u, 3u, 8u, 100u, 4099u}) {
    const std::vector<float> y = row_of(reference::normals<float>(n, 2, 100), SSMax<float>{0.f});
    const auto [low, high] = std::minmax_element(y.begin(), y.end());
    CHECK(*low == *high);
    CHECK(relative_difference(*low, 1.0 / static_cast<double>(n)) <= 2e-7);
  }
}

TEST_CASE("one key gets everything under any scaling", "[scaling]") {
  for (const float z : {0.f, 1e30f, -1e30f, -3.5f}) {
    const std::vector<float> one{z};
    CHECK(row_of(one, Softmax{}) == std::vector<float>{1});
    CHECK(row_of(one, SSMax<float>{0.43f}) == std::vector<float>{1});
    CHECK(row_of(one, SSMax<float>{0.43f, -3.f}) == std::vector<float>{1});
    CHECK(row_of(one, LogN{}) == std::vector<float>{1});
    CHECK(row_of(one, Constant{1e4}) == std::vector<float>{1});
  }
}

TEST_CASE("n counts the visible keys, not the row's extent", "[scaling]") {
  const std::vector<double> z = reference::normals<double>(3 * 9, 3);
  const View<const double, 2> logits(z.data(), {3, 9});
  std::vector<double> y(z.size());
  ssmax::softmax(logits, View<double, 2>(y.data(), {3, 9}), LogN{}, Causal{});
  for (index_t row = 0; row < 3; ++row) {
    const index_t n = 7 + row;
    const std::vector<double> visible(z.begin() + row * 9, z.begin() + row * 9 + n);
    const std::vector<double> alone = row_of(visible, LogN{});
    for (index_t key = 0; key < 9; ++key) {
      const double expected = key < n ? alone[static_cast<std::size_t>(key)] : 0;
      CHECK(relative_difference(y[static_cast<std::size_t>(row * 9 + key)], expected) <= 1e-13);
    }
  }
}

TEST_CASE("a scaling that does not fit names the function that was called", "[scaling][errors]") {
  const std::vector<float> three(3, 1.0F), z(4 * 4);
  std::vector<float> y(z.size()), lse(4);
  const View<const float, 3> logits(z.data(), {2, 2, 4});
  const View<float, 3> out(y.data(), {2, 2, 4});
  const auto named = [&](const auto& scaling, const std::string& said) {
    const auto message = [&](const std::string& function) { return "ssmax::" + function + ": " + said; };
    check_refused_with_words({message("softmax")}, [&] { ssmax::softmax(logits, out, scaling); });
    check_refused_with_words({message("log_softmax")}, [&] { ssmax::log_softmax(logits, out, scaling); });
    check_refused_with_words({message("logsumexp")}, [&] {
      ssmax::logsumexp(logits, View<float, 2>(lse.data(), {2, 2}), scaling);
    });
  };
  named(SSMax<float>{three}, "s has extent 3, heads are 2");
  named(SSMax<float>{std::span<const float>(three).first(2), three}, "b has extent 3, heads are 2");
  named(SSMax<float>{}.gradient(std::span<float>(y).first(3)), "ds has extent 3, heads are 2");
  named(ssmax::SizeTable<float>{three}, "p has extent 3, the largest n is 4");
  named(AdjustedSize{SSMax<float>{three}}, "s has extent 3, heads are 2");
  named(AdjustedSize{LogN{}, 0, 0}, "floor is 0, must be at least 1");
  named(QwenLogN{1}, "trained_length is 1, must be at least 2");
  named(Llama4Temperature{0.1, 0}, "floor_length is 0, must be at least 1");
  named(MinistralTemperature{0.1, 0}, "trained_length is 0, must be at least 1");
  named(ssmax::InklingTemperature{0.1, 0}, "floor_length is 0, must be at least 1");
  // One of the user's own that asks for the name, and one asked directly.
  struct Own {
    double operator()(const Row&) const { return 1; }
    void check(index_t, index_t, const char* function = "Own") const {
      throw std::invalid_argument("ssmax::" + std::string(function) + ": mine");
    }
  };
  named(Own{}, "mine");
  check_refused_with_words({"ssmax::SSMax: s has extent 3, heads are 2"},
                           [&] { SSMax<float>{three}.check(2, 4); });
}

TEST_CASE("a lambda is a scaling", "[scaling]") {
  const std::vector<double> z = reference::normals<double>(12, 4);
  const auto half_logarithm = [](const Row& row) { return 0.5 * std::log(static_cast<double>(row.n)); };
  CHECK(largest_difference(row_of(z, half_logarithm), row_of(z, SSMax<double>{0.5})) < 1e-15);
}

TEST_CASE("scalings see every head, position and n", "[scaling]") {
  // One row per (batch, head, query); the scaling writes down what it is asked.
  std::vector<Row> seen;
  const auto spy = [&](const Row& row) {
    if (std::find(seen.begin(), seen.end(), row) == seen.end()) seen.push_back(row);
    return 1.0;
  };
  const std::vector<double> z(2 * 3 * 2 * 4);
  std::vector<double> y(z.size());
  ssmax::softmax(View<const double, 4>(z.data(), {2, 3, 2, 4}), View<double, 4>(y.data(), {2, 3, 2, 4}), spy,
                 Causal{});
  for (index_t head = 0; head < 3; ++head) {
    for (index_t query = 0; query < 2; ++query) {
      const Row expected{.head = head, .position = 2 + query, .n = 3 + query};
      CHECK(std::find(seen.begin(), seen.end(), expected) != seen.end());
    }
  }
  CHECK(seen.size() == 6);
}

struct Backward {
  std::vector<double> z = reference::normals<double>(2 * 3 * 5, 5),
                      g = reference::normals<double>(2 * 3 * 5, 6);
  std::vector<double> y = std::vector<double>(z.size()), dz = std::vector<double>(z.size());

  template <class Gradient>
  void run(const Gradient& gradient) {
    const View<const double, 3> logits(z.data(), {2, 3, 5}), dout(g.data(), {2, 3, 5});
    const View<double, 3> out(y.data(), {2, 3, 5}), dlogits(dz.data(), {2, 3, 5});
    ssmax::softmax(logits, out, gradient, Causal{});
    ssmax::softmax_backward<double, 3>({.out = out, .dout = dout, .logits = logits, .dlogits = dlogits},
                                       gradient, Causal{});
  }
};

TEST_CASE("gradients of parameters are added to what is there", "[scaling]") {
  Backward rows;
  const std::vector<double> s{0.5, 1}, b{0.25, -1}, p{0, 0.5, 1, 1.25, 1.5};
  const auto twice = [](const std::vector<double>& once) {
    std::vector<double> result = once;
    for (double& value : result) value *= 2;
    return result;
  };
  const auto any = [](const std::vector<double>& values) {
    return std::any_of(values.begin(), values.end(), [](double value) { return std::abs(value) > 1e-3; });
  };

  SECTION("SSMax") {
    const SSMax<double> scaling{s, b};
    std::vector<double> ds(2), db(2);
    rows.run(scaling.gradient(ds, db));
    CHECK(any(ds));
    CHECK(any(db));
    const std::vector<double> ds_once = ds, db_once = db;
    rows.run(scaling.gradient(ds, db));
    CHECK(largest_difference(ds, twice(ds_once)) < 1e-15);
    CHECK(largest_difference(db, twice(db_once)) < 1e-15);

    std::vector<double> ds_alone(2);
    rows.run(scaling.gradient(ds_alone));
    CHECK(ds_alone == ds_once);
  }
  SECTION("size table") {
    const SizeTable<double> scaling{p, s, b};
    std::vector<double> dp(5), ds(2), db(2);
    rows.run(scaling.gradient(dp, ds, db));
    CHECK(any(dp));
    // Sizes 3, 4, 5 occur; no row has 1 or 2 visible keys.
    CHECK((dp[0] == 0 && dp[1] == 0 && dp[2] != 0 && dp[3] != 0 && dp[4] != 0));
    const std::vector<double> dp_once = dp, ds_once = ds, db_once = db;
    rows.run(scaling.gradient(dp, ds, db));
    CHECK(largest_difference(dp, twice(dp_once)) < 1e-15);
    CHECK(largest_difference(ds, twice(ds_once)) < 1e-15);
    CHECK(largest_difference(db, twice(db_once)) < 1e-15);
  }
  SECTION("a scalar s collects in the one element of head 0") {
    std::vector<double> ds(1), db(1);
    const SSMax<double> scaling{0.5, 0.25};
    std::vector<double> y(rows.z.size()), dz(rows.z.size());
    const View<const double, 2> logits(rows.z.data(), {6, 5}), dout(rows.g.data(), {6, 5});
    const View<double, 2> out(y.data(), {6, 5}), dlogits(dz.data(), {6, 5});
    ssmax::softmax(logits, out, scaling);
    ssmax::softmax_backward<double, 2>({.out = out, .dout = dout, .logits = logits, .dlogits = dlogits},
                                       scaling.gradient(ds, db));
    reference::Real dc = 0;
    for (std::size_t row = 0; row < 6; ++row) {
      const auto z = std::span<const double>(rows.z).subspan(row * 5, 5);
      const auto g = std::span<const double>(rows.g).subspan(row * 5, 5);
      const auto c = static_cast<reference::Real>(0.5 * std::log(5.0) + 0.25);
      dc += reference::softmax_backward(reference::whole_row(z, c), g).dc;
    }
    CHECK(relative_difference(db[0], static_cast<double>(dc)) <= 1e-12);
    CHECK(relative_difference(ds[0], static_cast<double>(dc) * std::log(5.0)) <= 1e-12);
  }
}

TEST_CASE("parameters that are too short are refused", "[scaling]") {
  const std::vector<double> one{0.5}, two{0.5, 0.25}, table{0, 1, 1.5, 2};
  std::vector<double> z(2 * 3 * 5), y(z.size(), -7), too_few(1), enough(5);
  const View<const double, 3> logits(z.data(), {2, 3, 5});
  const View<double, 3> out(y.data(), {2, 3, 5});
  const std::span<const double> none;

  const auto refused = [&](const auto& scaling) {
    CHECK_THROWS_AS(ssmax::softmax(logits, out, scaling), std::invalid_argument);
  };
  refused(SSMax<double>{one});
  refused(SSMax<double>{two, one});
  refused(SSMax<double>{none});
  refused(SizeTable<double>{table});
  refused(QwenLogN{1});
  refused(Llama4Temperature(0.1, 0));
  refused(MinistralTemperature(0.1, 0));
  refused(ssmax::InklingTemperature(0.1, 0));
  CHECK(std::count(y.begin(), y.end(), -7) == static_cast<std::ptrdiff_t>(y.size()));

  const auto refused_backward = [&](const auto& gradient) {
    CHECK_THROWS_AS((ssmax::softmax_backward<double, 3>(
                        {.out = out, .dout = logits, .logits = logits, .dlogits = out}, gradient)),
                    std::invalid_argument);
  };
  refused_backward(SSMax<double>{two}.gradient(too_few));
  refused_backward(SizeTable<double>{enough}.gradient(too_few));
}

}  // namespace scaling_test
