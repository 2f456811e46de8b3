// Label smoothing, class weights, the softcap, the z-loss and losses of rows, against loops in long double.

#include <numeric>

#include "cross_entropy_problem.hpp"
#include "gradcheck.hpp"
#include "refusal.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace cross_entropy_problem::cross_entropy_terms_test {

/// The options that change the terms. An exponent of 0 leaves the weights out.
struct Terms {
  double label_smoothing = 0;
  double weight_exponent = 0;
  double softcap = 0;
  double z_loss = 0;
};

constexpr std::array<Terms, 9> all_terms{{
    {},
    {.label_smoothing = 0.1},
    {.label_smoothing = 1},
    {.weight_exponent = 1},
    {.softcap = 5},
    {.z_loss = 1e-2},
    {.label_smoothing = 0.25, .weight_exponent = 2},
    {.softcap = 30, .z_loss = 1e-4},
    {.label_smoothing = 0.1, .weight_exponent = 1, .softcap = 20, .z_loss = 1e-3},
}};

/// A problem with terms. Every seventh weight is 0.
template <class T>
struct TermsProblem : Problem<T> {
  std::vector<float> weights;

  TermsProblem(const Terms& terms, index_t row_count, index_t class_count, unsigned seed = 1,
               double deviation = 3)
      : Problem<T>(row_count, class_count, seed, deviation) {
    for (index_t i = 0; terms.weight_exponent > 0 && i < class_count; ++i) {
      const double weight =
          i % 7 == 6 ? 0 : std::pow(0.25 + static_cast<double>(i % 5), terms.weight_exponent);
      weights.push_back(static_cast<float>(weight));
    }
    this->options.label_smoothing = terms.label_smoothing;
    this->options.weights = weights;
    this->options.softcap = terms.softcap;
    this->options.z_loss = terms.z_loss;
  }
  TermsProblem(const TermsProblem&) = delete;

  Real weight(index_t i) const { return weights.empty() ? 1 : Real(weights[static_cast<std::size_t>(i)]); }
};

/// The definition in long double: losses and gradients, and the sizes that errors are relative to.
struct ExpectedTerms {
  std::vector<Real> losses, loss_sizes, gradient, sizes;
  Real weight_sum = 0;

  Real loss(const std::vector<Real>& of_rows) const {
    return weight_sum == 0 ? 0 : std::accumulate(of_rows.begin(), of_rows.end(), Real(0)) / weight_sum;
  }
};

template <class T>
ExpectedTerms expected_terms_of(const TermsProblem<T>& problem) {
  ExpectedTerms expected;
  const CrossEntropyOptions& options = problem.options;
  const Real smoothing = options.label_smoothing, cap = options.softcap, zeta = options.z_loss;
  const auto is_ignored = [&](index_t row) {
    return problem.targets[static_cast<std::size_t>(row)] == ignored;
  };
  for (index_t row = 0; row < problem.rows; ++row) {
    if (!is_ignored(row))
      expected.weight_sum += problem.weight(problem.targets[static_cast<std::size_t>(row)]);
  }
  const Real of_mean = expected.weight_sum == 0 ? 0 : Real(options.dloss) / expected.weight_sum;
  for (index_t row = 0; row < problem.rows; ++row) {
    const Real factor = of_mean + (options.dlosses.empty() ? 0 : Real(options.dlosses(row)));
    const index_t target = problem.targets[static_cast<std::size_t>(row)];
    std::vector<Real> x, slopes;
    for (index_t i = 0; i < problem.classes; ++i) {
      const Real z = widen(problem.logits[static_cast<std::size_t>(row * problem.classes + i)]);
      x.push_back(cap == 0 ? z : cap * std::tanh(z / cap));
      slopes.push_back(cap == 0 ? 1 : 1 / (std::cosh(z / cap) * std::cosh(z / cap)));
    }
    const Real top = *std::max_element(x.begin(), x.end());
    Real sum = 0, weight_sum = 0, smooth = 0, smooth_size = 0;
    for (const Real value : x) sum += std::exp(value - top);
    const Real lse = top + std::log(sum);
    for (index_t i = 0; i < problem.classes; ++i) {
      const Real w = problem.weight(i), above = lse - x[static_cast<std::size_t>(i)];
      weight_sum += w;
      smooth += w > 0 ? w * above : 0;
      smooth_size += w > 0 ? w * std::max(Real(1), above) : 0;
    }
    const Real share = smoothing / static_cast<Real>(problem.classes);
    const Real own = is_ignored(row) ? 0 : (1 - smoothing) * problem.weight(target);
    const Real above = is_ignored(row) ? 0 : lse - x[static_cast<std::size_t>(target)];
    const Real used = is_ignored(row) ? 0 : 1;
    expected.losses.push_back(
        used * ((own > 0 ? own * above : 0) + (share > 0 ? share * smooth : 0) + zeta * lse * lse));
    expected.loss_sizes.push_back(used * (own * std::max(Real(1), above) + share * smooth_size +
                                          2 * zeta * std::max(Real(1), lse * lse)));
    for (index_t i = 0; i < problem.classes; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const Real p = std::exp(x[at] - top) / sum, w = problem.weight(i), mass = own + share * weight_sum;
      expected.gradient.push_back(used * factor * slopes[at] *
                                  ((mass + 2 * zeta * lse) * p - share * w - (i == target ? own : 0)));
      expected.sizes.push_back(
          used * std::abs(factor) *
          ((mass + 2 * zeta * std::max(Real(1), std::abs(lse))) * (i == target ? 1 : p) + share * w));
    }
  }
  return expected;
}

