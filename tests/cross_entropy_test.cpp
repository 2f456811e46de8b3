// Cross-entropy and its gradient, against loops in long double and finite differences.

#include "cross_entropy_problem.hpp"
#include "gradcheck.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace cross_entropy_problem::cross_entropy_test {

// ---- Values -----------------------------------------------------------------------------------------------

constexpr std::array<std::array<index_t, 2>, 21> shapes{{
    {1, 1},    {2, 1},    {5, 1},    {1, 2},    {3, 2},    {1, 3},     {5, 3},
    {7, 8},    {4, 15},   {3, 16},   {7, 17},   {300, 5},  {2, 64},    {3, 257},
    {2, 1031}, {2, 4095}, {2, 4096}, {3, 4097}, {1, 8192}, {2, 10007}, {601, 61},
}};

TEMPLATE_TEST_CASE("cross_entropy agrees with the long double reference", "[cross_entropy]", float, double,
                   half, bfloat16) {
  using T = TestType;
  for_each_target([](const std::string& name) {
    for (const auto& [rows, classes] : shapes) {
      INFO(name);
      Problem<T> problem(rows, classes, static_cast<unsigned>(rows + classes));
      check_against_reference(problem);
      problem.options.dloss = std::is_same_v<T, half> ? -300.0 : -1.75;
      for (index_t row = 1; row < rows; row += 3) problem.target(row) = ignored;
      check_against_reference(problem, 5);
      check_against_reference(problem, 3, false);
    }
  });
}

TEST_CASE("any class can be the target", "[cross_entropy]") {
  for_each_target([](const std::string& name) {
    INFO(name);
    for (const index_t classes : {2, 3, 8, 17, 33}) {
      Problem<float> problem(classes, classes, 3);
      for (index_t row = 0; row < classes; ++row) problem.target(row) = row;
      check_against_reference(problem);
    }
    // Targets on both sides of the chunk borders of a long row.
    Problem<float> long_rows(6, 9000, 4);
    long_rows.targets = {0, 4095, 4096, 8191, 8192, 8999};
    check_against_reference(long_rows);
  });
}

/// ln Σ exp(z) - z_target of z = (1, 2, 3): ln(1 + e^-1 + e^-2) = 0.40760596444437..., and 2 more for the first class.
TEST_CASE("cross_entropy of (1, 2, 3)", "[cross_entropy]") {
  const std::vector<double> logits{1, 2, 3, 1, 2, 3, 5, 5, 5, 0, 0, 0};
  const std::vector<index_t> targets{2, 0, 1, -100};
  std::vector<double> dlogits(12, nan);
  const CrossEntropy answer = cross_entropy<double>(View<const double, 2>(logits.data(), {4, 3}), targets,
                                                    View<double, 2>(dlogits.data(), {4, 3}));
  CHECK(answer.count == 3);
  CHECK(std::abs(answer.loss - (2 * 0.40760596444438013 + 2 + 1.0986122886681098) / 3) <= 1e-15);
  const std::vector<double> softmax{0.09003057317038046, 0.24472847105479764, 0.6652409557748218};
  const std::vector<double> expected{softmax[0] / 3,
                                     softmax[1] / 3,
                                     (softmax[2] - 1) / 3,
                                     (softmax[0] - 1) / 3,
                                     softmax[1] / 3,
                                     softmax[2] / 3,
                                     1.0 / 9,
                                     (1.0 / 3 - 1) / 3,
                                     1.0 / 9,
                                     0,
                                     0,
                                     0};
  double worst = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    worst = std::max(worst, std::isnan(dlogits[i]) ? inf : std::abs(dlogits[i] - expected[i]));
  }
  CHECK(worst <= 1e-16);
}

