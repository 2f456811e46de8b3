// What attention's backward should give: the formulas written as plain loops in any precision, formulas of
// scores with their derivatives, and how far from that a result may be.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <functional>
#include <limits>
#include <ssmax/attention_backward.hpp>
#include <string>
#include <type_traits>
#include <vector>

#include "attention_problem.hpp"
#include "catch.hpp"
#include "reference.hpp"
#include "target_scope.hpp"

namespace attention_problem::backward_problem {

// ---- Problem and result -----------------------------------------------------------------------------------

enum class Dlse { given, left_out };

template <class T>
struct Problem : attention_problem::Problem<T> {
  std::vector<T> dout;
  std::vector<Compute<T>> dlse;  // empty where it is left out

  explicit Problem(const Shape& s, double deviation = 1, Dlse of_lse = Dlse::given)
      : attention_problem::Problem<T>(s, deviation) {
    const auto rows = static_cast<std::size_t>(this->rows());
    const auto seed = static_cast<unsigned>(s.queries * 1000 + s.keys + s.d);
    dout = reference::normals<T>(rows * static_cast<std::size_t>(s.dv), seed + 3);
    if (of_lse == Dlse::given) dlse = reference::normals<Compute<T>>(rows, seed + 4);
  }
};

/// The gradients that are as large as the inputs, with something in them to be overwritten.
template <class T>
struct Result {
  std::vector<T> dq, dk, dv;
  std::vector<Compute<T>> dsinks;
  Explanation explanation{};  // of the call, not compared

