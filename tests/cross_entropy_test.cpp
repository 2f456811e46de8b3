// Cross-entropy and its gradient, against loops in long double and finite differences.

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <span>
#include <ssmax/cross_entropy.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "allocation_count.hpp"
#include "catch.hpp"
#include "gradcheck.hpp"
#include "reference.hpp"
#include "target_scope.hpp"

namespace cross_entropy_test {

using reference::narrow;
using reference::Real;
using reference::widen;
using ssmax::bfloat16;
using ssmax::cross_entropy;
using ssmax::CrossEntropy;
using ssmax::CrossEntropyOptions;
using ssmax::half;
using ssmax::index_t;
using ssmax::Serial;
using ssmax::ThreadPool;
using ssmax::View;

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr index_t ignored = -100;

/// What an output holds that was not written.
template <class T>
T sentinel() {
  return narrow<T>(-1234.5L);
}

enum class Where { left_out, apart, in_place };

template <class T>
struct Result {
  double loss = nan;
  index_t count = -1;
  std::vector<T> gradient{};  // contiguous, empty if left out
  bool kept = true;           // whether what lies between the rows is as it was

  bool operator==(const Result& other) const {
    const auto same = [](double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); };
    return same(loss, other.loss) && count == other.count && kept == other.kept &&
           std::equal(
               gradient.begin(), gradient.end(), other.gradient.begin(), other.gradient.end(),
               [&](T a, T b) { return same(static_cast<double>(widen(a)), static_cast<double>(widen(b))); });
  }
};

template <class T>
struct Problem {
  index_t rows, classes;
  std::vector<T> logits;  // contiguous
  std::vector<index_t> targets;
  CrossEntropyOptions options{};

  Problem(index_t row_count, index_t class_count, unsigned seed = 1, double deviation = 3)
      : rows(row_count),
        classes(class_count),
        logits(reference::normals<T>(static_cast<std::size_t>(row_count * class_count), seed, deviation)) {
    for (index_t row = 0; row < rows; ++row) targets.push_back((row * 7919 + 5 * classes / 7) % classes);
  }

  T& logit(index_t row, index_t column) { return logits[static_cast<std::size_t>(row * classes + column)]; }
  index_t& target(index_t row) { return targets[static_cast<std::size_t>(row)]; }

  /// `gap` elements lie between the rows; `up` says whether later rows lie further up.
  template <class E = Serial>
  Result<T> run(Where where, index_t gap = 0, bool up = true, E&& executor = E{}) const {
    const index_t pitch = classes + gap;
    const auto size = static_cast<std::size_t>(rows * pitch);
    std::vector<T> in(size, narrow<T>(inf)), out(size, sentinel<T>());
    const index_t first = up ? 0 : (rows - 1) * pitch;
    const std::array<index_t, 2> extents{rows, classes}, strides{up ? pitch : -pitch, 1};
    const View<T, 2> from(in.data() + first, extents, strides), to(out.data() + first, extents, strides);
    for (index_t row = 0; row < rows; ++row) {
      for (index_t column = 0; column < classes; ++column) {
        from(row, column) = logits[static_cast<std::size_t>(row * classes + column)];
      }
    }
    const View<T, 2> gradient = where == Where::left_out ? View<T, 2>() : where == Where::apart ? to : from;
    const std::vector<T> in_before = in, out_before = out;
    const CrossEntropy answer = cross_entropy<T>(from, targets, gradient, options, executor);
    Result<T> result{.loss = answer.loss, .count = answer.count};
    for (index_t row = 0; where != Where::left_out && row < rows; ++row) {
      const T* begin = classes == 0 ? nullptr : &gradient(row, 0);
      result.gradient.insert(result.gradient.end(), begin, begin + classes);
    }
    // With the gradient taken out again, everything must be as before.
    std::vector<T>& written = where == Where::in_place ? in : out;
    const std::vector<T>& before = where == Where::in_place ? in_before : out_before;
    if (where != Where::left_out) {
      for (index_t row = 0; row < rows; ++row) {
        const auto at = static_cast<std::ptrdiff_t>(first + row * strides[0]);
        std::copy_n(before.begin() + at, classes, written.begin() + at);
      }
    }
    const auto same_bits = [](const std::vector<T>& a, const std::vector<T>& b) {
      return std::equal(a.begin(), a.end(), b.begin(), [](T x, T y) {
        return widen(x) == widen(y) || (std::isnan(widen(x)) && std::isnan(widen(y)));
      });
    };
    result.kept = same_bits(in, in_before) && same_bits(out, out_before);
    return result;
  }
};

