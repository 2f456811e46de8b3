// Attention against the long double reference and a naive loop in the same precision, on every target: shapes
// around the borders of its blocks, scalings, options, RoPE, and masks of lengths.

#include "attention_problem.hpp"
#include "own_policies.hpp"
#include "test.hpp"

namespace attention_problem::attention_test {

using own_policies::Everything;

// ---- Shapes -----------------------------------------------------------------------------------------------

constexpr std::array<Shape, 13> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {1, 1, 1, 1, 1, 1, 1},
    {1, 4, 1, 1, 600, 64, 65},
    {1, 2, 1, 31, 255, 3, 8},
    {1, 4, 2, 32, 256, 8, 3},
    {1, 2, 2, 33, 257, 65, 1},
    {1, 1, 1, 70, 600, 8, 65},
    {1, 1, 1, 32, 257, 64, 64},
    {2, 4, 1, 33, 31, 1, 64},
    {2, 4, 2, 70, 33, 8, 65},  // more than one block of queries without visible keys
    {2, 2, 1, 5, 0, 3, 8},     // no keys
    {1, 2, 1, 70, 1, 65, 3},
    {3, 1, 1, 2, 513, 3, 1},
    {1, 2, 1, 257, 257, 3, 3},
}};

template <class T, class M>
void check_shapes(const M& mask, const Visible& visible) {
  std::vector<Problem<T>> problems;
  std::vector<Expected<T>> expected;
  for (const Shape& shape : shapes) {
    problems.emplace_back(shape);
    expected.push_back(expect(problems.back(), visible, one));
  }
  for_each_target([&](const std::string& target) {
    Rules<T> rules;
    for (std::size_t i = 0; i < problems.size(); ++i) {
      rules.take(run(problems[i], Softmax{}, mask), expected[i], name_of(problems[i].shape));
    }
    rules.check(target);
  });
}

TEMPLATE_TEST_CASE("attention is as accurate as a naive loop, full", "[attention]", float, double) {
  check_shapes<TestType>(Full{}, all_keys);
}
TEMPLATE_TEST_CASE("attention is as accurate as a naive loop, causal", "[attention]", float, double) {
  check_shapes<TestType>(Causal{}, keys_before);
}

TEST_CASE("for queries without visible keys, out is 0 and lse is -inf", "[attention]") {
  for_each_target([](const std::string&) {
    const Problem<float> causal({2, 2, 1, 70, 30, 8, 5});
    const Output<float> output = run(causal, Softmax{}, Causal{});
    bool zero = true, minus_infinity = true, others = true;
    for (std::size_t row = 0; row < output.lse.size(); ++row) {
      const bool sees = row % 70 >= 40;
      if (!sees)
        minus_infinity = minus_infinity && output.lse[row] == -std::numeric_limits<float>::infinity();
      if (sees) others = others && std::isfinite(output.lse[row]);
      for (std::size_t i = 0; i < 5; ++i) {
        const float value = output.out[row * 5 + i];
        if (!sees) zero = zero && value == 0;
        if (sees) others = others && value != 0 && std::isfinite(value);
      }
    }
    CHECK(zero);
    CHECK(minus_infinity);
    CHECK(others);
    const Output<float> none = run(Problem<float>({1, 2, 1, 3, 0, 8, 5}), SSMax<float>{2.F}, Full{});
    CHECK(none.out == std::vector<float>(30, 0.F));
    CHECK(none.lse == std::vector<float>(6, -std::numeric_limits<float>::infinity()));
  });
}

TEST_CASE("attention accepts empty inputs", "[attention]") {
  CHECK(run(Problem<float>({0, 2, 1, 3, 4, 8, 5}), Softmax{}, Full{}).out.empty());
  CHECK(run(Problem<float>({1, 2, 1, 0, 4, 8, 5}), Softmax{}, Causal{}).out.empty());
  CHECK(run(Problem<float>({1, 0, 0, 3, 4, 8, 5}), Softmax{}, Causal{}).out.empty());
}

