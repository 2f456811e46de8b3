// Attention's backward against long double and the naive loops in the same precision, on every target: shapes
// around the borders of its blocks, element types, scalings, the scale and rope.

#include "attention_backward_problem.hpp"
#include "own_policies.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem::attention_backward_test {

using own_policies::Everything;

// ---- Shapes and types -------------------------------------------------------------------------------------

constexpr std::array<Shape, 16> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {1, 1, 1, 1, 1, 1, 1},
    {1, 2, 1, 2, 2, 2, 2},
    {1, 4, 4, 1, 2, 1, 3},
    {1, 4, 1, 2, 1, 3, 1},
    {2, 4, 2, 5, 300, 8, 5},
    {2, 4, 2, 31, 130, 9, 24},
    {1, 4, 1, 70, 33, 8, 9},  // queries without visible keys under the causal mask
    {1, 2, 2, 33, 257, 65, 1},
    {1, 1, 1, 70, 300, 7, 65},
    {1, 1, 1, 32, 256, 64, 64},
    {3, 3, 1, 2, 129, 3, 1},
    {1, 3, 1, 31, 37, 17, 13},
    {1, 1, 1, 20, 41, 128, 96},
    {1, 4, 1, 1, 1, 16, 16},
    {1, 1, 1, 53, 53, 5, 7},
    {2, 2, 1, 5, 0, 3, 8},  // no keys
}};

template <class T>
void check_shapes() {
  for (const Shape& shape : shapes) {
    check(Problem<T>(shape), Full{}, all_keys);
    check(Problem<T>(shape, 1, Dlse::left_out), Causal{}, keys_before);
    check(Problem<T>(shape), Causal{}, keys_before);
  }
}

TEMPLATE_TEST_CASE("gradients are as accurate as naive loops", "[attention][backward][slow]", float, double,
                   half) {
  check_shapes<TestType>();
}
TEST_CASE("gradients are as accurate as naive loops: bfloat16", "[attention][backward][bfloat16][slow]") {
  check_shapes<bfloat16>();
}

constexpr std::array<index_t, 24> lengths{47,  48,  49,  63,  64,  65,  127, 128, 129, 159,  160,  161,
                                          239, 240, 241, 479, 480, 481, 511, 512, 513, 1023, 1024, 1025};

TEST_CASE("lengths around the sizes of blocks: few queries, many keys", "[attention][backward][slow]") {
  for (const index_t n : lengths) {
    check(Problem<float>({2, 4, 2, 1, n, 4, 3}), Full{}, all_keys);
    check(Problem<float>({1, 2, 1, 17, n, 4, 3}), Causal{}, keys_before);
  }
}

TEST_CASE("lengths around the sizes of blocks: many queries, few keys", "[attention][backward][slow]") {
  for (const index_t n : lengths) {
    check(Problem<float>({1, 1, 1, n, 17, 4, 3}), Full{}, all_keys);
    check(Problem<float>({1, 3, 1, n, 50, 4, 3}), Causal{}, keys_before);
  }
}

TEST_CASE("lengths around the sizes of blocks: as many queries as keys", "[attention][backward][slow]") {
  for (const index_t n : lengths) {
    if (n < 500) check(Problem<float>({1, 1, 1, n, n, 4, 3}), Causal{}, keys_before);
    if (n < 250) check(Problem<double>({1, 1, 1, n, n, 3, 4}), Causal{}, keys_before);
  }
  check(Problem<float>({1, 1, 1, 513, 513, 4, 3}), Causal{}, keys_before);
  check(Problem<float>({1, 1, 1, 600, 1100, 2, 2}), Causal{}, keys_before);
}

TEST_CASE("widths around the sizes of vectors and blocks", "[attention][backward][slow]") {
  for (const index_t n :
       {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 240, 257}) {
    check(Problem<float>({1, 2, 1, 20, 37, n, 5}), Causal{}, keys_before);
    check(Problem<float>({1, 2, 1, 20, 37, 5, n}), Causal{}, keys_before);
    check(Problem<double>({1, 1, 1, 18, 19, n, n}), Full{}, all_keys);
  }
}

/// Checks that inputs converted to float give the same result, apart from the last rounding.
TEMPLATE_TEST_CASE("gradients of half and bfloat16 are the float gradients rounded once",
                   "[attention][backward]", half, bfloat16) {
  using T = TestType;
  for (const Shape& shape : shapes) {
    const Problem<T> narrow(shape);
    const Problem<float> wide(narrow);
    const auto rounded = [](const std::vector<float>& values) {
      std::vector<T> result;
      for (const float value : values) result.push_back(T(value));
      return result;
    };
    for_each_target_of<T>([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const AttentionOptions<T> in_float{.float_products = true};
      const Output<T> output = run(narrow, SSMax<float>{}, Causal{}, in_float);
      Output<float> widened(shape);
      widened.out.assign(output.out.begin(), output.out.end());
      widened.lse = output.lse;
      const auto result = backward(narrow, output, SSMax<float>{}, Causal{}, ssmax::Identity{}, in_float);
      const auto expected = backward(wide, widened, SSMax<float>{}, Causal{});
      CHECK(same_bits(result.dq, rounded(expected.dq)));
      CHECK(same_bits(result.dk, rounded(expected.dk)));
      CHECK(same_bits(result.dv, rounded(expected.dv)));
    });
  }
}

