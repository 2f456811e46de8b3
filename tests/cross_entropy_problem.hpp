// A problem for cross_entropy, its expected results from loops in long double, and error bounds.
#pragma once

#include "reference.hpp"
#include "test.hpp"

namespace cross_entropy_problem {

using namespace ssmax;
using reference::narrow;
using reference::Real;
using reference::widen;
using reference::worse;

inline constexpr double inf = std::numeric_limits<double>::infinity();
inline constexpr double nan = std::numeric_limits<double>::quiet_NaN();
inline constexpr index_t ignored = -100;

/// The value of output elements before a call.
template <class T>
T sentinel() {
  return narrow<T>(-1234.5L);
}

enum class Where { left_out, apart, in_place };

template <class T>
struct Result {
  double loss = nan;
  index_t count = -1;
  std::vector<T> gradient{};  // contiguous, empty if omitted
  bool kept = true;           // true if the gaps between the rows are unchanged

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

  /// Runs with `gap` elements between the rows. `up`: later rows have higher addresses.
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
    // After the gradient's elements are restored, the whole buffer must be unchanged.
    std::vector<T>& written = where == Where::in_place ? in : out;
    const std::vector<T>& before = where == Where::in_place ? in_before : out_before;
    if (where != Where::left_out) {
      for (index_t row = 0; row < rows; ++row) {
        const auto at = static_cast<std::ptrdiff_t>(first + row * strides[0]);
        std::copy_n(before.begin() + at, classes, written.begin() + at);
      }
    }
    const auto same_values = [](const std::vector<T>& a, const std::vector<T>& b) {
      return std::equal(a.begin(), a.end(), b.begin(), [](T x, T y) {
        return widen(x) == widen(y) || (std::isnan(widen(x)) && std::isnan(widen(y)));
      });
    };
    result.kept = same_values(in, in_before) && same_values(out, out_before);
    return result;
  }
};

struct Expected {
  Real loss = 0;
  index_t count = 0;
  std::vector<Real> gradient{};
};

/// Computes the definition in long double. Exception: if all logits are -inf, the gradient is 0.
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

/// Errors relative to the bounds at the top of the header. At most 1 is correct.
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

}  // namespace cross_entropy_problem
