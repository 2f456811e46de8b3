// Logits of any size and multipliers of any sign, on both paths: up to 16 queries per kv head, and more. The logits of
// one query do not affect other queries.

#include "attention_problem.hpp"
#include "test.hpp"

namespace attention_problem::attention_logits_test {

constexpr std::array<Shape, 4> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {1, 4, 2, 5, 140, 8, 5},
    {1, 2, 1, 37, 140, 3, 7},
    {1, 1, 1, 3, 1100, 5, 4},
    {1, 1, 1, 33, 1050, 5, 4},
}};

bool is_picked(const Query& query, index_t key) { return (query.index * 7919 + key * 104729) % 7 < 3; }

/// Several multipliers of about the same size.
template <class T, class C>
void check_multipliers(double magnitude, const C& score, const reference::Formula& formula) {
  struct Case {
    Problem<T> problem;
    double c;
    Expected<T> causal, picked;
  };
  std::vector<Case> cases;
  for (const Shape& shape : shapes) {
    const Problem<T> problem(shape);
    for (const double by : {1.0, -1.37, 1.81, -2.6}) {
      const auto c = [&](index_t, index_t, index_t) { return static_cast<Real>(magnitude * by); };
      cases.push_back({problem, magnitude * by, expect(problem, keys_before, c, {}, formula),
                       expect(problem, is_picked, c, {}, formula)});
    }
  }
  for_each_target([&](const std::string& target) {
    INFO(target << ", multipliers of about " << magnitude);
    Averages<T> averages;
    for (const Case& test : cases) {
      averages.take(run(test.problem, Constant{test.c}, Causal{}, score), test.causal);
      averages.take(run(test.problem, Constant{test.c}, Where(is_picked), score), test.picked);
    }
    averages.check();
  });
}

TEST_CASE("multipliers of both signs from 0 to a billion", "[attention][logits][slow]") {
  for (const double c : {0.0, 1e-30, 1e-3, 1.0, 30.0, 1e3, 1e5, 5e5, 1e6, 1e7, 1e9}) {
    check_multipliers<float>(c, ssmax::Identity{}, {});
  }
}

TEST_CASE("multipliers of double, beyond what float holds", "[attention][logits][slow]") {
  for (const double c : {0.0, 1e-300, 1e6, 1e15, 1e30}) {
    check_multipliers<double>(c, ssmax::Identity{}, {});
  }
}

TEST_CASE("scores with multipliers of any size and sign", "[attention][logits][slow]") {
  const auto capped = [](auto z, const Query&, index_t) {
    using Z = decltype(z);
    return Z(2) * std::tanh(z / Z(2));
  };
  for (const double c : {0.0, 1.0, 1e3, 1e6, 1e8}) check_multipliers<float>(c, ssmax::Softcap(2), capped);
}

TEST_CASE("a scale of any size and sign", "[attention][logits]") {
  for (const Shape& shape : shapes) {
    const Problem<float> problem(shape);
    for (const double scale : {0.0, 1e-20, -0.5, 1e6, -1e7}) {
      const Expected<float> expected = expect(problem, keys_before, one, {.scale = scale});
      for_each_target([&](const std::string& target) {
        Rules<float> rules;
        rules.take(run(problem, Softmax{}, Causal{}, {.scale = scale}), expected,
                   name_of(shape) + "scale " + std::to_string(scale));
        rules.check(target);
      });
    }
  }
}

/// A factor that moves a query's logits beyond the range of the fast path.
constexpr float far = 1e7F;