TEST_CASE("backward without a score, mask or scaling, and on empty inputs", "[attention][backward]") {
  for (const Shape& shape : {Shape{0, 2, 1, 3, 4, 8, 5}, {1, 2, 1, 0, 4, 8, 5}, {1, 0, 0, 3, 4, 8, 5}}) {
    INFO(name_of(shape));
    const Problem<float> problem(shape);
    const Result<float> result = run_backward(problem, Softmax{}, Causal{});
    CHECK(std::ranges::all_of(result.dk, [](float x) { return same_bits(x, 0.0F); }));
    CHECK(std::ranges::all_of(result.dv, [](float x) { return same_bits(x, 0.0F); }));
  }
  const Shape s{1, 2, 1, 3, 9, 4, 5};
  const Problem<float> problem(s, 1, Dlse::left_out);
  const Output<float> output = run(problem, Softmax{}, Full{});
  const Result<float> expected = run_backward(problem, Softmax{}, Full{});
  Result<float> result(problem);
  ssmax::attention_backward(backward_arguments_of(problem, output), gradients_to(problem, result));
  CHECK(result == expected);
}

TEST_CASE("keys are not rotated if there are no query heads", "[attention][backward]") {
  const std::vector<index_t> offsets{0, 5};
  const ssmax::Rope<float> rope({.width = 4}, 2);  // too wide and too short for the call
  const Problem<float> problem(Shape{1, 0, 1, 5, 5, 2, 3});
  std::vector<float> dk(10, -1.0F), dv(15, -1.0F);
  ssmax::attention_backward({.q = problem.q_view(),
                             .k = problem.k_view(),
                             .v = problem.v_view(),
                             .out = {nullptr, {1, 0, 5, 3}},
                             .lse = {nullptr, {1, 0, 5}},
                             .rope = &rope},
                            {.dout = {nullptr, {1, 0, 5, 3}},
                             .dq = {nullptr, {1, 0, 5, 2}},
                             .dk = {dk.data(), {1, 1, 5, 2}},
                             .dv = {dv.data(), {1, 1, 5, 3}}},
                            ssmax::Documents(offsets, true));
  CHECK(std::ranges::all_of(dk, [](float x) { return same_bits(x, 0.0F); }));
  CHECK(std::ranges::all_of(dv, [](float x) { return same_bits(x, 0.0F); }));
}

TEST_CASE("queries and values without channels", "[attention][backward]") {
  for_each_target([](const std::string& target) {
    const Problem<float> no_width({1, 2, 1, 20, 30, 0, 3});
    const Problem<float> no_values({1, 2, 1, 20, 30, 4, 0});
    Rules<float> rules;
    rules.run(no_width, expect(no_width, keys_before, one, {.scale = 1.0}), Softmax{}, Causal{},
              {.scale = 1.0});
    rules.run(no_values, expect(no_values, keys_before, one), Softmax{}, Causal{});
    rules.check(target);
  });
}

// ---- Scalings and options ---------------------------------------------------------------------------------

constexpr std::array<Shape, 3> middle{
    {{1, 4, 2, 33, 270, 8, 6}, {2, 4, 1, 3, 50, 8, 6}, {1, 4, 4, 50, 29, 8, 6}}};

template <class T, class S>
void check_scaling(const S& scaling, const Multiplier& multiplier, const AttentionOptions<T>& options = {}) {
  for (const Shape& shape : middle) {
    const Problem<T> problem(shape);
    const auto full = expect(problem, all_keys, multiplier, options);
    const auto causal = expect(problem, keys_before, multiplier, options);
    for_each_target_of<T>([&](const std::string& target) {
      Rules<T> rules;
      rules.run(problem, full, scaling, Full{}, options);
      rules.run(problem, causal, scaling, Causal{}, options);
      rules.check(target);
    });
  }
}

