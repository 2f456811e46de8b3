// Expected results of attention's backward: plain loops in any precision, score formulas with derivatives, and error
// bounds.
#pragma once

#include <concepts>
#include <functional>

#include "attention_problem.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem {

// ---- Problem and result -----------------------------------------------------------------------------------

enum class Dlse { given, left_out };

template <class T>
struct Problem : attention_problem::Problem<T> {
  std::vector<T> dout;
  std::vector<Compute<T>> dlse;  // empty if omitted

  explicit Problem(const Shape& s, double deviation = 1, Dlse of_lse = Dlse::given)
      : attention_problem::Problem<T>(s, deviation) {
    const auto rows = static_cast<std::size_t>(this->rows());
    const auto seed = static_cast<unsigned>(s.queries * 1000 + s.keys + s.d);
    dout = reference::normals<T>(rows * static_cast<std::size_t>(s.dv), seed + 3);
    if (of_lse == Dlse::given) dlse = reference::normals<Compute<T>>(rows, seed + 4);
  }
  template <class U>
  explicit Problem(const Problem<U>& other)
      : attention_problem::Problem<T>(other),
        dout(other.dout.begin(), other.dout.end()),
        dlse(other.dlse.begin(), other.dlse.end()) {}
  View<const T, 4> dout_view() const {
    const Shape& s = this->shape;
    return {dout.data(), {s.batch, s.heads, s.queries, s.dv}};
  }
  View<const Compute<T>, 3> dlse_view() const {
    const Shape& s = this->shape;
    if (dlse.empty()) return {};
    return {dlse.data(), {s.batch, s.heads, s.queries}};
  }
};

/// dq, dk and dv, filled with values that the call must overwrite.
template <class T>
struct Result {
  std::vector<T> dq, dk, dv;
  std::vector<Compute<T>> dsinks;
  Explanation explanation{};  // explanation of the call, not compared

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

/// Few and many queries and keys, and queries without visible keys.
constexpr std::array<Shape, 5> few_and_many{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 3, 150, 8, 5},
    {2, 2, 1, 33, 140, 9, 24},
    {1, 1, 1, 70, 33, 5, 17},
    {1, 3, 3, 53, 53, 16, 16},
    {1, 1, 1, 20, 600, 4, 3},
}};

template <class T>
BackwardArguments<Compute<T>> backward_arguments_of(const Problem<T>& problem, const Output<T>& output) {
  return backward_over_views(problem.q_view(), problem.k_view(), problem.v_view(), output.out_view(),
                             output.lse_view());
}

/// The gradients of a call that writes `result`, without `dsinks`.
template <class T>
AttentionGradients<Compute<T>> gradients_to(const Problem<T>& problem, Result<T>& result) {
  const Shape& s = problem.shape;
  return {.dout = problem.dout_view(),
          .dlse = problem.dlse_view(),
          .dq = {result.dq.data(), {s.batch, s.heads, s.queries, s.d}},
          .dk = {result.dk.data(), {s.batch, s.kv_heads, s.keys, s.d}},
          .dv = {result.dv.data(), {s.batch, s.kv_heads, s.keys, s.dv}}};
}

/// Runs the backward of a forward call whose result is `output`.
template <class T, class S, class M, class C = ssmax::Identity, class E = ssmax::Serial>
Result<T> backward(const Problem<T>& problem, const Output<T>& output, const S& scaling, const M& mask,
                   const C& score = {}, const AttentionOptions<T>& options = {}, E&& executor = E{}) {
  Result<T> result(problem, options.sinks.size());
  AttentionOptions<T> explained = options;
  explained.explanation = &result.explanation;
  AttentionGradients<Compute<T>> gradients = gradients_to(problem, result);
  gradients.dsinks = result.dsinks;
  ssmax::attention_backward<Compute<T>>(backward_with(backward_arguments_of(problem, output), explained),
                                        gradients, scaling, mask, score, executor);
  return result;
}

/// Runs forward, then backward.
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

// ---- Expected results -------------------------------------------------------------------------------------

