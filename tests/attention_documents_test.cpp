// Attention under masks that restart positions: packed documents and user masks. n, RoPE, ALiBi and scalings use
// positions in the document.

#include "attention_problem.hpp"
#include "documents_problem.hpp"
#include "test.hpp"

namespace attention_problem::attention_documents_test {

/// Shapes and documents that fill them; some have no query, no key or neither.
struct Case {
  Shape shape;
  std::vector<index_t> queries, keys;
};

const std::array<Case, 7> cases{{
    {{2, 4, 2, 61, 300, 8, 5}, {0, 61}, {0, 300}},
    {{1, 4, 2, 70, 70, 8, 5}, {0, 0, 1, 1, 34, 70, 70}, {0, 0, 1, 1, 34, 70, 70}},
    {{2, 2, 1, 61, 300, 6, 9}, {0, 1, 3, 61, 61}, {0, 100, 102, 260, 300}},
    {{1, 4, 2, 61, 300, 8, 5}, {0, 9, 9, 41, 61}, {0, 9, 150, 280, 300}},
    {{1, 2, 2, 7, 300, 8, 5}, {0, 2, 2, 7}, {0, 120, 129, 300}},
    {{1, 2, 2, 7, 9, 8, 5}, {0, 1, 2, 3, 4, 5, 6, 7}, {0, 1, 3, 4, 6, 7, 8, 9}},
    {{1, 1, 1, 40, 1200, 4, 3}, {0, 20, 40}, {0, 1023, 1200}},
}};

/// Documents with more queries than keys: the first queries precede the document and see no key.
const std::array<Case, 2> short_of_keys{{
    {{1, 2, 1, 50, 30, 8, 5}, {0, 20, 30, 50}, {0, 7, 30, 30}},
    {{1, 2, 1, 6, 5, 8, 5}, {0, 4, 6}, {0, 3, 5}},
}};

template <class T>
void check_documents(const Case& test) {
  for (const bool causal : {false, true}) {
    const Packed packed{test.queries, test.keys, causal};
    const auto sees = [&](const Query& query, index_t key) { return packed.sees(query, key); };
    check_mask<T>(test.shape, packed.mask(), sees, {}, packed.positions());
  }
}

TEST_CASE("queries attend to their own document, and n counts the keys in the document",
          "[attention][documents]") {
  for (const Case& test : cases) check_documents<float>(test);
  for (const Case& test : short_of_keys) check_documents<float>(test);
  check_documents<double>(cases[2]);
}

TEST_CASE("one list of documents for queries and keys", "[attention][documents]") {
  const Case& test = cases[1];
  const Packed packed{test.queries, test.keys, true};
  check_mask<float>(
      test.shape, Documents(test.queries, true),
      [&](const Query& query, index_t key) { return packed.sees(query, key); }, {}, packed.positions());
}

TEST_CASE("a window within documents", "[attention][documents]") {
  for (const Case& test : cases) {
    for (const index_t left : {0, 1, 20}) {
      const Packed packed{test.queries, test.keys, false};
      const auto sees = [&](const Query& query, index_t key) {
        const index_t distance = packed.position(key) - packed.position(query);
        return packed.sees(query, key) && distance >= -left && distance <= 2;
      };
      check_mask<float>(test.shape, packed.mask() & SlidingWindow{left, 2}, sees, {}, packed.positions());
    }
  }
}

TEST_CASE("RoPE rotates by positions in the document", "[attention][documents]") {
  for (const Case& test : cases) {
    const Packed packed{test.queries, test.keys, true};
    const auto sees = [&](const Query& query, index_t key) { return packed.sees(query, key); };
    const Rope<float> rope({.width = 4, .theta = 50}, 1300);
    check_mask<float>(test.shape, packed.mask(), sees, {.rope = &rope}, packed.positions());
    const Rope<float> later({.width = 4, .theta = 50, .pairing = ssmax::Pairing::interleaved}, 1300);
    check_mask<float>(test.shape, packed.mask(), sees, {.rope = &later, .key_position = 100},
                      packed.positions());
  }
}

TEST_CASE("ALiBi uses distances in the document", "[attention][documents]") {
  const std::vector<double> slopes = ssmax::Alibi::slopes(4);
  for (const Case& test : cases) {
    const Packed packed{test.queries, test.keys, false};
    const auto sees = [&](const Query& query, index_t key) { return packed.sees(query, key); };
    const auto of_heads = std::span(slopes).first(static_cast<std::size_t>(test.shape.heads));
    const auto formula = [&](auto z, const Query& query, index_t key) {
      using Z = decltype(z);
      return z + static_cast<Z>(slopes[static_cast<std::size_t>(query.head)]) *
                     static_cast<Z>(packed.position(key) - packed.position(query));
    };
    check_score<float>(Problem<float>(test.shape), packed.mask(), sees, ssmax::Alibi(of_heads), formula, {},
                       packed.positions());
  }
}

TEST_CASE("a scaling gets the position in the document", "[attention][documents]") {
  const auto scaling = [](const ssmax::Row& row) {
    return 0.4 + 0.01 * static_cast<double>(row.position) + 0.002 * static_cast<double>(row.n);
  };
  for (const Case& test : cases) {
    const Packed packed{test.queries, test.keys, true};
    const auto sees = [&](const Query& query, index_t key) { return packed.sees(query, key); };
    const Problem<float> problem(test.shape);
    const auto expected = expect(
        problem, sees,
        [&](index_t head, index_t position, index_t n) {
          return static_cast<Real>(scaling({head, position, n}));
        },
        {}, {}, packed.positions());
    for_each_target([&](const std::string& target) {
      Rules<float> rules;
      rules.take(run(problem, scaling, packed.mask()), expected, name_of(test.shape));
      rules.check(target);
    });
  }
}

// ---- Positions of user masks ------------------------------------------------------------------------------

/// Padding per batch entry and kv head. Positions begin after the padding.
struct PaddedHeads {
  static index_t padding(const Query& query) { return 3 * query.batch + 5 * (query.head / 2); }