struct Expected {
  Real loss = 0;
  index_t count = 0;
  std::vector<Real> gradient{};
};

/// The definition in long double. Where no class can be, the gradient is 0.
template <class T>
Expected expected_of(const Problem<T>& problem) {
  Expected expected;
  for (const index_t target : problem.targets) expected.count += target != problem.options.ignored;
  const auto classes = static_cast<std::size_t>(problem.classes);
  for (std::size_t row = 0; row < problem.targets.size(); ++row) {
    const std::span<const T> z = std::span(problem.logits).subspan(row * classes, classes);
    const index_t target = problem.targets[row];
    if (target == problem.options.ignored) {
      expected.gradient.insert(expected.gradient.end(), classes, 0);
      continue;
    }
    Real top = -reference::infinity;
    for (const T value : z) top = std::max(top, widen(value));
    Real sum = 0;
    for (const T value : z) sum += std::exp(widen(value) - top);
    const bool possible = top != -reference::infinity;
    const Real own = widen(z[static_cast<std::size_t>(target)]);
    expected.loss += possible ? std::log(sum) - (own - top) : reference::infinity;
    const Real factor = static_cast<Real>(problem.options.dloss) / static_cast<Real>(expected.count);
    for (std::size_t i = 0; i < classes; ++i) {
      const Real p = possible ? std::exp(widen(z[i]) - top) / sum : 0;
      const bool is_target = possible && static_cast<index_t>(i) == target;
      expected.gradient.push_back(factor * (p - (is_target ? 1 : 0)));
    }
  }
  if (expected.count > 0) expected.loss /= static_cast<Real>(expected.count);
  return expected;
}

/// Errors as parts of what the top of the header allows; at most 1 is right.
struct Errors {
  Real loss = 0, gradient = 0, target = 0;

  bool within_bounds() const { return loss <= 1 && gradient <= 1 && target <= 1; }
};

template <class T>
Errors errors_of(const Problem<T>& problem, const Result<T>& result, const Expected& expected) {
  constexpr bool is_double = std::is_same_v<T, double>;
  constexpr Real rounding = std::is_same_v<T, half> ? 0x1p-11L : std::is_same_v<T, bfloat16> ? 0x1p-8L : 0;
  constexpr Real smallest = std::is_same_v<T, half> ? 0x1p-25L : is_double ? 0x1p-1000L : 0x1p-120L;
  constexpr Real unit = is_double ? 2e-9L : 1;
  Errors errors;
  const auto ratio = [](Real value, Real exact, Real allowed) {
    return value == exact ? 0 : std::abs(value - exact) / allowed;
  };
  errors.loss =
      reference::worse(0, ratio(result.loss, expected.loss, unit * 1e-6L * std::max(expected.loss, Real(1))));
  const Real factor = std::abs(static_cast<Real>(problem.options.dloss)) /
                      static_cast<Real>(std::max<index_t>(expected.count, 1));
  for (std::size_t i = 0; i < result.gradient.size(); ++i) {
    const auto row = i / static_cast<std::size_t>(problem.classes);
    const auto column = static_cast<index_t>(i % static_cast<std::size_t>(problem.classes));
    const Real exact = expected.gradient[i], value = widen(result.gradient[i]);
    const Real storage = rounding * std::abs(exact) + smallest * std::max(factor, Real(1));
    if (column == problem.targets[row]) {
      errors.target = reference::worse(errors.target, ratio(value, exact, unit * 1e-6L * factor + storage));
    } else {
      errors.gradient =
          reference::worse(errors.gradient, ratio(value, exact, unit * 1e-6L * std::abs(exact) + storage));
    }
  }
  return errors;
}

