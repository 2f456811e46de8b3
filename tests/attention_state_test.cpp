// attention_partial, merge and finish over any key ranges agree with attention over all keys, with n of the row.

#include "attention_problem.hpp"
#include "attention_state_problem.hpp"
#include "test.hpp"

namespace attention_problem::state_problem::attention_state_test {

/// Returns lists of range borders, with both ends: one range, block borders, next to block borders, elsewhere, and
/// empty ranges.
std::vector<std::vector<index_t>> cuts(index_t keys) {
  std::vector<std::vector<index_t>> result{
      {0, keys}, {0, 0, 1, 1, keys - 1, keys, keys}, {0, keys / 2, keys}};
  for (const index_t step : {7, 128, 129, 1024}) {
    if (keys / step > 50) continue;
    result.push_back({});
    for (index_t at = 0; at < keys; at += step) result.back().push_back(at);
    result.back().push_back(keys);
  }
  return result;
}

/// Checks that states over any key ranges, merged in order, are as accurate as one call.
template <class T, class M, class C = Identity>
void check_cuts(const Shape& shape, const M& mask, const Visible& visible, const C& score = {},
                const reference::Formula& formula = {}, const AttentionOptions<T>& options = {}) {
  const FourHeads<T> heads(shape.heads);
  const Problem<T> problem(shape);
  const Expected<T> expected = expect(problem, visible, heads.multiplier(), options, formula);
  const std::vector<T> sinks(options.sinks.begin(), options.sinks.end());
  for_each_target_of<T>([&](const std::string& target) {
    Rules<T> rules;
    for (const std::vector<index_t>& cut : cuts(shape.keys)) {
      State<T> state = partial(problem, cut[0], cut[1], heads.scaling(), mask, score, options);
      for (std::size_t i = 1; i + 1 < cut.size(); ++i) {
        State<T> next = partial(problem, cut[i], cut[i + 1], heads.scaling(), mask, score, options);
        ssmax::merge<T>(state.view(), next.view());
      }
      rules.take(finished(state, sinks), expected,
                 name_of(shape) + "in " + std::to_string(cut.size() - 1) + " parts");
    }
    rules.check(target);
  });
}

bool is_picked(const Query& query, index_t key) {
  return query.index % 5 != 4 && (query.index * 7919 + key * 104729) % 7 < 3;
}

TEST_CASE("states over any key ranges merge to attention over all keys, with n of all keys",
          "[attention][state][slow]") {
  for (const Shape& shape : shapes) {
    check_cuts<float>(shape, Full{}, all_keys);
    check_cuts<float>(shape, Causal{}, keys_before);
    check_cuts<double>(shape, Causal{}, keys_before);
  }
}

TEST_CASE("states over any key ranges: windows, predicates and documents", "[attention][state][slow]") {
  for (const Shape& shape : shapes) {
    check_cuts<float>(shape, SlidingWindow(20, 1), [](const Query& query, index_t key) {
      return key >= query.position() - 20 && key <= query.position() + 1;
    });
    check_cuts<float>(shape, ssmax::Where(is_picked), is_picked);
    const std::vector<index_t> queries{0, 1, shape.queries}, keys{0, 2, shape.keys};
    check_cuts<float>(shape, ssmax::Documents(queries, keys, false),
                      [](const Query& query, index_t key) { return (query.index < 1) == (key < 2); });
  }
}

TEST_CASE("states over any key ranges: rope, scores and sinks", "[attention][state]") {
  const std::vector<float> sinks{1, -2, 0, 3};
  const ssmax::Rope<float> rope({.width = 4, .theta = 100}, 2200);
  const std::vector<double> slopes = ssmax::Alibi::slopes(4);
  const auto formula = [&](auto z, const Query& query, index_t key) {
    using Z = decltype(z);
    return Z(3) * std::tanh(z / Z(3)) + static_cast<Z>(slopes[static_cast<std::size_t>(query.head)]) *
                                            static_cast<Z>(key - query.position());
  };
  for (const Shape& shape : shapes) {
    const auto heads = std::span(slopes).first(static_cast<std::size_t>(shape.heads));
    check_cuts<float>(shape, Causal{}, keys_before, ssmax::Softcap(3) | ssmax::Alibi(heads), formula,
                      {.rope = &rope, .key_position = 50, .sinks = for_heads_of(shape, sinks)});
  }
}

TEST_CASE("a matrix mask has the extent of all keys, not of the key range", "[attention][state][slow]") {
  for (const Shape& shape : shapes) {
    std::vector<char> storage(static_cast<std::size_t>(shape.queries * shape.keys));
    for (std::size_t i = 0; i < storage.size(); ++i) storage[i] = i * i % 13 < 6 ? 1 : 0;
    const bool* const bools = reinterpret_cast<const bool*>(storage.data());
    const View<const bool, 4> matrix(bools, {shape.batch, shape.heads, shape.queries, shape.keys},
                                     {0, 0, shape.keys, 1});
    check_cuts<float>(shape, ssmax::MatrixMask(matrix),
                      [&](const Query& query, index_t key) { return bools[query.index * shape.keys + key]; });
  }
}

TEST_CASE("finish of one state over all keys is bit-identical to attention", "[attention][state]") {
  const std::vector<float> of_four{1, -2, 0, 3};
  for (const Shape& shape : shapes) {
    const FourHeads<float> heads(shape.heads);
    const std::vector<float> sinks(of_four.begin(), of_four.begin() + shape.heads);
    const Problem<float> problem(shape);
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const State<float> state = partial(problem, 0, shape.keys, heads.scaling(), Causal{});
      CHECK(finished(state) == run(problem, heads.scaling(), Causal{}));
      CHECK(finished(state, sinks) == run(problem, heads.scaling(), Causal{}, {.sinks = sinks}));
    });
  }
}

TEST_CASE("half and bfloat16 have states of float", "[attention][state]") {
  for (const Shape& shape : shapes) {
    const FourHeads<float> heads(shape.heads);
    const Problem<ssmax::half> narrow(shape);
    const Problem<float> wide(narrow);
    for_each_target_of<ssmax::bfloat16>([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const index_t half_way = shape.keys / 2;
      CHECK(partial(narrow, half_way, shape.keys, heads.scaling(), Causal{}) ==
            partial(wide, half_way, shape.keys, heads.scaling(), Causal{}));
    });
  }
}

}  // namespace attention_problem::state_problem::attention_state_test