  KeyRange keys(const Query& query) const { return {padding(query), query.position() + 1}; }
  index_t query_position(const Query& query) const { return query.position() - padding(query); }
  index_t key_position(const Query& query, index_t key) const { return key - padding(query); }
};

TEST_CASE("positions of a user mask can differ between heads", "[attention][documents]") {
  const Positions positions{
      [](const Query& query) { return PaddedHeads{}.query_position(query); },
      [](const Query& query, index_t key) { return PaddedHeads{}.key_position(query, key); }};
  const auto sees = [](const Query& query, index_t key) {
    return key >= PaddedHeads::padding(query) && key <= query.position();
  };
  for (const Shape& shape : {Shape{2, 4, 2, 6, 80, 8, 5}, Shape{2, 4, 2, 33, 80, 8, 5}}) {
    const Rope<float> rope({.width = 8, .theta = 50}, 200);
    check_mask<float>(shape, PaddedHeads{}, sees, {.rope = &rope, .key_position = 20}, positions);
  }
}

TEST_CASE("positions begin after left padding", "[attention][documents]") {
  const std::vector<std::int32_t> padding{7, 90};
  const auto first = [&](index_t batch) {
    return std::clamp<index_t>(padding[static_cast<std::size_t>(batch)], 0, 80);
  };
  const Positions positions{
      [&](const Query& query) { return std::max<index_t>(query.position() - first(query.batch), 0); },
      [&](const Query& query, index_t key) { return std::max<index_t>(key - first(query.batch), 0); }};
  const auto sees = [&](const Query& query, index_t key) {
    return key >= first(query.batch) && key <= query.position();
  };
  const ssmax::LeftPadding mask(padding);
  for (const Shape& shape : {Shape{2, 4, 2, 80, 80, 8, 5}, Shape{2, 4, 2, 5, 80, 8, 5}}) {
    const Rope<float> rope({.width = 8, .theta = 50}, 200);
    check_mask<float>(shape, mask, sees, {.rope = &rope}, positions);
  }
  CHECK(mask.query_position({.batch = 0, .index = 12, .shape = {.batch = 2, .queries = 80, .keys = 80}}) ==
        5);
  CHECK_THROWS_WITH(run(Problem<float>({3, 1, 1, 5, 80, 8, 5}), ssmax::Softmax{}, mask),
                    "ssmax::LeftPadding: padding has extent 2, batch entries are 3");
}

/// Positions that exceed a rope's tables in the last head only.
struct FarInTheLastHead {
  KeyRange keys(const Query& query) const { return {0, query.shape.keys}; }
  index_t query_position(const Query& query) const { return query.index + (query.head == 3 ? 30 : 0); }
  index_t key_position(const Query& query, index_t key) const { return key + (query.head / 2 == 1 ? 30 : 0); }
};

TEST_CASE("throws for positions beyond the rope in any head", "[attention][documents]") {
  const Rope<float> rope({.width = 8}, 100);
  for (const index_t queries : {3, 40}) {
    const Problem<float> problem({1, 4, 2, queries, 80, 8, 5});
    CHECK_THROWS_AS(run(problem, ssmax::Softmax{}, FarInTheLastHead{}, {.rope = &rope}),
                    std::invalid_argument);
  }
}

}  // namespace attention_problem::attention_documents_test