TEST_CASE("queries with huge logits do not affect other queries", "[attention][logits]") {
  for (const Shape& shape : shapes) {
    const Problem<float> clean(shape);
    Problem<float> mixed = clean;
    const auto is_huge = [&](index_t row) { return row % shape.queries % 3 == 1; };
    for (index_t i = 0; i < clean.rows() * shape.d; ++i) {
      if (is_huge(i / shape.d)) mixed.q[static_cast<std::size_t>(i)] *= far;
    }
    const Expected<float> expected = expect(mixed, keys_before, one);
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const Output<float> of_clean = run(clean, Softmax{}, Causal{}),
                          output = run(mixed, Softmax{}, Causal{});
      int wrong = 0;
      for (index_t i = 0; i < clean.rows() * shape.dv; ++i) {
        const auto at = static_cast<std::size_t>(i), row = static_cast<std::size_t>(i / shape.dv);
        if (is_huge(i / shape.dv)) continue;
        if (!same_bits(output.out[at], of_clean.out[at])) ++wrong;
        if (!same_bits(output.lse[row], of_clean.lse[row])) ++wrong;
      }
      CHECK(wrong == 0);
      Rules<float> rules;
      rules.take(output, expected, name_of(shape));
      rules.check(target);
    });
  }
}

TEST_CASE("huge logits at the first, a middle and the last key", "[attention][logits]") {
  // The huge logits exceed the range of the fast path at the first, a middle or the last key.
  for (const Shape& shape : shapes) {
    for (const index_t huge : {index_t{0}, index_t{130}, shape.keys - 1}) {
      for (const float factor : {far, -far}) {
        Problem<float> problem(shape);
        for (index_t h = 0; h < shape.kv_heads; ++h) {
          for (index_t c = 0; c < shape.d; ++c) {
            problem.k[static_cast<std::size_t>((h * shape.keys + huge) * shape.d + c)] *= factor;
          }
        }
        const Expected<float> expected = expect(problem, all_keys, one);
        for_each_target([&](const std::string& target) {
          Rules<float> rules;
          rules.take(run(problem, Softmax{}, Full{}), expected,
                     name_of(shape) + "huge " + std::to_string(huge));
          rules.check(target);
        });
      }
    }
  }
}

TEST_CASE("weights that underflow do not affect the result", "[attention][logits]") {
  // One key ahead of all others by 1000: it has all the weight, up to an ulp.
  for_each_target([](const std::string& target) {
    for (const index_t queries : {1, 16, 17, 40}) {
      INFO(target << ' ' << queries);
      const auto count = static_cast<std::size_t>(queries);
      const std::vector<float> q(count, 1.0F);
      std::vector<float> k(300, 0.0F), v(300, 1e30F), out(count), lse(count);
      k[200] = 1000;
      v[200] = 0.75F;
      ssmax::attention({.q = {q.data(), {1, 1, queries, 1}},
                        .k = {k.data(), {1, 1, 300, 1}},
                        .v = {v.data(), {1, 1, 300, 1}},
                        .out = {out.data(), {1, 1, queries, 1}},
                        .lse = {lse.data(), {1, 1, queries}}});
      CHECK(std::ranges::all_of(out, [](float value) { return std::abs(value - 0.75F) <= 0x1p-24F; }));
      CHECK(lse == std::vector<float>(count, 1000.0F));
    }
  });
}

TEST_CASE("a logit a little above a shift that is too large for the kernels", "[attention][logits]") {
  // In units of log2 the first block's logits of query 0 are -1048579, below -2^20, and the second's
  // -1048574, above it: the shift is raised for 8 and more, so it stays where the kernels cannot follow.
  for (const float first : {-726819.625F, -726815.0F}) {
    Problem<float> problem({1, 1, 1, 40, 256, 1, 1});
    std::ranges::fill(problem.q, 0.0F);
    problem.q[0] = 1;
    std::ranges::fill(problem.k, -726816.0F);
    std::fill_n(problem.k.begin(), 128, first);
    std::ranges::fill(problem.v, 1.0F);
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << first);
      const Output<float> result = run(problem, Softmax{}, Full{}, {.scale = 1.0});
      for (const float average : result.out) CHECK(std::abs(average - 1) < 1e-5F);
      const double n = first < -726816 ? 128 * (1 + std::exp(-3.625)) : 128 * (1 + std::exp(-1.0));
      CHECK(std::abs(result.lse[0] - (std::max(first, -726816.0F) + std::log(n))) < 0.1);
      CHECK(std::abs(result.lse[39] - std::log(256.0)) < 1e-5);
    });
  }
}

}  // namespace attention_problem::attention_logits_test