  explicit Result(const attention_problem::Problem<T>& problem, std::size_t sinks = 0)
      : dq(problem.q.size(), T(-77)),
        dk(problem.k.size(), T(-77)),
        dv(problem.v.size(), T(-77)),
        dsinks(sinks) {}
  bool operator==(const Result& other) const {
    return same_bits(dq, other.dq) && same_bits(dk, other.dk) && same_bits(dv, other.dv) &&
           same_bits(dsinks, other.dsinks);
  }
};

/// The backward of a forward that gave `output`.
template <class T, class S, class M, class C, class E = ssmax::Serial>
Result<T> backward(const Problem<T>& problem, const Output<T>& output, const S& scaling, const M& mask,
                   const C& score, const AttentionOptions<T>& options = {}, E&& executor = E{}) {
  const Shape& s = problem.shape;
  Result<T> result(problem, options.sinks.size());
  AttentionOptions<T> explained = options;
  explained.explanation = &result.explanation;
  const std::array<index_t, 4> of_out{s.batch, s.heads, s.queries, s.dv};
  const std::array<index_t, 3> of_rows{s.batch, s.heads, s.queries};
  View<const Compute<T>, 3> dlse{};
  if (!problem.dlse.empty()) dlse = {problem.dlse.data(), of_rows};
  ssmax::attention_backward<T>({.q = problem.q_view(),
                                .k = problem.k_view(),
                                .v = problem.v_view(),
                                .out = {output.out.data(), of_out},
                                .lse = {output.lse.data(), of_rows}},
                               {.dout = {problem.dout.data(), of_out},
                                .dlse = dlse,
                                .dq = {result.dq.data(), {s.batch, s.heads, s.queries, s.d}},
                                .dk = {result.dk.data(), {s.batch, s.kv_heads, s.keys, s.d}},
                                .dv = {result.dv.data(), {s.batch, s.kv_heads, s.keys, s.dv}},
                                .dsinks = result.dsinks},
                               scaling, mask, score, explained, executor);
  return result;
}

/// Forward, then backward.
template <class T, class S, class M, class C, class E = ssmax::Serial>
requires ssmax::Score<C> Result<T> run_backward(const Problem<T>& problem, const S& scaling, const M& mask,
                                                const C& score, const AttentionOptions<T>& options = {},
                                                E&& executor = E{}) {
  const Output<T> output = attention_problem::run<T>(problem, scaling, mask, score, options, executor);
  return backward(problem, output, scaling, mask, score, options, executor);
}

template <class T, class S, class M, class E = ssmax::Serial>
Result<T> run_backward(const Problem<T>& problem, const S& scaling, const M& mask,
                       const AttentionOptions<T>& options = {}, E&& executor = E{}) {
  return run_backward(problem, scaling, mask, ssmax::Identity{}, options, executor);
}

// ---- What should come out ---------------------------------------------------------------------------------

template <class T>
struct Expected {
  Gradients<Real> exact;
  Gradients<Compute<T>> naive;
  // Where a target's products may be in 16 bits: what dq and dk, dv and sums may err by for that, in parts of
  // their terms' sizes.
  Real of_dq = 0, of_dv = 0, of_sums = 0;
};

/// What should come of a forward's output. The naive loops take it as it is. The exact gradients are those of
/// attention itself; but where `out` is stored with fewer digits than it was computed with, they are what the
/// formulas make of it.
template <class T>
using Expectation = std::function<Expected<T>(const Output<T>&)>;

template <class R, class T>
Gradients<R> gradients_of(const Problem<T>& problem, const reference::Definition& definition,
                          const AttentionOptions<T>& options, const Positions& positions,
                          const Output<T>* output) {
  const auto inputs = attention_problem::inputs_of<R>(problem, options, positions);
  reference::Attended<R> forward;
  if (std::same_as<R, Real>) {
    forward = reference::attend(inputs, definition);
  } else {
    forward.lse = widened<R>(output->lse);
  }
  if (output != nullptr) forward.out = widened<R>(output->out);
  auto result = reference::differentiate(inputs, widened<R>(problem.dout), widened<R>(problem.dlse), forward,
                                         definition);
  attention_problem::turn_both(result.dq, result.dk, problem, options, positions, -1);
  if (options.rope != nullptr) {  // an error in one channel becomes one in two
    for (std::vector<R>* sizes : {&result.dq_sizes, &result.dk_sizes}) {
      const std::size_t d = static_cast<std::size_t>(problem.shape.d);
      for (auto row = sizes->begin(); row != sizes->end(); row += static_cast<std::ptrdiff_t>(d)) {
        std::fill_n(row, d, std::sqrt(R(2)) * *std::max_element(row, row + static_cast<std::ptrdiff_t>(d)));
      }
    }
  }
  return result;
}

/// What roundings of weights and gradients, of the lse's sum and, with RoPE, of rotated rows cost.
template <class T>
Expected<T> bounded(Expected<T> expected, const AttentionOptions<T>& options) {
  if (std::same_as<T, ssmax::bfloat16> && !options.float_products) {
    expected.of_dq = rounded_weights + (options.rope == nullptr ? 0 : rounded_sum);
    expected.of_dv = rounded_weights;
    expected.of_sums = rounded_sum;
  }
  return expected;
}

/// As attention_problem::expect.
template <class T>
Expectation<T> expect(const Problem<T>& problem, const Visible& visible, const Multiplier& multiplier,
                      const AttentionOptions<T>& options = {}, const Formula& score = {},
                      const Positions& positions = {}) {
  const auto definition = attention_problem::define(problem, visible, multiplier, options, score, positions);
  const auto gradients = [=, &problem]<class R>(R, const Output<T>* output) {
    return gradients_of<R>(problem, definition, options, positions, output);
  };
  if constexpr (std::same_as<T, Compute<T>>) {
    return [gradients, exact = gradients(Real(), nullptr)](const Output<T>& output) {
      return Expected<T>{exact, gradients(Compute<T>(), &output)};
    };
  } else {
    return [gradients, options](const Output<T>& output) {
      return bounded(Expected<T>{gradients(Real(), &output), gradients(Compute<T>(), &output)}, options);
    };
  }
}

/// Σ weight(n) · dc over the rows of each head: the gradient of a parameter that heads have for themselves.
template <class R, class Weight>
Sums<R> per_head(const Gradients<R>& gradients, const Shape& shape, const Weight& weight) {
  Sums<R> sums;
  for (std::size_t row = 0; row < gradients.n.size(); ++row) {
    if (gradients.n[row] == 0) continue;
    const auto head = static_cast<std::size_t>(static_cast<index_t>(row) / shape.queries % shape.heads);
    const R by = static_cast<R>(weight(gradients.n[row]));
    sums.add(head, by * gradients.dc.values[row], std::abs(by) * gradients.dc.sizes[row]);
  }
  return sums;
}

inline constexpr auto ln = [](index_t n) { return std::log(static_cast<Real>(n)); };
inline constexpr auto unweighted = [](index_t) { return Real(1); };

// ---- How far off a result may be --------------------------------------------------------------------------

/// Of sums over many rows and keys: at most twice the naive loop's largest error, and a rounding of the
/// terms.
template <class A>
struct SumRule {
  Real excess = -reference::infinity;
  std::string where;

  template <class G>
  void take(const std::vector<G>& computed, Sums<A> naive, Sums<Real> exact, const std::string& name,
            Real allowed = 0) {
    if (computed.empty()) return;
    naive.values.resize(computed.size());
    exact.values.resize(computed.size());
    Real size = 1;
    for (const Real value : exact.sizes) size = std::isnan(value) ? size : std::max(size, value);
    const Real unit = std::max(rounding<A>, rounding<G>);
    const Real ours = attention_problem::largest_error(computed, exact.values),
               theirs = attention_problem::largest_error(naive.values, exact.values);
    const Real over = ours - (2 * theirs + (2 * unit + allowed) * size);
    if (over <= excess) return;
    excess = over;
    where = name + ": " + std::to_string(static_cast<double>(ours / unit)) + ", naive " +
            std::to_string(static_cast<double>(theirs / unit)) + ", terms " +
            std::to_string(static_cast<double>(size));
  }
};

template <class T>
struct Rules {
  using A = Compute<T>;
  attention_problem::Rule<A> dq, dk, dv;
  SumRule<A> sums;