template <class T>
void check_against_reference(const Problem<T>& problem, index_t gap = 0, bool up = true) {
  const Expected expected = expected_of(problem);
  const Result<T> loss_only = problem.run(Where::left_out, gap, up);
  for (const Where where : {Where::apart, Where::in_place}) {
    const Result<T> result = problem.run(where, gap, up);
    const Errors errors = errors_of(problem, result, expected);
    INFO(problem.rows << " rows of " << problem.classes << ", gap " << gap << ", "
                      << (where == Where::apart ? "apart" : "in place") << ": loss " << errors.loss
                      << ", gradient " << errors.gradient << ", target " << errors.target
                      << " times what is allowed");
    CHECK(errors.within_bounds());
    CHECK(result.gradient.size() == problem.logits.size());
    CHECK(result.count == expected.count);
    CHECK(result.kept);
    CHECK((result.loss == loss_only.loss || (std::isnan(result.loss) && std::isnan(loss_only.loss))));
  }
  CHECK(loss_only.count == expected.count);
  CHECK(loss_only.kept);
}

// ---- Values
// ------------------------------------------------------------------------------------------------------

constexpr std::array<std::array<index_t, 2>, 21> shapes{{
    {1, 1},    {2, 1},    {5, 1},    {1, 2},    {3, 2},    {1, 3},     {5, 3},
    {7, 8},    {4, 15},   {3, 16},   {7, 17},   {300, 5},  {2, 64},    {3, 257},
    {2, 1031}, {2, 4095}, {2, 4096}, {3, 4097}, {1, 8192}, {2, 10007}, {601, 61},
}};

