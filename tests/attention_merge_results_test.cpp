// merge of pairs (out, lse): against attention over all keys and the formula in long double.

#include "attention_problem.hpp"
#include "attention_state_problem.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace attention_problem::state_problem::attention_merge_results_test {

template <class T>
AttentionResult<T> view_of(Output<T>& output, const Shape& s) {
  return {{output.out.data(), {s.batch, s.heads, s.queries, s.dv}},
          {output.lse.data(), {s.batch, s.heads, s.queries}}};
}

template <class T>
AttentionResult<const T> constant(const AttentionResult<T>& result) {
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

/// Pairs whose rows lie in reverse order, with gaps that hold `gap`.
template <class T>
struct Pair {
  static constexpr float gap = -77;
  index_t pitch;
  std::vector<T> out;
  std::vector<float> lse;
  AttentionResult<T> view;

  Pair(const Shape& s, unsigned seed)
      : pitch(s.dv + 3), out(static_cast<std::size_t>(s.batch * s.heads * s.queries * pitch), T(gap)) {
    const index_t rows = s.batch * s.heads * s.queries;
    lse = reference::normals<float>(static_cast<std::size_t>(rows), seed, 3);
    view = {{out.data() + (rows - 1) * pitch,
             {s.batch, s.heads, s.queries, s.dv},
             {-s.heads * s.queries * pitch, -s.queries * pitch, -pitch, 1}},
            {lse.data(), {s.batch, s.heads, s.queries}}};
    const std::vector<T> values = reference::normals<T>(static_cast<std::size_t>(rows * s.dv), seed + 1);
    std::size_t at = 0;
    reference::for_each_index({s.batch, s.heads, s.queries, s.dv},
                              [&](auto... index) { view.out(index...) = values[at++]; });
  }
};

TEMPLATE_TEST_CASE("merged pairs of 16 bits agree with the formula", "[attention][state]", half, bfloat16) {
  using T = TestType;
  constexpr Real epsilon = std::numeric_limits<float>::epsilon();
  for (const index_t dv : {0, 1, 2, 17, 64, 127, 128, 129, 300}) {
    const Shape shape{2, 3, 1, 5, 1, 1, dv};
    for_each_target([&](const std::string& target) {
      INFO(target << ", " << dv << " channels");
      Pair<T> first(shape, 1), second(shape, 2), result(shape, 3);
      first.lse[1] = second.lse[2] = first.lse[3] = second.lse[3] = -infinity<float>;
      first.lse[4] = nan<float>;
      // A row without visible keys is not read.
      for (index_t c = 0; c < dv; ++c) first.view.out(0, 0, 1, c) = T(nan<float>);
      merge(constant(first.view), constant(second.view), result.view);
      Real worst = 0, worst_lse = 0;
      int wrong = 0;
      reference::for_each_index({2, 3, 5}, [&](index_t b, index_t h, index_t i) {
        const Real lse_1 = first.view.lse(b, h, i), lse_2 = second.view.lse(b, h, i);
        const Real top = std::max(lse_1, lse_2), total = std::exp(lse_1 - top) + std::exp(lse_2 - top);
        const float lse = result.view.lse(b, h, i);
        if (std::isnan(lse_1)) {
          wrong += !std::isnan(lse);
          for (index_t c = 0; c < dv; ++c) wrong += !std::isnan(float(result.view.out(b, h, i, c)));
          return;
        }
        if (top == -infinity<Real>) {
          wrong += lse != -infinity<float>;
          for (index_t c = 0; c < dv; ++c) wrong += float(result.view.out(b, h, i, c)) != 0;
          return;
        }
        const Real size = std::isfinite(lse_1) && std::isfinite(lse_2)
                              ? std::max(std::abs(lse_1), std::abs(lse_2))
                              : std::abs(top);
        worst_lse = worse(worst_lse, std::abs(Real(lse) - (top + std::log(total))) / (epsilon * (1 + size)));
        for (index_t c = 0; c < dv; ++c) {
          const auto part = [&](const Pair<T>& pair, Real own) {
            return own == -infinity<Real>
                       ? 0
                       : std::exp(own - top) / total * Real(float(pair.view.out(b, h, i, c)));
          };
          const Real one = part(first, lse_1), two = part(second, lse_2);
          const Real bound = (size + 4) * epsilon * (std::abs(one) + std::abs(two));
          worst = worse(worst, error_of(result.view.out(b, h, i, c), one + two) - bound);
        }
      });
      CHECK(worst <= 0);
      CHECK(worst_lse <= 1);
      CHECK(wrong == 0);
      // The gaps of the rows are unchanged.
      CHECK(std::ranges::count_if(result.out, [](T x) { return float(x) == Pair<T>::gap; }) >= 2 * 3 * 5 * 3);
      // In place, with the same bits.
      merge(constant(first.view), constant(second.view), first.view);
      CHECK(same_bits(first.out, result.out));
      CHECK(same_bits(first.lse, result.lse));
    });
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