  /// Rounding the lse, or the logits that make it, is what all of a row's weights may be off by.
  void take(const Result<T>& result, const Expected<T>& expected, const std::string& name) {
    dq.roundings = dk.roundings = dv.roundings = 8 + 2 * expected.exact.largest_lse;
    const Gradients<Real>& exact = expected.exact;
    dq.take(result.dq, expected.naive.dq, exact.dq, name + " dq", parts(exact.dq_sizes, expected.of_dq));
    dk.take(result.dk, expected.naive.dk, exact.dk, name + " dk", parts(exact.dk_sizes, expected.of_dq));
    dv.take(result.dv, expected.naive.dv, exact.dv, name + " dv", parts(exact.dv_sizes, expected.of_dv));
    sums.take(result.dsinks, expected.naive.dsinks, exact.dsinks, name + " dsinks", part(expected.of_sums));
  }
  /// Sums that `of` takes from the expected gradients.
  template <class G, class Of>
  void take(const std::vector<G>& computed, const Expected<T>& expected, const Of& of,
            const std::string& name) {
    sums.take(computed, of(expected.naive), of(expected.exact), name, part(expected.of_sums));
  }
  /// Runs forward and backward, and takes the result.
  template <class S, class M, class C>
  Expected<T> run(const Problem<T>& problem, const Expectation<T>& expectation, const S& scaling,
                  const M& mask, const C& score, const AttentionOptions<T>& options = {}) {
    const Output<T> output = attention_problem::run<T>(problem, scaling, mask, score, options);
    Expected<T> expected = expectation(output);
    const Result<T> result = backward(problem, output, scaling, mask, score, options);
    const bool is_bf16 = std::same_as<T, ssmax::bfloat16> && attention_problem::has_bfloat16_products() &&
                         !options.float_products;
    CHECK(result.explanation.path == (is_bf16 ? ssmax::Path::backward_bf16 : ssmax::Path::backward));
    take(result, expected, name_of(problem.shape));
    return expected;
  }
  template <class S, class M>
  Expected<T> run(const Problem<T>& problem, const Expectation<T>& expectation, const S& scaling,
                  const M& mask, const AttentionOptions<T>& options = {}) {
    return run(problem, expectation, scaling, mask, ssmax::Identity{}, options);
  }
  void check(const std::string& target) const {
    INFO(target << ", in half ulps of one: " << dq.where << "; " << dk.where << "; " << dv.where << "; "
                << sums.where);
    CHECK(dq.excess <= 0);
    CHECK(dk.excess <= 0);
    CHECK(dv.excess <= 0);
    CHECK(sums.excess <= 0);
  }

 private:
  static Real part(Real of) { return attention_problem::has_bfloat16_products() ? of : 0; }
  static std::vector<Real> parts(std::vector<Real> sizes, Real of) {
    for (Real& size : sizes) size *= part(of);
    return sizes;
  }
};

// ---- SSMax against the reference --------------------------------------------------------------------------

/// Where a score puts the gradients of its parameters.
template <class G>
struct ScoreGradients {
  std::vector<double> dslopes{};
  std::vector<G> dbias{};
};

/// The backward of SSMax under a mask and a score is, on every target, what their definitions say: all
/// gradients, among them ds, db and those that the score was made to put into `learnt`.
template <class T, class M, class C = ssmax::Identity, class G = double>
void check(const Problem<T>& problem, const M& mask, const Visible& visible, const C& score = {},
           const Formula& formula = {}, const AttentionOptions<T>& options = {},
           const Positions& positions = {}, ScoreGradients<G>* learnt = nullptr) {
  using A = Compute<T>;
  const attention_problem::FourHeads<A> heads(problem.shape.heads);
  const auto expected = expect(problem, visible, heads.multiplier(), options, formula, positions);
  const auto head_count = static_cast<std::size_t>(problem.shape.heads);
  for_each_target_of<T>([&](const std::string& target) {
    std::vector<A> ds(head_count), db(head_count);
    if (learnt != nullptr) {
      std::ranges::fill(learnt->dslopes, 0.0);
      std::ranges::fill(learnt->dbias, G{0});
    }
    Rules<T> rules;
    const auto got = rules.run(problem, expected, heads.scaling().gradient(ds, db), mask, score, options);
    const std::string name = name_of(problem.shape);
    rules.take(
        ds, got, [&](const auto& g) { return per_head(g, problem.shape, ln); }, name + "ds");
    rules.take(
        db, got, [&](const auto& g) { return per_head(g, problem.shape, unweighted); }, name + "db");
    if (learnt != nullptr) {
      rules.take(
          learnt->dslopes, got, [](const auto& g) { return g.dslopes; }, name + "dslopes");
      rules.take(
          learnt->dbias, got, [](const auto& g) { return g.dbias; }, name + "dbias");
    }
    rules.check(target);
  });
}

}  // namespace attention_problem::backward_problem