/// Checks all results in units of the bounds of the header.
template <class T>
void check_terms(TermsProblem<T>& problem) {
  constexpr bool is_double = std::is_same_v<T, double>;
  constexpr Real rounding = std::is_same_v<T, half> ? 0x1p-11L : std::is_same_v<T, bfloat16> ? 0x1p-8L : 0;
  constexpr Real smallest = std::is_same_v<T, half> ? 0x1p-25L : is_double ? 0x1p-1000L : 0x1p-110L;
  const ExpectedTerms expected = expected_terms_of(problem);
  const Real unit = (is_double ? 2e-15L : 1e-6L) * (1 + Real(problem.options.softcap));
  double first_loss = 0;
  for (const Where where : {Where::left_out, Where::apart, Where::in_place}) {
    std::vector<double> losses(static_cast<std::size_t>(problem.rows), -1);
    problem.options.losses = View<double, 1>(losses.data(), {problem.rows});
    const Result<T> result = problem.run(where, 3);
    problem.options.losses = {};
    const auto ratio = [](Real value, Real exact, Real allowed) {
      return value == exact ? 0 : std::abs(value - exact) / allowed;
    };
    Real worst =
        ratio(result.loss, expected.loss(expected.losses), unit * expected.loss(expected.loss_sizes));
    for (std::size_t row = 0; row < losses.size(); ++row) {
      worst =
          reference::worse(worst, ratio(losses[row], expected.losses[row], unit * expected.loss_sizes[row]));
    }
    Real worst_gradient = 0;
    for (std::size_t i = 0; i < result.gradient.size(); ++i) {
      const Real exact = expected.gradient[i];
      worst_gradient = reference::worse(
          worst_gradient, ratio(widen(result.gradient[i]), exact,
                                unit * expected.sizes[i] + rounding * std::abs(exact) + smallest));
    }
    INFO("loss error " << worst << ", gradient error " << worst_gradient << " times what is allowed");
    CHECK(worst <= 1);
    CHECK(worst_gradient <= 1);
    CHECK(result.kept);
    if (where == Where::left_out) first_loss = result.loss;
    CHECK(result.loss == first_loss);
  }
}