TEST_CASE("attention accepts a width of 0 for values and for queries", "[attention]") {
  const Output<float> no_values = run(Problem<float>({1, 2, 1, 3, 300, 8, 0}), Softmax{}, Causal{});
  const Output<float> values = run(Problem<float>({1, 2, 1, 3, 300, 8, 2}), Softmax{}, Causal{});
  CHECK(no_values.lse == values.lse);
  const Output<float> no_channels = run(Problem<float>({1, 1, 1, 2, 300, 0, 2}), Softmax{}, Full{});
  CHECK(std::abs(no_channels.lse[1] - std::log(300.F)) <= 1e-6F);
}

TEST_CASE("a few queries on many keys", "[attention]") {
  const Problem<float> problem({1, 1, 1, 3, 20'000, 16, 8});
  const Expected<float> expected = expect(problem, keys_before, one);
  for_each_target([&](const std::string& target) {
    Rules<float> rules;
    rules.take(run(problem, Softmax{}, Causal{}), expected, "20000 keys");
    rules.check(target);
  });
}

// ---- Scalings and options ---------------------------------------------------------------------------------

constexpr Shape middle{1, 4, 2, 33, 270, 8, 6};

template <class T, class S>
void check_scaling(const S& scaling, const Multiplier& multiplier, double deviation = 1,
                   const AttentionOptions<T>& options = {}) {
  const Problem<T> problem(middle, deviation);
  const Expected<T> full = expect(problem, all_keys, multiplier, options);
  const Expected<T> causal = expect(problem, keys_before, multiplier, options);
  for_each_target([&](const std::string& target) {
    Rules<T> rules;
    rules.take(run(problem, scaling, Full{}, options), full, "full");
    rules.take(run(problem, scaling, Causal{}, options), causal, "causal");
    rules.check(target);
  });
}

TEMPLATE_TEST_CASE("scalings multiply the logits of attention", "[attention]", float, double) {
  using T = TestType;
  const auto at = [](const std::vector<T>& values, index_t i) {
    return Real(values[static_cast<std::size_t>(i)]);
  };
  const auto ln = [](index_t n) { return std::log(static_cast<Real>(n)); };
  const std::vector<T> s{T(0.43), T(1), T(-0.2), T(0)}, b{T(0.1), T(0), T(-0.5), T(0.7)};
  SECTION("SSMax, per head, with b; the third head's multiplier is negative") {
    check_scaling<T>(SSMax<T>{s, b},
                     [&](index_t h, index_t, index_t n) { return at(s, h) * ln(n) + at(b, h); });
  }
  SECTION("SSMax, one s") {
    check_scaling<T>(SSMax<T>{T(0.43)}, [&](index_t, index_t, index_t n) { return Real(T(0.43)) * ln(n); });
  }
  SECTION("SSMax, negative") {
    check_scaling<T>(SSMax<T>{T(-1)}, [&](index_t, index_t, index_t n) { return -ln(n); });
  }
  SECTION("zero") {
    check_scaling<T>(Constant{0}, [](index_t, index_t, index_t) { return Real(0); });
  }
  SECTION("SizeTable") {
    const std::vector<T> p = reference::normals<T>(300, 8);
    check_scaling<T>(ssmax::SizeTable<T>{p, T(0.5), T(1)},
                     [&](index_t, index_t, index_t n) { return Real(0.5) * at(p, n - 1) + 1; });
  }
  SECTION("large logits, multiplied by a thousand") {
    check_scaling<T>(
        Constant{1e3}, [](index_t, index_t, index_t) { return Real(1000); }, 4);
  }
  SECTION("logits of a million and more") {
    check_scaling<T>(
        Constant{1e3}, [](index_t, index_t, index_t) { return Real(1000); }, 40);
  }
  SECTION("head, position of the query, and n") {
    check_scaling<T>(Everything{}, [](index_t head, index_t position, index_t n) {
      return static_cast<Real>(Everything{}({head, position, n}));
    });
  }
  SECTION("the scale, and a lambda as the scaling") {
    for (const double scale : {0.7, -0.3, 0.0}) {
      check_scaling<T>([](const ssmax::Row&) { return 1.5; },
                       [](index_t, index_t, index_t) { return Real(1.5); }, 1, {.scale = scale});
    }
  }
}

template <class T>
void check_rope(const Shape& shape, const ssmax::RopeOptions& rope_options, index_t key_position) {
  const Rope<T> rope(rope_options, shape.keys + 50);
  const AttentionOptions<T> options{.rope = &rope, .key_position = key_position};
  const Problem<T> problem(shape);
  const Expected<T> expected = expect(problem, keys_before, one, options);
  for_each_target([&](const std::string& target) {
    Rules<T> rules;
    rules.take(run(problem, Softmax{}, Causal{}, options), expected, name_of(shape));
    rules.check(target);
  });
}

TEMPLATE_TEST_CASE("attention rotates queries and keys by their positions", "[attention]", float, double) {
  using T = TestType;
  check_rope<T>({2, 4, 2, 40, 300, 16, 8}, {.width = 16}, 0);
  check_rope<T>({1, 2, 1, 1, 257, 64, 8}, {.width = 32, .first_position = 1000}, 1050);
  check_rope<T>({1, 2, 1, 33, 300, 10, 3}, {.width = 10, .pairing = ssmax::Pairing::interleaved}, 50);
  check_rope<T>({1, 1, 1, 40, 33, 9, 3}, {.width = 6, .pairing = ssmax::Pairing::interleaved}, 7);
}

// ---- Masks ------------------------------------------------------------------------------------------------

/// Ranges that begin and end anywhere, another for every batch, head and query, and some empty.
struct Anywhere {
  KeyRange keys(const Query& query) const {
    const index_t number = (query.batch * query.shape.heads + query.head) * query.shape.queries + query.index;
    if (number % 7 == 3) return {number % 5, number % 5};
    const index_t begin = number * 31 % query.shape.keys;
    return {begin, std::min(query.shape.keys, begin + 1 + number * 53 % 400)};
  }
};

TEMPLATE_TEST_CASE("Lengths and a user mask mask keys, and n counts the visible keys", "[attention]", float,
                   double) {
  using T = TestType;
  const Shape shape{2, 4, 2, 40, 600, 8, 5};
  const Problem<T> problem(shape);
  std::vector<index_t> lengths, given;
  for (index_t row = 0; row < problem.rows(); ++row) {
    lengths.push_back(row % 9 == 4 ? 0 : row * 37 % 600 + 1);
    given.push_back(lengths.back() == 0 ? -5 : lengths.back() == 600 ? 700 : lengths.back());
  }
  const auto first_keys = [&](const Query& query) {
    const index_t row = (query.batch * shape.heads + query.head) * shape.queries + query.index;
    return KeyRange{0, lengths[static_cast<std::size_t>(row)]};
  };
  const auto multiplier = [](index_t, index_t, index_t n) { return std::log(static_cast<Real>(n)); };
  const Expected<T> ragged = expect(problem, first_keys, multiplier);
  const auto anywhere = [](const Query& query) { return Anywhere{}.keys(query); };
  const Expected<T> own = expect(problem, anywhere, multiplier);
  for_each_target([&](const std::string& target) {
    Rules<T> rules;
    rules.take(run(problem, SSMax<T>{}, Lengths{lengths}), ragged, "lengths");
    rules.take(run(problem, SSMax<T>{}, Lengths{given}), ragged, "lengths outside of the keys");
    rules.take(run(problem, SSMax<T>{}, Anywhere{}), own, "own mask");
    rules.check(target);
  });
}

}  // namespace attention_problem::attention_test
