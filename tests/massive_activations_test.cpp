// The error bounds where large products of channels cancel: the term L of decode.hpp and attention.hpp.

#include "attention_problem.hpp"
#include "test.hpp"

namespace attention_problem::massive_activations_test {

constexpr index_t d = 64, keys = 200;
constexpr Real epsilon = 0x1p-23L, epsilon_16 = 0x1p-8L;

/// A problem with two channels near `size` whose products cancel. Other channels lie between the two.
template <class T>
Problem<T> problem_of(index_t queries, double size) {
  Problem<T> problem({1, 1, 1, queries, keys, d, d});
  const auto set = [](std::vector<T>& rows, index_t row, double first, double second) {
    rows[static_cast<std::size_t>(row * d)] = reference::narrow<T>(first);
    rows[static_cast<std::size_t>(row * d + d / 2 + 1)] = reference::narrow<T>(second);
  };
  for (index_t i = 0; i < queries; ++i) set(problem.q, i, size, size);
  for (index_t j = 0; j < keys; ++j) {
    const double x = size * (1 + 0.01 * static_cast<double>(widen(problem.v[static_cast<std::size_t>(j)])));
    set(problem.k, j, x, -x);
  }
  return problem;
}

/// Returns L of a query: the largest |c|·scale·Σ_t |q_t k_t| of all keys.
template <class T>
Real largest_terms(const Problem<T>& problem, index_t query, double c) {
  Real largest = 0;
  for (index_t j = 0; j < keys; ++j) {
    Real sum = 0;
    for (index_t t = 0; t < d; ++t) {
      sum += std::abs(widen(problem.q[static_cast<std::size_t>(query * d + t)]) *
                      widen(problem.k[static_cast<std::size_t>(j * d + t)]));
    }
    largest = std::max(largest, static_cast<Real>(c) / 8 * sum);
  }
  return largest;
}

TEMPLATE_TEST_CASE("errors of massive activations are within the bounds", "[attention][bfloat16]", float,
                   bfloat16) {
  for (const double c : {1.0, 6.0}) {
    Real largest_plain = 0;  // the largest error, relative to the bound without L
    for (const double size : {1.0, 100.0, 1000.0}) {
      for (const index_t queries : {1, 7, 40}) {
        const Problem<TestType> problem = problem_of<TestType>(queries, size);
        const auto multiplier = [c](index_t, index_t, index_t) { return static_cast<Real>(c); };
        const auto exact = expect(problem, all_keys, multiplier).exact;
        Problem<TestType> absolute = problem;
        for (TestType& x : absolute.v) x = reference::narrow<TestType>(std::abs(widen(x)));
        const std::vector<Real> magnitudes = expect(absolute, all_keys, multiplier).exact.out;  // Σ p·|v|
        for_each_target_of<TestType>([&](const std::string& target) {
          const Output<TestType> output = run(problem, ssmax::Constant(c), Full{});
          const ssmax::Path path = output.explanation.path;
          const bool is_bf16 = path == ssmax::Path::prefill_bf16 || path == ssmax::Path::decode_bf16;
          Real of_out = 0, of_lse = 0;  // the largest errors, relative to the bounds
          for (index_t i = 0; i < queries; ++i) {
            const Real terms = largest_terms(problem, i, c);
            const auto row = static_cast<std::size_t>(i);
            const Real lse_bound =
                (is_bf16 ? 1.1L * epsilon_16 : 4 * (1 + std::abs(exact.lse[row])) * epsilon) +
                4 * terms * epsilon;
            of_lse = std::max(of_lse, error_of(output.lse[row], exact.lse[row]) / lse_bound);
            for (std::size_t at = row * d; at < (row + 1) * d; ++at) {
              const Real error = error_of(output.out[at], exact.out[at]);
              const Real plain = (is_bf16 ? 2.1L * epsilon_16 : 4 * (d + 1024) * epsilon) * magnitudes[at];
              largest_plain = std::max(largest_plain, error / plain);
              of_out =
                  std::max(of_out, error / (plain + (is_bf16 ? 8 : 4) * terms * epsilon * magnitudes[at]));
            }
          }
          INFO(target << ", size " << size << ", c " << c << ", queries " << queries);
          CHECK(static_cast<double>(of_out) <= 0.5);
          CHECK(static_cast<double>(of_lse) <= 0.5);
        });
      }
    }
    CHECK(static_cast<double>(largest_plain) > 1);  // the term L is needed
  }
}

}  // namespace attention_problem::massive_activations_test