TEMPLATE_TEST_CASE("terms of the loss agree with the long double reference", "[cross_entropy]", float, double,
                   half, bfloat16) {
  for_each_target([](const std::string& name) {
    for (const Terms& terms : all_terms) {
      for (const auto& [rows, classes] : {std::array<index_t, 2>{1, 1},
                                          {3, 2},
                                          {5, 3},
                                          {7, 17},
                                          {3, 257},
                                          {2, 1024},
                                          {2, 4096},
                                          {2, 4099},
                                          {1, 10'007}}) {
        INFO(name << ' ' << rows << " x " << classes << ", smoothing " << terms.label_smoothing
                  << ", weights " << terms.weight_exponent << ", softcap " << terms.softcap << ", z-loss "
                  << terms.z_loss);
        TermsProblem<TestType> problem(terms, rows, classes, static_cast<unsigned>(classes));
        problem.options.dloss = -1.75;
        check_terms(problem);
        if (rows > 2) problem.target(1) = ignored;
        for (TestType& z : problem.logits) z = narrow<TestType>(widen(z) * 10);
        check_terms(problem);
      }
    }
  });
}

TEST_CASE("gradients of terms agree with finite differences", "[cross_entropy]") {
  for_each_target([](const std::string& name) {
    for (const Terms& terms : all_terms) {
      INFO(name << ", smoothing " << terms.label_smoothing << ", weights " << terms.weight_exponent
                << ", softcap " << terms.softcap << ", z-loss " << terms.z_loss);
      TermsProblem<double> problem(terms, 4, 9, 21, 1.5);
      problem.options.dloss = -2.5;
      problem.target(1) = ignored;
      const Result<double> result = problem.run(Where::apart);
      const std::vector<double> numeric = gradcheck::finite_differences(
          problem.logits, [&] { return -2.5 * problem.run(Where::left_out).loss; });
      CHECK(gradcheck::relative_error(result.gradient, numeric) <= 1e-7);
    }
  });
}

TEMPLATE_TEST_CASE("dlosses are gradients of the losses of rows", "[cross_entropy]", float, double, half,
                   bfloat16) {
  const std::vector<double> dlosses{0.5, -2, 0, 3, 1e-3};
  for_each_target([&](const std::string& name) {
    for (const Terms& terms : all_terms) {
      for (const double dloss : {0.0, -1.75}) {
        INFO(name << ", smoothing " << terms.label_smoothing << ", softcap " << terms.softcap << ", dloss "
                  << dloss);
        TermsProblem<TestType> problem(terms, 5, 37);
        problem.options.dloss = dloss;
        problem.options.dlosses = View<const double, 1>(dlosses.data(), {5});
        check_terms(problem);
        problem.target(3) = ignored;
        check_terms(problem);
      }
    }
  });
}

TEST_CASE("dlosses without a row that counts, and dlosses that do not fit", "[cross_entropy][errors]") {
  Problem<double> problem(3, 7);
  std::vector<double> numbers{1, 2, 3};
  problem.options.dlosses = View<const double, 1>(numbers.data(), {3});
  problem.targets.assign(3, ignored);
  CHECK(problem.run(Where::apart).gradient == std::vector<double>(21, 0));

  const auto message = [&] { return refusal([&] { problem.run(Where::apart); }); };
  problem.options.dlosses = View<const double, 1>(numbers.data(), {2});
  CHECK(mentions(message(), "dlosses has extent 2"));
  problem.options.dlosses = View<const double, 1>(numbers.data(), {3});
  problem.options.losses = View<double, 1>(numbers.data(), {3});
  CHECK(mentions(message(), "overlaps dlosses"));
  CHECK(numbers == std::vector<double>{1, 2, 3});
}

/// pytorch/pytorch#73205 and #69339 report the value.
TEST_CASE("label smoothing ignores rows as PyTorch does", "[cross_entropy]") {
  const std::vector<float> logits{1, 2, 3, 0.4f};
  const std::vector<index_t> targets{ignored, 1};
  const CrossEntropy result = cross_entropy<float>(View<const float, 2>(logits.data(), {2, 2}), targets, {},
                                                   {.label_smoothing = 0.1});
  CHECK(std::abs(result.loss - 2.541645) <= 1e-6);
  CHECK(result.count == 1);
}

/// The values of "cross_entropy of (1, 2, 3)" in cross_entropy_test.cpp.
TEMPLATE_TEST_CASE("targets may be integers of any type", "[cross_entropy]", std::int32_t, std::int16_t,
                   std::uint8_t, index_t) {
  const std::vector<double> logits{1, 2, 3, 1, 2, 3, 5, 5, 5, 0, 0, 0};
  const auto none = static_cast<TestType>(std::is_signed_v<TestType> ? ignored : 255);
  const std::vector<TestType> targets{2, 0, 1, none};
  std::vector<double> dlogits(12, nan);
  const CrossEntropy answer =
      cross_entropy<double>(View<const double, 2>(logits.data(), {4, 3}), targets,
                            View<double, 2>(dlogits.data(), {4, 3}), {.ignored = static_cast<index_t>(none)});
  CHECK(answer.count == 3);
  CHECK(std::abs(answer.loss - (2 * 0.40760596444438013 + 2 + 1.0986122886681098) / 3) <= 1e-15);
  const std::vector<double> expected{0.03001019105679349,
                                     0.08157615701826589,
                                     -0.1115863480750594,
                                     -0.30332314227653984,
                                     0.08157615701826589,
                                     0.22174698525827394,
                                     1.0 / 9,
                                     -2.0 / 9,
                                     1.0 / 9};
  for (std::size_t i = 0; i < 9; ++i) CHECK(std::abs(dlogits[i] - expected[i]) <= 1e-15);
  for (std::size_t i = 9; i < 12; ++i) CHECK(dlogits[i] == 0);
}

TEST_CASE("losses of rows without other terms keep loss and gradient", "[cross_entropy]") {
  Problem<float> problem(5, 33);
  problem.target(3) = ignored;
  const Result<float> plain = problem.run(Where::apart);
  std::vector<double> losses(5, -1);
  problem.options.losses = View<double, 1>(losses.data(), {5});
  CHECK(problem.run(Where::apart) == plain);
  CHECK(losses[3] == 0);
  CHECK(std::accumulate(losses.begin(), losses.end(), 0.0) / 4 == Approx(plain.loss).epsilon(1e-15));
  problem.targets.assign(5, ignored);
  losses.assign(5, -1);
  CHECK(problem.run(Where::left_out).loss == 0);
  CHECK(losses == std::vector<double>(5, 0));
}

TEST_CASE("terms of special logits", "[cross_entropy]") {
  const auto low = static_cast<float>(-inf);
  const auto run = [](std::vector<float> logits, CrossEntropyOptions options) {
    Problem<float> problem(1, std::ssize(logits));
    problem.logits = std::move(logits);
    problem.targets = {0};
    problem.options = options;
    return problem.run(Where::apart);
  };
  for_each_target([&](const std::string& name) {
    INFO(name);
    // A class at -inf: its smoothed term is infinite, unless its weight is 0.
    const std::vector<float> weights{1, 2, 0};
    const Result<float> smoothed = run({1, 2, low}, {.label_smoothing = 0.3});
    CHECK(smoothed.loss == inf);
    CHECK(smoothed.gradient[2] == Approx(-0.1));
    const Result<float> without = run({1, 2, low}, {.label_smoothing = 0.3, .weights = weights});
    CHECK(std::isfinite(without.loss));
    CHECK(without.gradient[2] == 0);
    // A softcap keeps -inf, and makes +inf the cap.
    const Result<float> capped = run({1, static_cast<float>(inf), low}, {.softcap = 5});
    CHECK(capped.loss == Approx(5 + std::log1p(std::exp(5 * std::tanh(0.2) - 5)) - 5 * std::tanh(0.2)));
    CHECK(capped.gradient[1] == 0);
    CHECK(capped.gradient[2] == 0);
    for (const CrossEntropyOptions& options :
         {CrossEntropyOptions{.label_smoothing = 0.3}, {.softcap = 5}, {.z_loss = 1}, {.weights = weights}}) {
      const Result<float> poisoned = run({1, static_cast<float>(nan), 2}, options);
      CHECK(std::isnan(poisoned.loss));
      CHECK(std::all_of(poisoned.gradient.begin(), poisoned.gradient.end(),
                        [](float g) { return std::isnan(g); }));
      const Result<float> masked = run({low, low, low}, options);
      CHECK(masked.loss == inf);
      CHECK(masked.gradient == std::vector<float>{0, 0, 0});
    }
    // Logits beyond the range of exact shifts.
    const Result<float> huge = run({3e8f, 1e8f, -1e8f}, {.label_smoothing = 0.3});
    CHECK(huge.loss == Approx(0.1 * 6e8));
    // Targets whose weights are 0.
    const std::vector<float> zero{0, 1, 1};
    double loss_of_row = -1;
    run({low, 2, 2}, {.weights = zero, .losses = View<double, 1>(&loss_of_row, {1})});
    CHECK(loss_of_row == 0);
    CHECK(run({1, 2, 3}, {.label_smoothing = 0.3, .weights = zero}).loss == 0);
    CHECK(run({1, 2, 3}, {.weights = zero}).gradient == std::vector<float>{0, 0, 0});
  });
}

TEST_CASE("cross_entropy throws for options out of range", "[cross_entropy][errors]") {
  Problem<float> problem(3, 4);
  std::vector<float> gradient(12, 7);
  std::vector<double> losses(20, -7);
  const auto refused = [&](const CrossEntropyOptions& options,
                           std::initializer_list<std::string_view> words) {
    check_refused_with_words(words, [&] {
      cross_entropy<float>(View<const float, 2>(problem.logits.data(), {3, 4}), problem.targets,
                           View<float, 2>(gradient.data(), {3, 4}), options);
    });
    CHECK(gradient == std::vector<float>(12, 7));
    CHECK(losses == std::vector<double>(20, -7));
  };
  for (const double value : {-0.1, 1.1, nan})
    refused({.label_smoothing = value}, {"label_smoothing", "0", "1"});
  for (const double value : {-1.0, inf, nan}) refused({.z_loss = value}, {"z_loss", "0"});
  for (const double value : {-1.0, 1e-40, 6e5, inf, nan}) refused({.softcap = value}, {"softcap", "500000"});
  for (const float value : {-1.0f, static_cast<float>(inf), static_cast<float>(nan)}) {
    const std::vector<float> weights{1, 2, value, 1};
    refused({.weights = weights}, {"weight", "0"});
  }
  const std::vector<float> three{1, 1, 1};
  refused({.weights = three}, {"weights", "3", "logits", "4"});
  refused({.losses = View<double, 1>(losses.data(), {4})}, {"losses", "4", "logits", "3"});
  refused({.losses = View<double, 1>(losses.data(), {3}, {2})}, {"losses", "stride", "2", "1"});
  refused({.losses = View<double, 1>(reinterpret_cast<double*>(gradient.data()), {3})},
          {"losses", "dlogits"});
  refused({.losses = View<double, 1>(reinterpret_cast<double*>(problem.targets.data()), {3})},
          {"losses", "targets"});
  refused({.weights = std::span<const float>(gradient).first(4)}, {"dlogits", "weights"});
}

}  // namespace cross_entropy_problem::cross_entropy_terms_test