template <class T>
struct Expected {
  Gradients<Real> exact;
  Gradients<Compute<T>> naive;
  // Additional error bounds of dq and dk, of dv and of sums on the bf16 path, relative to the magnitudes of their
  // terms.
  Real of_dq = 0, of_dv = 0, of_sums = 0;
};

/// Returns the expected gradients for a forward's output. The naive loops use the output unchanged. The exact gradients
/// are the gradients of attention. Exception: if `out` is rounded to a narrower type, the formulas use the rounded
/// `out`.
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
  if (options.rope != nullptr) {  // rotation spreads an error in one channel to two channels
    for (std::vector<R>* sizes : {&result.dq_sizes, &result.dk_sizes}) {
      const std::size_t d = static_cast<std::size_t>(problem.shape.d);
      for (auto row = sizes->begin(); row != sizes->end(); row += static_cast<std::ptrdiff_t>(d)) {
        std::fill_n(row, d, std::sqrt(R(2)) * *std::max_element(row, row + static_cast<std::ptrdiff_t>(d)));
      }
    }
  }
  return result;
}

/// Adds the error bounds of the bf16 path: rounding of weights, gradients, the lse's sum and, with RoPE, rotated rows.
template <class T>
Expected<T> bounded(Expected<T> expected, const AttentionOptions<T>& options) {
  if (std::same_as<T, ssmax::bfloat16> && !options.float_products) {
    expected.of_dq = rounded_weights + (options.rope == nullptr ? 0 : rounded_sum);
    expected.of_dv = rounded_weights;
    expected.of_sums = rounded_sum;
  }
  return expected;
}

/// Returns the expectation for a problem and a definition.
template <class T>
Expectation<T> expect(const Problem<T>& problem, const reference::Definition& definition,
                      const AttentionOptions<T>& options = {}, const Positions& positions = {}) {
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

/// Returns the expectation for a problem, like attention_problem::expect.
template <class T>
Expectation<T> expect(const Problem<T>& problem, const Visible& visible, const Multiplier& multiplier,
                      const AttentionOptions<T>& options = {}, const Formula& score = {},
                      const Positions& positions = {}) {
  const auto definition = attention_problem::define(problem, visible, multiplier, options, score, positions);
  return expect(problem, definition, options, positions);
}

/// Returns Σ weight(n) · dc over the rows of each head: the gradient of a per-head parameter.
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

// ---- Error bounds -----------------------------------------------------------------------------------------

/// The error bound for sums over many rows and keys: twice the naive loop's largest error plus one rounding of the
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

  /// Takes a result: dq, dk and dv per head. Rounding the lse, or the logits it sums, changes all weights of a row by
  /// that relative error.
  void take(const Result<T>& result, const Expected<T>& expected, const Shape& s, const std::string& name) {
    dq.roundings = dk.roundings = dv.roundings = 8 + 2 * expected.exact.largest_lse;
    const Gradients<Real>& exact = expected.exact;
    dq.take(result.dq, expected.naive.dq, exact.dq, s.queries * s.d, name + " dq",
            parts(exact.dq_sizes, expected.of_dq), exact.dq_sizes);
    dk.take(result.dk, expected.naive.dk, exact.dk, s.keys * s.d, name + " dk",
            parts(exact.dk_sizes, expected.of_dq), exact.dk_sizes);
    dv.take(result.dv, expected.naive.dv, exact.dv, s.keys * s.dv, name + " dv",
            parts(exact.dv_sizes, expected.of_dv), exact.dv_sizes);
    sums.take(result.dsinks, expected.naive.dsinks, exact.dsinks, name + " dsinks", part(expected.of_sums));
  }
  /// Takes sums. `of` selects the expected sums from the expected gradients.
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
    CHECK(result.explanation.key_chunks == 1);
    take(result, expected, problem.shape, name_of(problem.shape));
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

/// Outputs for the gradients of a score's parameters.
template <class G>
struct ScoreGradients {
  std::vector<double> dslopes{};
  std::vector<G> dbias{};
};

/// Checks the backward of SSMax with a mask and a score against their definitions on every target: all gradients,
/// including ds, db and the score's parameter gradients in `learnt`.
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