template <class T>
void check_shapes() {
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

TEST_CASE("cross_entropy meets long double: float", "[cross_entropy]") { check_shapes<float>(); }
TEST_CASE("cross_entropy meets long double: double", "[cross_entropy]") { check_shapes<double>(); }
TEST_CASE("cross_entropy meets long double: half", "[cross_entropy]") { check_shapes<half>(); }
TEST_CASE("cross_entropy meets long double: bfloat16", "[cross_entropy]") { check_shapes<bfloat16>(); }

TEST_CASE("every class may be the target", "[cross_entropy]") {
  for_each_target([](const std::string& name) {
    INFO(name);
    for (const index_t classes : {2, 3, 8, 17, 33}) {
      Problem<float> problem(classes, classes, 3);
      for (index_t row = 0; row < classes; ++row) problem.target(row) = row;
      check_against_reference(problem);
    }
    // On both sides of where a long row is cut.
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

TEST_CASE("equal logits lose ln(classes)", "[cross_entropy]") {
  for_each_target([](const std::string& name) {
    INFO(name);
    // The last is one more than a row that keeps its exponentials.
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

TEST_CASE("the gradient of the loss by finite differences", "[cross_entropy]") {
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

TEST_CASE("a gradient too small for half arrives with a scale", "[cross_entropy]") {
  Problem<half> problem(1000, 50);
  problem.options.dloss = 1e-4;
  CHECK(problem.run(Where::apart).gradient[0] == half(0.0f));
  problem.options.dloss = 65'536;
  check_against_reference(problem);
  CHECK(std::abs(static_cast<float>(problem.run(Where::apart).gradient[0])) > 0.01f);
}

// ---- Shapes and ignored rows
// -------------------------------------------------------------------------------------

TEST_CASE("nothing to lose", "[cross_entropy]") {
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

template <class T>
void check_ignored_rows() {
  for_each_target([](const std::string& name) {
    INFO(name);
    // Rows that are ignored hold what would spoil everything if it were read.
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

TEST_CASE("ignored rows are not read, count for nothing and get 0: float", "[cross_entropy]") {
  check_ignored_rows<float>();
}
TEST_CASE("ignored rows are not read, count for nothing and get 0: bfloat16", "[cross_entropy]") {
  check_ignored_rows<bfloat16>();
}

TEST_CASE("all rows ignored: loss 0 and gradient 0", "[cross_entropy]") {
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

TEST_CASE("the ignored target may be any number, also a class", "[cross_entropy]") {
  for (const index_t special : {index_t{0}, index_t{6}, index_t{-1}, std::numeric_limits<index_t>::max()}) {
    Problem<float> problem(5, 7), usual(5, 7);
    problem.targets = {3, special, 2, special, 4};
    usual.targets = {3, ignored, 2, ignored, 4};
    problem.options.ignored = special;
    CHECK(problem.run(Where::apart) == usual.run(Where::apart));
  }
}

TEST_CASE("one row of logits for all targets, and gradients beside their logits", "[cross_entropy]") {
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

  // Columns of one matrix.
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

// ---- Huge, impossible and missing logits
// -------------------------------------------------------------------------

template <class T>
void check_huge(Real largest) {
  for_each_target([&](const std::string& name) {
    INFO(name);
    for (const index_t classes : {2, 3, 9, 40, 4096, 5003}) {
      for (const Real size : {Real(1e3), Real(3e4), Real(8e5), Real(1e9), Real(1e30), largest}) {
        if (size > largest) continue;
        Problem<T> problem(6, classes, 5, 2);
        // A few logits are huge, one row has them all huge, one all huge and negative.
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

TEST_CASE("stretches of a long row may lie any distance apart", "[cross_entropy][slow]") {
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

TEST_CASE("double keeps its digits where logits are large and near", "[cross_entropy]") {
  for_each_target([](const std::string& name) {
    INFO(name);
    Problem<double> problem(20, 37, 8);
    for (double& z : problem.logits) z += 400'000;
    const Expected expected = expected_of(problem);
    CHECK(std::abs(static_cast<Real>(problem.run(Where::left_out).loss) - expected.loss) <=
          2e-15L * expected.loss);
  });
}

TEST_CASE("an unlikely target has a finite loss, a sure one none below 0", "[cross_entropy]") {
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

template <class T>
void check_impossible() {
  const T never = narrow<T>(-inf);
  for_each_target([&](const std::string& name) {
    INFO(name);
    for (const index_t classes : {2, 3, 8, 17, 100, 4096, 10'007}) {
      INFO(classes << " classes");
      Problem<T> problem(5, classes, 9);
      // Other classes that cannot be: all but the target and one, or one, or a whole stretch of a long row.
      problem.target(0) = 0;
      problem.target(1) = classes - 1;
      problem.target(2) = classes - 1;
      for (index_t i = 1; i + 1 < classes; ++i) problem.logit(0, i) = never;
      problem.logit(1, 0) = never;
      for (index_t i = 0; i < std::min<index_t>(4096, classes - 1); ++i) problem.logit(2, i) = never;
      check_against_reference(problem);
      CHECK(std::isfinite(problem.run(Where::left_out).loss));
      CHECK(widen(problem.run(Where::apart).gradient[static_cast<std::size_t>(classes)]) == 0);

      // The target cannot be: the loss is infinite, and the gradient pushes it up all the same.
      problem.target(1) = 0;
      check_against_reference(problem);
      for (const Where where : {Where::apart, Where::in_place}) {
        const Result<T> result = problem.run(where);
        CHECK(result.loss == inf);
        CHECK(result.gradient[static_cast<std::size_t>(classes)] == narrow<T>(-0.2L));
      }

      // No class can be.
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

TEST_CASE("logits of -inf: float", "[cross_entropy]") { check_impossible<float>(); }
TEST_CASE("logits of -inf: double", "[cross_entropy]") { check_impossible<double>(); }
TEST_CASE("logits of -inf: half", "[cross_entropy]") { check_impossible<half>(); }
TEST_CASE("logits of -inf: bfloat16", "[cross_entropy]") { check_impossible<bfloat16>(); }

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

TEST_CASE("NaN and +inf make the loss NaN, and no gradient but their own row's", "[cross_entropy]") {
  for (const double poison : {nan, inf}) {
    check_poison<float>(poison);
    check_poison<double>(poison);
    check_poison<half>(poison);
    check_poison<bfloat16>(poison);
  }
}

TEST_CASE("NaN beside -inf, and beside a row that loses everything", "[cross_entropy]") {
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

// ---- Executors
// ---------------------------------------------------------------------------------------------------

/// One thread that claims to be many, and makes the calls from the last to the first.
struct Reverse {
  index_t threads;
  std::vector<index_t>* runs = nullptr;

  index_t concurrency() const { return threads; }
  template <class F>
  void run(index_t n, const F& f) const {
    if (runs != nullptr) runs->push_back(n);
    for (index_t i = n; i-- > 0;) f(i);
  }
};

/// A thread for every eighth call.
struct Threads {
  index_t concurrency() const { return 8; }
  template <class F>
  void run(index_t n, const F& f) const {
    std::vector<std::thread> running;
    for (index_t first = 0; first < 8; ++first) {
      running.emplace_back([&f, first, n] {
        for (index_t i = first; i < n; i += 8) f(i);
      });
    }
    for (std::thread& thread : running) thread.join();
  }
};

template <class T>
void check_executors() {
  ThreadPool two(2), three(3), seven(7);
  for_each_target([&](const std::string& name) {
    for (const auto& [rows, classes] :
         {std::array<index_t, 2>{1, 1}, {1, 5000}, {5, 3}, {3, 9001}, {301, 61}, {257, 300}, {20'011, 3}}) {
      Problem<T> problem(rows, classes, 31);
      for (index_t row = 2; row < rows; row += 5) problem.target(row) = ignored;
      INFO(name << ' ' << rows << " x " << classes);
      for (const Where where : {Where::apart, Where::in_place, Where::left_out}) {
        const Result<T> expected = problem.run(where);
        CHECK(problem.run(where, 0, true, two) == expected);
        CHECK(problem.run(where, 2, true, three) == expected);
        CHECK(problem.run(where, 0, false, seven) == expected);
        CHECK(problem.run(where, 0, true, Threads{}) == expected);
        for (const index_t threads : {1, 2, 64}) {
          CHECK(problem.run(where, 0, true, Reverse{threads}) == expected);
        }
      }
    }
  });
}

TEST_CASE("cross_entropy gives the same bits for every executor", "[cross_entropy][threads][slow]") {
  check_executors<float>();
  check_executors<half>();
}

TEST_CASE("losses of any size add up in the same order", "[cross_entropy][threads]") {
  ThreadPool three(3);
  Problem<float> problem(20'011, 3, 33);
  for (index_t row = 0; row < problem.rows; ++row) {
    problem.logit(row, 0) += std::ldexp(1.f, static_cast<int>(row * 7919 % 60) - 20);
  }
  const Result<float> expected = problem.run(Where::apart);
  CHECK(problem.run(Where::apart, 0, true, three) == expected);
  CHECK(problem.run(Where::apart, 0, true, Reverse{5}) == expected);
  CHECK(problem.run(Where::left_out, 0, true, Threads{}).loss == expected.loss);
}

TEST_CASE("cross_entropy makes as many calls as there is work", "[cross_entropy][threads][slow]") {
  const auto calls_of = [](index_t rows, index_t classes, index_t row_that_counts = 0) {
    std::vector<index_t> runs;
    Problem<float> problem(rows, classes);
    if (row_that_counts < 0) std::fill(problem.targets.begin(), problem.targets.end(), ignored);
    problem.run(Where::left_out, 0, true, Reverse{4, &runs});
    return runs;
  };
  CHECK(calls_of(64, 32'000) == std::vector<index_t>{64});
  CHECK(calls_of(256, 20'000) == std::vector<index_t>{256});
  CHECK(calls_of(257, 20'000) == std::vector<index_t>{129});
  CHECK(calls_of(10, 10) == std::vector<index_t>{1});
  CHECK(calls_of(100'000, 10) == std::vector<index_t>{62});
  CHECK(calls_of(0, 10).empty());
  CHECK(calls_of(10, 10, -1).empty());
}

/// Fails in the middle of a run.
struct Fails {
  index_t concurrency() const { return 1; }
  template <class F>
  void run(index_t n, const F& f) const {
    f(0);
    if (n > 1) throw std::domain_error("no more calls");
  }
};

TEST_CASE("an exception of the executor's reaches the caller", "[cross_entropy][threads]") {
  const Problem<float> problem(4, 20'000);
  CHECK_THROWS_AS(problem.run(Where::apart, 0, true, Fails{}), std::domain_error);
}

TEST_CASE("cross_entropy allocates nothing", "[cross_entropy][slow]") {
  ThreadPool pool(3);
  for_each_target([&](const std::string& name) {
    INFO(name);
    for (const index_t classes : {3, 300, 5000}) {
      Problem<half> problem(300, classes);
      std::vector<half> dlogits(problem.logits.size());
      const View<const half, 2> logits(problem.logits.data(), {300, classes});
      const View<half, 2> out(dlogits.data(), {300, classes});
      const long before = allocation_count();
      cross_entropy<half>(logits, problem.targets, out, {}, pool);
      cross_entropy<half>(logits, problem.targets);
      CHECK(allocation_count() == before);
    }
  });
}

// ---- Errors
// ------------------------------------------------------------------------------------------------------

/// A word or number as a whole: 8 is not found in 128, nor logits in dlogits.
bool mentions(const std::string& message, const std::string& word) {
  const auto part_of_word = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
  };
  for (std::size_t at = message.find(word); at != std::string::npos; at = message.find(word, at + 1)) {
    const bool starts = at == 0 || !part_of_word(message[at - 1]);
    const bool ends = at + word.size() == message.size() || !part_of_word(message[at + word.size()]);
    if (starts && ends) return true;
  }
  return false;
}

struct Buffers {
  std::vector<float> logits = std::vector<float>(1 << 10, sentinel<float>());
  std::vector<float> dlogits = logits;
  std::vector<index_t> targets{0, 1, 7, 3};

  View<float, 2> in(std::array<index_t, 2> extents = {4, 8}) { return {logits.data() + 64, extents}; }
  View<float, 2> out(std::array<index_t, 2> extents = {4, 8}) { return {dlogits.data() + 64, extents}; }

  /// The call must be refused with a message that holds all the words, and write nothing.
  void refused(const View<const float, 2>& from, std::span<const index_t> to, const View<float, 2>& gradient,
               std::initializer_list<const char*> words, index_t ignored_target = ignored) {
    std::string message = "(nothing was thrown)";
    std::vector<index_t> runs;
    const std::vector<index_t> before = targets;
    try {
      cross_entropy<float>(from, to, gradient, {.ignored = ignored_target}, Reverse{4, &runs});
    } catch (const std::invalid_argument& error) {
      message = error.what();
    }
    CHECK(message.find("ssmax::cross_entropy: ") == 0);
    for (const char* word : words) {
      INFO('"' << message << "\" should mention " << word);
      CHECK(mentions(message, word));
    }
    const auto untouched = [](float x) { return x == sentinel<float>(); };
    CHECK(std::all_of(logits.begin(), logits.end(), untouched));
    CHECK(std::all_of(dlogits.begin(), dlogits.end(), untouched));
    CHECK(targets == before);
    CHECK(runs.empty());
  }
};

TEST_CASE("cross_entropy refuses shapes that do not fit", "[cross_entropy][errors]") {
  Buffers m;
  const auto& t = m.targets;
  const std::span<const index_t> all(t);
  for (const View<float, 2>& gradient : {m.out(), View<float, 2>()}) {
    m.refused(m.in({5, 8}), t, gradient, {"targets", "4", "logits", "5"});
    m.refused(m.in({3, 8}), t, gradient, {"targets", "4", "logits", "3"});
    m.refused(m.in(), {}, gradient, {"targets", "0", "logits", "4"});
    m.refused({}, t, gradient, {"targets", "4", "logits", "0"});
    m.refused(m.in({4, -1}), t, gradient, {"logits", "-1", "0"});
    m.refused(m.in({-4, 8}), t, gradient, {"logits", "-4", "0"});
    m.refused({m.logits.data(), {4, 8}, {16, 2}}, t, gradient, {"logits", "stride", "2", "1"});
    m.refused({nullptr, {4, 8}}, t, gradient, {"logits", "null", "32", "0"});
  }
  m.refused(m.in(), t, m.out({5, 8}), {"dlogits", "5", "logits", "4"});
  m.refused(m.in(), t, m.out({3, 8}), {"dlogits", "3", "logits", "4"});
  m.refused(m.in(), t, m.out({4, 7}), {"dlogits", "7", "logits", "8"});
  m.refused(m.in(), t, m.out({4, 9}), {"dlogits", "9", "logits", "8"});
  m.refused(m.in(), t, m.out({0, 0}), {"dlogits", "0", "logits", "4"});
  m.refused(m.in(), t, m.out({4, -8}), {"dlogits", "-8", "0"});
  m.refused(m.in(), t, {m.dlogits.data(), {4, 8}, {24, 3}}, {"dlogits", "stride", "3", "1"});
  m.refused(m.in(), t, {m.dlogits.data(), {4, 8}, {0, 1}}, {"dlogits", "stride", "0", "1"});
  m.refused(m.in(), t, {m.dlogits.data(), {4, 8}, {7, 1}}, {"dlogits", "stride", "7", "8"});
  m.refused(m.in(), t, {nullptr, {4, 8}}, {"dlogits", "null", "32", "0"});
  m.refused(m.in({0, 8}), all.first(0), {nullptr, {0, 7}}, {"dlogits", "7", "logits", "8"});
}

TEST_CASE("cross_entropy refuses memory that overlaps other than as a whole", "[cross_entropy][errors]") {
  Buffers m;
  const auto& t = m.targets;
  m.refused(m.in(), t, {m.logits.data() + 65, {4, 8}}, {"dlogits", "logits", "128", "124"});
  m.refused(m.in(), t, {m.logits.data() + 40, {4, 8}}, {"dlogits", "logits", "128", "32"});
  m.refused(m.in(), t, {m.logits.data() + 64, {4, 8}, {16, 1}}, {"dlogits", "logits", "224", "128"});
  // Rows of the gradient where the targets lie.
  auto* over_targets = reinterpret_cast<float*>(m.targets.data());
  m.refused(m.in({4, 1}), std::span<const index_t>(t), {over_targets, {4, 1}},
            {"dlogits", "targets", "16", "32"});
}

TEST_CASE("cross_entropy refuses targets that are no class, and says where", "[cross_entropy][errors]") {
  constexpr index_t lowest = std::numeric_limits<index_t>::min(),
                    highest = std::numeric_limits<index_t>::max();
  Buffers m;
  for (const View<float, 2>& gradient : {m.out(), View<float, 2>(), m.in()}) {
    const auto refused = [&](std::vector<index_t> targets, std::initializer_list<const char*> words,
                             index_t ignored_target = ignored) {
      m.targets = std::move(targets);
      m.refused(m.in(), m.targets, gradient, words, ignored_target);
    };
    refused({0, 1, 8, 3}, {"targets", "class", "8", "row", "2", "logits"});
    refused({0, 1, 2, 99}, {"targets", "99", "row", "3", "logits", "8"});
    refused({-1, 1, 2, 3}, {"targets", "-1", "row", "0", "logits", "8"});
    refused({0, highest, 2, 3}, {"targets", "9223372036854775807", "row", "1", "8"});
    refused({0, lowest, 2, 3}, {"targets", "-9223372036854775808", "row", "1", "8"});
    refused({ignored, ignored, 2, 9}, {"targets", "9", "row", "3", "8"});
    refused({0, 1, 2, -100}, {"targets", "-100", "row", "3", "8"}, -1);
    refused({5, 12, -3, 44}, {"targets", "12", "row", "1", "8"});  // the first
  }
  m.targets = {ignored, 0, ignored};
  m.refused(m.in({3, 0}), m.targets, m.out({3, 0}), {"targets", "class", "0", "row", "1", "logits"});
}

}  // namespace cross_entropy_test