TEST_CASE("equal logits have loss ln(classes)", "[cross_entropy]") {
  for_each_target([](const std::string& name) {
    INFO(name);
    // The last is one class more than the longest row whose exponentials are kept.
    for (const index_t classes : {1, 2, 10, 1000, 32'000, 4096 * 1024 + 1}) {
      const auto size = static_cast<std::size_t>(classes);
      const std::vector<float> logits(size, 7.25f);
      const std::vector<index_t> targets{classes / 2};
      std::vector<float> dlogits(size, sentinel<float>());
      const double loss = cross_entropy<float>(View<const float, 2>(logits.data(), {1, classes}), targets,
                                               View<float, 2>(dlogits.data(), {1, classes}))
                              .loss;
      const double p = 1 / static_cast<double>(classes);
      INFO(classes);
      CHECK(std::abs(loss - std::log(static_cast<double>(classes))) <= 1e-6 * std::max(1.0, loss));
      const float own = std::exchange(dlogits[size / 2], static_cast<float>(p));
      CHECK(std::abs(static_cast<double>(own) - (p - 1)) <= 1e-6);
      const auto [low, high] = std::minmax_element(dlogits.begin(), dlogits.end());
      CHECK(std::abs(static_cast<double>(*low) - p) <= (classes == 1 ? 1.0 : 1e-6 * p));
      CHECK(std::abs(static_cast<double>(*high) - p) <= (classes == 1 ? 1.0 : 1e-6 * p));
    }
  });
}

TEST_CASE("a single class has loss 0 and gradient 0", "[cross_entropy]") {
  for_each_target([](const std::string& name) {
    INFO(name);
    for (const float value : {0.0f, 1.3f, -77.7f, 1e30f}) {
      Problem<float> problem(3, 1);
      std::fill(problem.logits.begin(), problem.logits.end(), value);
      for (const Where where : {Where::apart, Where::in_place, Where::left_out}) {
        const Result<float> result = problem.run(where);
        CHECK(result.loss == 0);
        CHECK(result.count == 3);
        CHECK(std::all_of(result.gradient.begin(), result.gradient.end(), [](float g) { return g == 0; }));
      }
    }
  });
}

TEST_CASE("the gradient of the loss agrees with finite differences", "[cross_entropy]") {
  for_each_target([](const std::string& name) {
    for (const auto& [rows, classes] : {std::array<index_t, 2>{1, 2}, {3, 5}, {4, 9}, {5, 33}}) {
      for (const double dloss : {1.0, -2.5}) {
        INFO(name << ' ' << rows << " x " << classes);
        Problem<double> problem(rows, classes, 21, 1.5);
        problem.options.dloss = dloss;
        if (rows > 2) problem.target(1) = ignored;
        const Result<double> result = problem.run(Where::apart);
        const std::vector<double> numeric = gradcheck::finite_differences(
            problem.logits, [&] { return dloss * problem.run(Where::left_out).loss; });
        CHECK(gradcheck::relative_error(result.gradient, numeric) <= 1e-7);
      }
    }
  });
}

TEST_CASE("a scale keeps a gradient that is too small for half", "[cross_entropy]") {
  Problem<half> problem(1000, 50);
  problem.options.dloss = 1e-4;
  CHECK(problem.run(Where::apart).gradient[0] == half(0.0f));
  problem.options.dloss = 65'536;
  check_against_reference(problem);
  CHECK(std::abs(static_cast<float>(problem.run(Where::apart).gradient[0])) > 0.01f);
}

// ---- Shapes and ignored rows ------------------------------------------------------------------------------

TEST_CASE("loss is 0 without rows and with all rows ignored", "[cross_entropy]") {
  const std::vector<index_t> none, all_ignored(3, ignored);
  std::vector<float> memory(8, sentinel<float>());
  const auto check_nothing = [&](const CrossEntropy& answer) {
    CHECK(answer.loss == 0);
    CHECK(answer.count == 0);
    CHECK(std::all_of(memory.begin(), memory.end(), [](float x) { return x == sentinel<float>(); }));
  };
  check_nothing(cross_entropy<float>({}, {}));
  check_nothing(cross_entropy<float>(View<const float, 2>(memory.data(), {0, 4}), none));
  check_nothing(cross_entropy<float>(View<const float, 2>(memory.data(), {0, 4}), none,
                                     View<float, 2>(memory.data(), {0, 4})));
  check_nothing(
      cross_entropy<float>(View<const float, 2>(nullptr, {0, 4}), none, View<float, 2>(nullptr, {0, 4})));
  check_nothing(cross_entropy<float>(View<const float, 2>(nullptr, {3, 0}), all_ignored));
  check_nothing(cross_entropy<float>(View<const float, 2>(nullptr, {3, 0}), all_ignored,
                                     View<float, 2>(nullptr, {3, 0})));
}

TEMPLATE_TEST_CASE("ignored rows are not read, are not counted and get gradient 0", "[cross_entropy]", float,
                   bfloat16) {
  using T = TestType;
  for_each_target([](const std::string& name) {
    INFO(name);
    // Ignored rows hold values that would change all results if they were read.
    Problem<T> problem(11, 19), rest(0, 19);
    for (index_t row = 0; row < problem.rows; ++row) {
      const bool is_ignored = row % 2 == 0 || row == 7;
      if (!is_ignored) {
        ++rest.rows;
        rest.targets.push_back(problem.target(row));
      } else {
        problem.target(row) = ignored;
      }
      for (index_t i = 0; i < problem.classes; ++i) {
        if (!is_ignored) {
          rest.logits.push_back(problem.logit(row, i));
        } else {
          problem.logit(row, i) = narrow<T>(nan);
        }
      }
    }
    const Result<T> without = rest.run(Where::apart);
    for (const Where where : {Where::apart, Where::in_place}) {
      const Result<T> result = problem.run(where);
      CHECK(result.count == 4);
      CHECK(result.loss == without.loss);
      bool zero = true;
      std::vector<T> others;
      for (index_t row = 0; row < problem.rows; ++row) {
        for (index_t i = 0; i < problem.classes; ++i) {
          const T value = result.gradient[static_cast<std::size_t>(row * problem.classes + i)];
          if (problem.target(row) != ignored) {
            others.push_back(value);
          } else {
            zero = zero && widen(value) == 0;
          }
        }
      }
      CHECK(zero);
      CHECK((Result<T>{.gradient = others} == Result<T>{.gradient = without.gradient}));
    }
    CHECK(problem.run(Where::left_out).loss == without.loss);
  });
}

TEST_CASE("all rows ignored: loss 0 and gradient 0 (pytorch/pytorch#116349)", "[cross_entropy][reports]") {
  for (const index_t rows : {1, 4, 700}) {
    Problem<float> problem(rows, 33);
    problem.options.dloss = inf;
    std::fill(problem.logits.begin(), problem.logits.end(), static_cast<float>(nan));
    std::fill(problem.targets.begin(), problem.targets.end(), ignored);
    for (const Where where : {Where::apart, Where::in_place, Where::left_out}) {
      const Result<float> result = problem.run(where);
      CHECK(result.loss == 0);
      CHECK(result.count == 0);
      CHECK(std::all_of(result.gradient.begin(), result.gradient.end(), [](float g) { return g == 0; }));
      CHECK(result.kept);
    }
  }
}

TEST_CASE("the ignored target may be any number, including a class", "[cross_entropy]") {
  for (const index_t special : {index_t{0}, index_t{6}, index_t{-1}, std::numeric_limits<index_t>::max()}) {
    Problem<float> problem(5, 7), usual(5, 7);
    problem.targets = {3, special, 2, special, 4};
    usual.targets = {3, ignored, 2, ignored, 4};
    problem.options.ignored = special;
    CHECK(problem.run(Where::apart) == usual.run(Where::apart));
  }
}

TEST_CASE("cross_entropy accepts a row stride of 0 and interleaved logits and gradients", "[cross_entropy]") {
  const index_t rows = 6, classes = 21;
  const Problem<float> one(1, classes);
  Problem<float> all(rows, classes);
  for (index_t row = 0; row < rows; ++row) {
    for (index_t i = 0; i < classes; ++i) all.logit(row, i) = one.logits[static_cast<std::size_t>(i)];
  }
  const Result<float> expected = all.run(Where::apart);
  std::vector<float> gradient(all.logits.size());
  const CrossEntropy answer =
      cross_entropy<float>(View<const float, 2>(one.logits.data(), {rows, classes}, {0, 1}), all.targets,
                           View<float, 2>(gradient.data(), {rows, classes}));
  CHECK(answer.loss == expected.loss);
  CHECK(gradient == expected.gradient);

  // Logits and gradients are columns of one matrix.
  std::vector<float> both(2 * all.logits.size());
  const View<float, 2> logits(both.data(), {rows, classes}, {2 * classes, 1});
  const View<float, 2> dlogits(both.data() + classes, {rows, classes}, {2 * classes, 1});
  for (index_t row = 0; row < rows; ++row) {
    for (index_t i = 0; i < classes; ++i) logits(row, i) = all.logit(row, i);
  }
  CHECK(cross_entropy<float>(logits, all.targets, dlogits).loss == expected.loss);
  bool same = true;
  for (index_t row = 0; row < rows; ++row) {
    for (index_t i = 0; i < classes; ++i) {
      same = same && dlogits(row, i) == expected.gradient[static_cast<std::size_t>(row * classes + i)] &&
             logits(row, i) == all.logit(row, i);
    }
  }
  CHECK(same);
}

}  // namespace cross_entropy_problem::cross_entropy_test
