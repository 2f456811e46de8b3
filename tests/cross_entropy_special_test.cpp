// Cross-entropy of huge and special logits (-inf, +inf and NaN), and losses of any size.

#include "cross_entropy_problem.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace cross_entropy_problem::cross_entropy_special_test {

template <class T>
void check_huge(Real largest) {
  for_each_target([&](const std::string& name) {
    INFO(name);
    for (const index_t classes : {2, 3, 9, 40, 4096, 5003}) {
      for (const Real size : {Real(1e3), Real(3e4), Real(8e5), Real(1e9), Real(1e30), largest}) {
        if (size > largest) continue;
        Problem<T> problem(6, classes, 5, 2);
        // One row has only huge logits, one only huge negative logits; other rows have a few.
        problem.logit(0, 0) = narrow<T>(size);
        problem.logit(1, classes - 1) = narrow<T>(-size);
        problem.target(1) = 0;
        problem.logit(2, classes / 2) = narrow<T>(size);
        problem.target(2) = classes / 2;
        problem.logit(3, 0) = problem.logit(3, classes - 1) = narrow<T>(size);
        problem.target(3) = 0;
        for (index_t i = 0; i < classes; ++i) {
          problem.logit(4, i) = narrow<T>(size);
          problem.logit(5, i) = narrow<T>(-size);
        }
        INFO("logits of " << size);
        check_against_reference(problem);
      }
    }
  });
}

TEST_CASE("huge logits: float", "[cross_entropy]") { check_huge<float>(3e38L); }
TEST_CASE("huge logits: double", "[cross_entropy][slow]") { check_huge<double>(1e300L); }
TEST_CASE("huge logits: half", "[cross_entropy][slow]") { check_huge<half>(65504); }
TEST_CASE("huge logits: bfloat16", "[cross_entropy][slow]") { check_huge<bfloat16>(3e38L); }

