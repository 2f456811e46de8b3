// Heads of many widths from 1 to 576, values of other widths, and shapes from the tests of other libraries.

#include "attention_problem.hpp"
#include "test.hpp"

namespace attention_problem::attention_widths_test {

template <class T, class M>
void check_shapes(const std::vector<Shape>& shapes, const M& mask, const Visible& visible) {
  std::vector<Problem<T>> problems;
  std::vector<Expected<T>> expected;
  for (const Shape& shape : shapes) {
    problems.emplace_back(shape);
    expected.push_back(expect(problems.back(), visible, one));
  }
  for_each_target([&](const std::string& target) {
    for (std::size_t i = 0; i < problems.size(); ++i) {
      INFO(target << ' ' << name_of(problems[i].shape));
      Averages<T> averages;
      averages.take(run(problems[i], Softmax{}, mask), expected[i]);
      averages.check();
    }
  });
}

/// Returns every width up to slightly more than two of the largest vectors, then widths around later borders.
std::vector<index_t> widths() {
  std::vector<index_t> result;
  for (index_t width = 1; width <= 36; ++width) result.push_back(width);
  for (const index_t width : {40,  47,  48,  63,  64,  65,  72,  80,  96,  100, 112,
                              127, 128, 129, 160, 192, 251, 256, 257, 320, 512, 576}) {
    result.push_back(width);
  }
  return result;
}

template <class T>
void check_widths(index_t queries, index_t keys) {
  std::vector<Shape> shapes;
  for (const index_t width : widths()) {
    shapes.push_back({1, 1, 1, queries, keys, width, 3});
    shapes.push_back({1, 1, 1, queries, keys, 3, width});
  }
  check_shapes<T>(shapes, Causal{}, keys_before);
}

TEST_CASE("every width, few queries", "[attention][widths]") {
  check_widths<float>(3, 37);
  check_widths<double>(3, 37);
}

TEST_CASE("every width, many queries", "[attention][widths]") {
  check_widths<float>(18, 37);
  check_widths<double>(18, 37);
}

TEST_CASE("every small number of queries and keys", "[attention][widths]") {
  std::vector<Shape> shapes;
  for (index_t queries = 1; queries <= 35; ++queries) {
    for (const index_t keys : {1, 2, 3, 7, 16, 17, 31}) shapes.push_back({1, 1, 1, queries, keys, 5, 3});
  }
  check_shapes<float>(shapes, Causal{}, keys_before);
  check_shapes<double>(shapes, Full{}, all_keys);
}

TEST_CASE("every number of heads for a kv head", "[attention][widths]") {
  std::vector<Shape> shapes;
  for (const index_t kv_heads : {1, 2, 3}) {
    for (const index_t group : {1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 20}) {
      for (const index_t queries : {1, 2, 4}) {
        shapes.push_back({2, kv_heads * group, kv_heads, queries, 29, 7, 6});
      }
    }
  }
  check_shapes<float>(shapes, Causal{}, keys_before);
}

TEST_CASE("keys around the borders of blocks and chunks", "[attention][widths]") {
  std::vector<Shape> shapes;
  for (const index_t keys : {127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 2049}) {
    for (const index_t queries : {1, 17}) shapes.push_back({1, 1, 1, queries, keys, 3, 2});
  }
  check_shapes<float>(shapes, Causal{}, keys_before);
  check_shapes<float>(shapes, Full{}, all_keys);
}

TEST_CASE("shapes of ggml's tests, with their softcap and ALiBi", "[attention][widths]") {
  const std::vector<std::array<index_t, 2>> head_widths{{40, 40},   {64, 64},   {72, 72},   {80, 80},
                                                        {96, 96},   {128, 128}, {192, 128}, {192, 192},
                                                        {256, 256}, {576, 512}};
  std::size_t next = 0;
  for (const auto& [d, dv] : head_widths) {
    // Cycles through keys, queries and heads per kv head.
    const std::array<index_t, 3> keys{113, 256, 64}, groups{1, 4, 3};
    const std::array<index_t, 4> queries{1, 3, 35, 7};
    const index_t group = groups[next % 3];
    const Shape shape{1, group, 1, queries[next % 4], keys[(next + 1) % 3], d, dv};
    ++next;
    const std::vector<double> slopes = ssmax::Alibi::slopes(group);
    const auto formula = [&](auto z, const Query& query, index_t key) {
      using Z = decltype(z);
      return Z(10) * std::tanh(z / Z(10)) + static_cast<Z>(slopes[static_cast<std::size_t>(query.head)]) *
                                                static_cast<Z>(key - query.position());
    };
    check_score(Problem<float>(shape), Causal{}, keys_before, ssmax::Softcap(10) | ssmax::Alibi(slopes),
                formula);
    check_shapes<float>({shape}, Full{}, all_keys);
  }
}

}  // namespace attention_problem::attention_widths_test
