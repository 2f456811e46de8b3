// merge of pairs (out, lse): against attention over all keys and the formula in long double.

#include "attention_problem.hpp"
#include "attention_state_problem.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace attention_problem::state_problem::attention_merge_results_test {

template <class A>
AttentionResult<A> view_of(Output<A>& output, const Shape& s) {
  return {{output.out.data(), {s.batch, s.heads, s.queries, s.dv}},
          {output.lse.data(), {s.batch, s.heads, s.queries}}};
}

template <class A>
AttentionResult<const A> constant(const AttentionResult<A>& result) {
  return {result.out, result.lse};
}

TEMPLATE_TEST_CASE("merged pairs agree with attention over all keys", "[attention][state]", float, double) {
  using T = TestType;
  constexpr Real epsilon = std::numeric_limits<T>::epsilon();
  for (const Shape& shape : shapes) {
    const Problem<T> problem(shape);
    const FourHeads<T> heads(shape.heads);
    const Output<T> expected = run(problem, heads.scaling(), Causal{});
    // All keys of the last parts are masked for some queries.
    constexpr index_t count = 5;
    Output<T> merged_output(shape);
    for (index_t part = 0; part < count; ++part) {
      Output<T> next = finished(partial(problem, part * shape.keys / count, (part + 1) * shape.keys / count,
                                        heads.scaling(), Causal{}));
      if (part == 0) {
        merged_output = next;
        continue;
      }
      const AttentionResult<T> into = view_of(merged_output, shape);
      Output<T> separate(shape);
      merge<T>(constant(into), constant(view_of(next, shape)), view_of(separate, shape));
      merge<T>(constant(into), constant(view_of(next, shape)), into);
      CHECK(separate == merged_output);
    }
    Real largest = 0, worst = 0;
    for (const T v : problem.v) largest = std::max(largest, std::abs(Real(v)));
    for (std::size_t i = 0; i < expected.out.size(); ++i) {
      const Real lse = expected.lse[i / static_cast<std::size_t>(shape.dv)];
      const Real bound = count * (4 + (std::isfinite(lse) ? std::abs(lse) : 0)) * epsilon;
      worst =
          std::max(worst, std::abs(Real(merged_output.out[i]) - Real(expected.out[i])) / (bound * largest));
      if (lse == merged_output.lse[i / static_cast<std::size_t>(shape.dv)]) continue;
      worst =
          std::max(worst, std::abs(merged_output.lse[i / static_cast<std::size_t>(shape.dv)] - lse) / bound);
    }
    INFO(name_of(shape));
    CHECK(worst <= 1);
  }
}

TEST_CASE("merged pairs with special lse", "[attention][state]") {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  struct Case {
    double lse_1, lse_2, out, lse;  // out_1 is 1, out_2 is 3
  };
  for (const Case& c : {Case{0, 0, 2, std::log(2)},
                        {-inf, 5, 3, 5},
                        {5, -inf, 1, 5},
                        {-inf, -inf, 0, -inf},
                        {0, std::log(3), 2.5, std::log(4)},
                        {1e5, -1e5, 1, 1e5},
                        {nan, 0, nan, nan},
                        {0, nan, nan, nan},
                        {-inf, nan, nan, nan},
                        {inf, 0, nan, nan}}) {
    // A row without visible keys is not read.
    double out_1[] = {c.lse_1 == -inf ? nan : 1}, out_2[] = {c.lse_2 == -inf ? nan : 3}, out[] = {-7},
           lse[] = {-7};
    merge<double>({{out_1, {1, 1, 1, 1}}, {&c.lse_1, {1, 1, 1}}},
                  {{out_2, {1, 1, 1, 1}}, {&c.lse_2, {1, 1, 1}}}, {{out, {1, 1, 1, 1}}, {lse, {1, 1, 1}}});
    const auto same = [](double a, double b) {
      return std::isnan(b) ? std::isnan(a) : a == Approx(b).epsilon(1e-15);
    };
    INFO(c.lse_1 << ' ' << c.lse_2);
    CHECK(same(out[0], c.out));
    CHECK(same(lse[0], c.lse));
  }
}

TEST_CASE("merge of pairs throws for other extents and overlap", "[attention][state][errors]") {
  float memory[64] = {};
  const auto result = [&](index_t at, index_t queries = 2) {
    return AttentionResult<float>{{memory + at, {1, 1, queries, 3}}, {memory + at + 6, {1, 1, queries}}};
  };
  const auto refused = [&](const AttentionResult<float>& first, const AttentionResult<float>& second,
                           std::initializer_list<std::string_view> words) {
    check_refused_with_words(words, [&] { merge(constant(first), constant(second), result(0)); });
  };
  refused(result(8, 1), result(16), {"merge", "first.out", "1", "result.out", "2"});
  refused(result(8), result(16, 1), {"merge", "second.out", "1", "result.out", "2"});
  refused(result(8), result(0), {"merge", "result.out", "second.out"});
  refused(result(1), result(16), {"merge", "result", "first"});
  merge(constant(result(0)), constant(result(8)), result(0));
  merge<float>({}, {}, {});
}

}  // namespace attention_problem::state_problem::attention_merge_results_test