TEMPLATE_TEST_CASE("gradients under every scaling", "[attention][backward]", float, double) {
  using T = TestType;
  const auto all = [](double c) { return [c](index_t, index_t, index_t) { return static_cast<Real>(c); }; };
  SECTION("one") { check_scaling<T>(Softmax{}, one); }
  SECTION("negative") { check_scaling<T>(Constant{-1.5}, all(-1.5)); }
  SECTION("zero") { check_scaling<T>(Constant{0}, all(0)); }
  SECTION("ln n") {
    check_scaling<T>(ssmax::LogN{},
                     [](index_t, index_t, index_t n) { return std::log(static_cast<Real>(n)); });
  }
  SECTION("SSMax with one s and b, without gradients") {
    check_scaling<T>(SSMax<T>{T(-0.5), T(0.25)}, [](index_t, index_t, index_t n) {
      return Real(0.25) - std::log(static_cast<Real>(n)) / 2;
    });
  }
  SECTION("head, position of the last visible key, and n") {
    check_scaling<T>(Everything{}, [](index_t head, index_t position, index_t n) {
      return static_cast<Real>(Everything{}({head, position, n}));
    });
  }
  SECTION("the scale, and a lambda as the scaling") {
    for (const double scale : {0.7, -0.3, 0.0}) {
      check_scaling<T>([](const ssmax::Row&) { return 1.5; }, all(1.5), {.scale = scale});
    }
  }
}

TEST_CASE("one s and b for all heads with gradients per head", "[attention][backward]") {
  for (const Shape& shape : middle) {
    const Problem<double> problem(shape);
    const auto expected = expect(problem, keys_before, [](index_t, index_t, index_t n) {
      return Real(0.5) * std::log(static_cast<Real>(n)) + Real(0.25);
    });
    for_each_target([&](const std::string& target) {
      // db is omitted, and ds holds old values.
      std::vector<double> ds{1, 2, 3, 4};
      Rules<double> rules;
      const auto got = rules.run(problem, expected, SSMax<double>{0.5, 0.25}.gradient(ds), Causal{});
      for (std::size_t head = 0; head < 4; ++head) ds[head] -= static_cast<double>(head + 1);
      rules.take(
          ds, got, [&](const auto& g) { return per_head(g, shape, ln); }, "ds");
      rules.check(target);
    });
  }
}

TEMPLATE_TEST_CASE("SizeTable gets its gradient", "[attention][backward]", float, double) {
  using T = TestType;
  const std::vector<T> p = reference::normals<T>(300, 8), s{T(0.5), T(-1), T(0), T(0.75)},
                       b{T(1), T(0), T(0.5), T(-0.25)};
  for (const Shape& shape : middle) {
    const Problem<T> problem(shape);
    const auto of = [](const std::vector<T>& values, index_t i) {
      return Real(values[static_cast<std::size_t>(i)]);
    };
    const auto expected = expect(problem, keys_before, [&](index_t head, index_t, index_t n) {
      return of(s, head) * of(p, n - 1) + of(b, head);
    });
    const auto dp_of = [&](const auto& gradients) {
      std::remove_cvref_t<decltype(gradients.dc)> sums;
      for (std::size_t row = 0; row < gradients.n.size(); ++row) {
        const index_t n = gradients.n[row], head = static_cast<index_t>(row) / shape.queries % shape.heads;
        if (n == 0) continue;
        const auto by = s[static_cast<std::size_t>(head)];
        sums.add(static_cast<std::size_t>(n - 1), by * gradients.dc.values[row],
                 std::abs(by) * gradients.dc.sizes[row]);
      }
      return sums;
    };
    for_each_target_of<T>([&](const std::string& target) {
      std::vector<T> dp(p.size()), ds(4), db(4);
      Rules<T> rules;
      const auto got =
          rules.run(problem, expected, ssmax::SizeTable<T>{p, s, b}.gradient(dp, ds, db), Causal{});
      const auto p_of = [&](index_t n) { return of(p, n - 1); };
      rules.take(dp, got, dp_of, "dp");
      rules.take(
          ds, got, [&](const auto& g) { return per_head(g, shape, p_of); }, "ds");
      rules.take(
          db, got, [&](const auto& g) { return per_head(g, shape, unweighted); }, "db");
      rules.check(target);
    });
  }
}

// ---- Rope -------------------------------------------------------------------------------------------------

template <class T>
void check_rope(const Shape& shape, const ssmax::RopeOptions& rope_options, index_t key_position) {
  const Rope<Compute<T>> rope(rope_options, shape.keys + 50);
  check(Problem<T>(shape), Causal{}, keys_before, ssmax::Identity{}, {},
        {.rope = &rope, .key_position = key_position});
}

TEMPLATE_TEST_CASE("dq and dk are the gradients before rotation", "[attention][backward][bfloat16]", float,
                   double, half, bfloat16) {
  using T = TestType;
  check_rope<T>({2, 4, 2, 40, 130, 16, 8}, {.width = 16}, 0);
  check_rope<T>({1, 2, 1, 1, 257, 64, 8}, {.width = 32, .first_position = 1000}, 1050);
  check_rope<T>({1, 2, 1, 33, 130, 10, 3}, {.width = 10, .pairing = Pairing::interleaved}, 50);
  check_rope<T>({1, 1, 1, 40, 33, 9, 3}, {.width = 6, .pairing = Pairing::interleaved}, 7);
  check_rope<T>({1, 4, 1, 3, 7, 5, 3}, {.width = 2}, 1);
}

}  // namespace attention_problem::backward_problem::attention_backward_test
