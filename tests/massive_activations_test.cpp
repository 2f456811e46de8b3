// The error bounds where large products of channels cancel: the term L of decode.hpp and attention.hpp.

#include <algorithm>
#include <cmath>
#include <random>
#include <ssmax/ssmax.hpp>
#include <string>
#include <vector>

#include "attention_problem.hpp"
#include "catch.hpp"
#include "reference.hpp"
#include "target_scope.hpp"

namespace massive_activations_test {

using namespace ssmax;
using reference::Real;

constexpr index_t d = 64, n = 200;
constexpr Real epsilon = 0x1p-23L, epsilon_16 = 0x1p-8L;

/// Queries and keys with two channels near `size` whose products cancel. Other channels lie between the two.
template <class T>
struct Problem {
  index_t queries;
  std::vector<T> q, k, v;

  Problem(index_t a_queries, double size, unsigned seed)
      : queries(a_queries),
        q(reference::normals<T>(static_cast<std::size_t>(queries * d), seed)),
        k(reference::normals<T>(static_cast<std::size_t>(n * d), seed + 1)),
        v(reference::normals<T>(static_cast<std::size_t>(n * d), seed + 2)) {
    const auto set = [](std::vector<T>& rows, index_t row, double first, double second) {
      rows[static_cast<std::size_t>(row * d)] = reference::narrow<T>(first);
      rows[static_cast<std::size_t>(row * d + d / 2 + 1)] = reference::narrow<T>(second);
    };
    std::mt19937 generator(seed);
    std::normal_distribution<double> normal(1, 0.01);
    for (index_t i = 0; i < queries; ++i) set(q, i, size, size);
    for (index_t j = 0; j < n; ++j) {
      const double x = size * normal(generator);
      set(k, j, x, -x);
    }
  }
  Real at(const std::vector<T>& rows, index_t row, index_t channel) const {
    return reference::widen(rows[static_cast<std::size_t>(row * d + channel)]);
  }
};

/// Largest errors relative to the bounds, without and with the term L.
struct Ratios {
  Real plain = 0, out = 0, lse = 0;
};

template <class T>
Ratios ratios_of(const Problem<T>& problem, double c) {
  const index_t queries = problem.queries;
  std::vector<T> out(problem.q.size());
  std::vector<float> lse(static_cast<std::size_t>(queries));
  Explanation explanation;
  attention<T>({.q = {problem.q.data(), {1, 1, queries, d}},
                .k = {problem.k.data(), {1, 1, n, d}},
                .v = {problem.v.data(), {1, 1, n, d}},
                .out = {out.data(), {1, 1, queries, d}},
                .lse = {lse.data(), {1, 1, queries}}},
               Constant(c), Full{}, {.explanation = &explanation});
  const bool is_bf16 = explanation.path == Path::prefill_bf16 || explanation.path == Path::decode_bf16;
  Ratios ratios;
  for (index_t i = 0; i < queries; ++i) {
    Real top = -reference::infinity, largest = 0, sum = 0;
    std::vector<Real> p;
    for (index_t j = 0; j < n; ++j) {
      Real product = 0, magnitude = 0;
      for (index_t t = 0; t < d; ++t) {
        const Real term = problem.at(problem.q, i, t) * problem.at(problem.k, j, t);
        product += term;
        magnitude += std::abs(term);
      }
      const Real factor = static_cast<Real>(c) / 8;
      p.push_back(product * factor);
      top = std::max(top, p.back());
      largest = std::max(largest, magnitude * factor);  // L
    }
    for (Real& x : p) sum += x = std::exp(x - top);
    const Real exact_lse = top + std::log(sum);
    const Real lse_bound =
        (is_bf16 ? 1.1L * epsilon_16 : 4 * (1 + std::abs(exact_lse)) * epsilon) + 4 * largest * epsilon;
    ratios.lse = std::max(ratios.lse, std::abs(lse[static_cast<std::size_t>(i)] - exact_lse) / lse_bound);
    for (index_t t = 0; t < d; ++t) {
      Real exact = 0, magnitude = 0;
      for (index_t j = 0; j < n; ++j) {
        const Real term = p[static_cast<std::size_t>(j)] / sum * problem.at(problem.v, j, t);
        exact += term;
        magnitude += std::abs(term);
      }
      const Real error = attention_problem::error_of(out[static_cast<std::size_t>(i * d + t)], exact);
      const Real plain = (is_bf16 ? 2.1L * epsilon_16 : 4 * (d + 1024 + n / 1024) * epsilon) * magnitude;
      const Real bound = plain + (is_bf16 ? 8 : 4) * largest * epsilon * magnitude;
      ratios.plain = std::max(ratios.plain, error / plain);
      ratios.out = std::max(ratios.out, error / bound);
    }
  }
  return ratios;
}

TEMPLATE_TEST_CASE("errors of massive activations are within the bounds", "[attention]", float, bfloat16) {
  for_each_target_of<TestType>([](const std::string& target) {
    Ratios all;
    for (const double size : {1.0, 100.0, 1000.0}) {
      for (const double c : {1.0, 6.0}) {
        for (const index_t queries : {1, 7, 40}) {
          const Ratios ratios = ratios_of(Problem<TestType>(queries, size, 7), c);
          INFO(target << ", size " << size << ", c " << c << ", queries " << queries << ": out "
                      << static_cast<double>(ratios.out) << ", lse " << static_cast<double>(ratios.lse));
          CHECK(ratios.out <= 0.5L);
          CHECK(ratios.lse <= 0.5L);
          all.plain = std::max(all.plain, ratios.plain);
        }
      }
    }
    CHECK(static_cast<double>(all.plain) > 1);  // the term L is needed
  });
}

}  // namespace massive_activations_test
