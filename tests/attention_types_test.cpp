// Attention over half and bfloat16: the result is that of the rounded inputs, computed in float and rounded once.

#include "attention_problem.hpp"
#include "test.hpp"

namespace attention_problem::attention_types_test {

constexpr std::array<Shape, 7> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {1, 1, 1, 1, 1, 1, 1},
    {2, 4, 2, 5, 300, 8, 5},
    {2, 4, 2, 61, 300, 9, 7},
    {1, 3, 1, 70, 33, 17, 33},
    {1, 2, 1, 1, 1100, 64, 48},
    {1, 1, 1, 20, 1100, 6, 3},
    {1, 2, 2, 3, 40, 576, 257},
}};

TEMPLATE_TEST_CASE("half and bfloat16 in and out", "[attention][types]", half, bfloat16) {
  using T = TestType;
  const std::vector<float> sinks{1, -2, 0, 3};
  for (const Shape& shape : shapes) {
    check_mask<T>(shape, Full{}, all_keys);
    check_mask<T>(shape, Causal{}, keys_before, {.sinks = for_heads_of(shape, sinks)});
  }
}

TEMPLATE_TEST_CASE("half and bfloat16 with rope, a predicate and a score", "[attention][types][bfloat16]",
                   half, bfloat16) {
  const ssmax::Rope<float> rope({.width = 8, .theta = 100}, 2000);
  const auto capped = [](auto z, const Query&, index_t) {
    using Z = decltype(z);
    return Z(2) * std::tanh(z / Z(2));
  };
  for (const Shape& shape : {shapes[1], shapes[2], shapes[4]}) {
    check_score(Problem<TestType>(shape), ssmax::Where(scattered), scattered, ssmax::Softcap(2), capped,
                {.scale = 0.4, .rope = &rope, .key_position = 5});
  }
}

/// Checks that inputs converted to float give the same result, apart from the last rounding.
TEMPLATE_TEST_CASE("half and bfloat16 results are float results rounded to nearest even",
                   "[attention][types]", half, bfloat16) {
  using T = TestType;
  for (const Shape& shape : shapes) {
    const Problem<T> narrow(shape);
    const Problem<float> wide(narrow);
    for_each_target_of<T>([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const Output<T> output = run(narrow, SSMax<float>{}, Causal{}, {.float_products = true});
      const Output<float> expected = run(wide, SSMax<float>{}, Causal{});
      std::vector<T> rounded;
      for (const float value : expected.out) rounded.push_back(T(value));
      CHECK(same_bits(output.out, rounded));
      CHECK(same_bits(output.lse, expected.lse));
    });
  }
}

TEST_CASE("half results round to subnormal numbers and infinity", "[attention][types]") {
  for_each_target([](const std::string& target) {
    for (const index_t queries : {1, 20}) {
      INFO(target << ' ' << queries);
      Problem<half> problem({1, 1, 1, queries, 3, 4, 4});
      // Subnormal values, the largest values, and a visible infinity.
      for (std::size_t key = 0; key < 3; ++key) {
        problem.v[key * 4] = half(0x3p-24F);
        problem.v[key * 4 + 1] = half(65504.0F);
        problem.v[key * 4 + 2] = half(-65504.0F);
        problem.v[key * 4 + 3] = half(infinity<float>);
      }
      const Output<half> output = run(problem, SSMax<float>{}, Full{});
      for (std::size_t row = 0; row < static_cast<std::size_t>(queries); ++row) {
        CHECK(static_cast<float>(output.out[row * 4]) == 0x3p-24F);
        CHECK(static_cast<float>(output.out[row * 4 + 1]) == 65504.0F);
        CHECK(static_cast<float>(output.out[row * 4 + 2]) == -65504.0F);
        CHECK(static_cast<float>(output.out[row * 4 + 3]) == infinity<float>);
      }
    }
  });
}

}  // namespace attention_problem::attention_types_test