TEST_CASE("chunks of a long row may differ by any magnitude", "[cross_entropy][slow]") {
  for_each_target([](const std::string& name) {
    INFO(name);
    for (const float distance : {50.f, 1e4f, 1e6f, 1e9f, 1e20f, 3e38f}) {
      Problem<float> problem(3, 10'007, 6, 0.5);
      for (index_t i = 0; i < problem.classes; ++i) {
        problem.logit(0, i) += i < 4096 ? -distance : 0.f;
        problem.logit(1, i) += i >= 4096 ? -distance : 0.f;
        problem.logit(2, i) += i >= 4096 && i < 8192 ? distance : 0.f;
      }
      problem.targets = {5000, 0, 8191};
      INFO("distance " << distance);
      check_against_reference(problem);
      problem.targets = {0, 5000, 8192};
      check_against_reference(problem);
    }
  });
}

TEST_CASE("double stays accurate for large logits that are close together", "[cross_entropy]") {
  for_each_target([](const std::string& name) {
    INFO(name);
    Problem<double> problem(20, 37, 8);
    for (double& z : problem.logits) z += 400'000;
    const Expected expected = expected_of(problem);
    CHECK(std::abs(static_cast<Real>(problem.run(Where::left_out).loss) - expected.loss) <=
          2e-15L * expected.loss);
  });
}

TEST_CASE("an unlikely target has a finite loss and a certain one a loss of at least 0", "[cross_entropy]") {
  for_each_target([](const std::string& name) {
    INFO(name);
    for (const index_t classes : {2, 5, 16, 100, 5000}) {
      for (const float gap : {1.f, 15.f, 17.f, 40.f, 90.f, 150.f, 1000.f, 1e5f, 1e9f}) {
        for (const float base : {0.f, 0.3f, -21.7f}) {
          Problem<float> problem(2, classes);
          problem.targets = {0, 1};
          for (index_t i = 0; i < classes; ++i) {
            problem.logit(0, i) = problem.logit(1, i) = i == 0 ? base + gap : base;
          }
          INFO(classes << " classes, gap " << gap << ", base " << base);
          const Expected expected = expected_of(problem);
          const Result<float> result = problem.run(Where::apart);
          CHECK(errors_of(problem, result, expected).within_bounds());
          CHECK(std::isfinite(result.loss));
          problem.target(1) = 0;
          const Result<float> sure = problem.run(Where::apart);
          CHECK(sure.loss >= 0);
          CHECK(sure.gradient[0] <= 0);
          if (gap >= 40 && classes <= 100) CHECK(sure.gradient[0] == 0);
        }
      }
    }
  });
}

TEMPLATE_TEST_CASE("logits of -inf", "[cross_entropy]", float, double, half, bfloat16) {
  using T = TestType;
  const T never = narrow<T>(-inf);
  for_each_target([&](const std::string& name) {
    INFO(name);
    for (const index_t classes : {2, 3, 8, 17, 100, 4096, 10'007}) {
      INFO(classes << " classes");
      Problem<T> problem(5, classes, 9);
      // Impossible classes: all but the target and one other, a single one, or a whole chunk of a long row.
      problem.target(0) = 0;
      problem.target(1) = classes - 1;
      problem.target(2) = classes - 1;
      for (index_t i = 1; i + 1 < classes; ++i) problem.logit(0, i) = never;
      problem.logit(1, 0) = never;
      for (index_t i = 0; i < std::min<index_t>(4096, classes - 1); ++i) problem.logit(2, i) = never;
      check_against_reference(problem);
      CHECK(std::isfinite(problem.run(Where::left_out).loss));
      CHECK(widen(problem.run(Where::apart).gradient[static_cast<std::size_t>(classes)]) == 0);

      // The target is impossible: the loss is infinite, and the gradient still raises the target's logit.
      problem.target(1) = 0;
      check_against_reference(problem);
      for (const Where where : {Where::apart, Where::in_place}) {
        const Result<T> result = problem.run(where);
        CHECK(result.loss == inf);
        CHECK(result.gradient[static_cast<std::size_t>(classes)] == narrow<T>(-0.2L));
      }

      // All classes are impossible.
      for (index_t i = 0; i < classes; ++i) problem.logit(3, i) = never;
      check_against_reference(problem);
      for (const Where where : {Where::apart, Where::in_place}) {
        const Result<T> result = problem.run(where);
        const auto row = result.gradient.begin() + 3 * classes;
        CHECK(std::all_of(row, row + classes, [](T g) { return widen(g) == 0; }));
      }
    }
    Problem<T> alone(1, 1);
    alone.logits = {never};
    CHECK(alone.run(Where::apart).loss == inf);
    CHECK(widen(alone.run(Where::apart).gradient[0]) == 0);
  });
}

TEMPLATE_TEST_CASE("an ignored row of -inf has gradient 0: pytorch/pytorch#11551", "[cross_entropy][reports]",
                   float, double, half, bfloat16) {
  using T = TestType;
  for_each_target([](const std::string&) {
    for (const index_t classes : {1, 3, 40, 5000}) {
      INFO(classes << " classes");
      Problem<T> problem(3, classes), rest(2, classes);
      std::fill_n(problem.logits.begin() + classes, classes, narrow<T>(-inf));
      problem.target(1) = ignored;
      std::copy_n(problem.logits.begin(), classes, rest.logits.begin());
      std::copy_n(problem.logits.begin() + 2 * classes, classes, rest.logits.begin() + classes);
      rest.targets = {problem.target(0), problem.target(2)};
      Result<T> expected = rest.run(Where::apart);
      expected.gradient.insert(expected.gradient.begin() + classes, static_cast<std::size_t>(classes), T(0));
      CHECK(problem.run(Where::apart) == expected);
      CHECK(problem.run(Where::in_place) == expected);
      CHECK(std::isfinite(expected.loss));
    }
  });
}

template <class T>
void check_poison(double poison) {
  for_each_target([&](const std::string& name) {
    INFO(name << ' ' << poison);
    bool loss_is_nan = true, row_is_nan = true, others_kept = true;
    for (const index_t classes : {1, 2, 7, 16, 33, 257, 9001}) {
      const Problem<T> clean(3, classes, 10);
      const index_t step = classes > 300 ? 1009 : classes > 40 ? 31 : 1;
      for (const Where where : {Where::apart, Where::in_place, Where::left_out}) {
        const Result<T> expected = clean.run(where);
        for (index_t i = 0; i < classes; i += step) {
          Problem<T> problem = clean;
          problem.logit(1, i) = narrow<T>(poison);
          const Result<T> result = problem.run(where);
          loss_is_nan = loss_is_nan && std::isnan(result.loss) && result.count == 3;
          for (std::size_t at = 0; at < result.gradient.size(); ++at) {
            const T value = result.gradient[at];
            if (static_cast<index_t>(at) / classes == 1) {
              row_is_nan = row_is_nan && std::isnan(widen(value));
            } else {
              others_kept = others_kept && widen(value) == widen(expected.gradient[at]);
            }
          }
        }
      }
    }
    CHECK(loss_is_nan);
    CHECK(row_is_nan);
    CHECK(others_kept);
  });
}

TEST_CASE("NaN and +inf make the loss NaN and affect only the gradient of their row", "[cross_entropy]") {
  for (const double poison : {nan, inf}) {
    check_poison<float>(poison);
    check_poison<double>(poison);
    check_poison<half>(poison);
    check_poison<bfloat16>(poison);
  }
}

TEST_CASE("NaN beside -inf, and beside a row of infinite loss", "[cross_entropy]") {
  Problem<float> problem(2, 5);
  for (index_t i = 0; i < 5; ++i) problem.logit(0, i) = static_cast<float>(-inf);
  problem.logit(0, 3) = static_cast<float>(nan);
  problem.logit(1, problem.target(1)) = static_cast<float>(-inf);
  const Result<float> result = problem.run(Where::apart);
  CHECK(std::isnan(result.loss));
  CHECK(std::all_of(result.gradient.begin(), result.gradient.begin() + 5,
                    [](float g) { return std::isnan(g); }));
  CHECK(std::none_of(result.gradient.begin() + 5, result.gradient.end(),
                     [](float g) { return std::isnan(g); }));
}

}  // namespace cross_entropy_problem::cross_entropy_special_test
