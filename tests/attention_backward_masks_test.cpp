// Attention's backward under every mask: masked keys get gradient 0, and ds uses the number n of visible keys.

#include "attention_backward_problem.hpp"
#include "documents_problem.hpp"
#include "own_policies.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem::attention_backward_masks_test {

constexpr index_t unlimited = std::numeric_limits<index_t>::max();

constexpr std::array<Shape, 6> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 5, 150, 8, 5},
    {2, 4, 2, 33, 131, 9, 6},
    {2, 3, 1, 70, 33, 8, 9},
    {2, 2, 2, 7, 3, 5, 4},
    {2, 4, 4, 53, 53, 3, 2},
    {2, 1, 1, 20, 600, 4, 3},
}};

TEST_CASE("gradients under a sliding window", "[attention][backward][masks][slow]") {
  for (const Shape& shape : shapes) {
    for (const auto& [left, right] :
         {std::array<index_t, 2>{0, 0}, {1, 0}, {20, 2}, {63, 40}, {unlimited, 0}, {3, unlimited}}) {
      const auto window = [left = left, right = right](const Query& query, index_t key) {
        const index_t distance = key - query.position();
        return distance >= -left && distance <= right;
      };
      check(Problem<float>(shape), SlidingWindow{left, right}, window);
    }
  }
  check(Problem<double>(shapes[1]), SlidingWindow{30, 2}, [](const Query& query, index_t key) {
    return key >= query.position() - 30 && key <= query.position() + 2;
  });
}

TEST_CASE("gradients in chunks and under a top-left causal mask", "[attention][backward][masks]") {
  const Positions positions{[](const Query& query) { return query.index; },
                            [](const Query&, index_t key) { return key; }};
  for (const Shape& shape : shapes) {
    for (const index_t size : {index_t{1}, index_t{50}, unlimited}) {
      check(Problem<float>(shape), Chunks{size}, [&](const Query& query, index_t key) {
        return before(query, key) && key / size == query.position() / size;
      });
    }
    check(
        Problem<float>(shape), CausalTopLeft{},
        [](const Query& query, index_t key) { return key <= query.index; }, Identity{}, {}, {}, positions);
  }
}

TEST_CASE("gradients with a prefix visible to all queries", "[attention][backward][masks]") {
  for (const Shape& shape : shapes) {
    for (const auto& prefix : {std::vector<index_t>{0, 1}, {17, 1000}, {130, -4}}) {
      check(Problem<float>(shape), PrefixLM{prefix}, [&](const Query& query, index_t key) {
        return before(query, key) || key < prefix[static_cast<std::size_t>(query.batch)];
      });
    }
  }
}

TEST_CASE("gradients with padding", "[attention][backward][masks]") {
  for (const Shape& shape : shapes) {
    for (const auto& lengths : {std::vector<index_t>{0, 1}, {129, 2}, {-3, 5000}}) {
      const auto kept = [&](const Query& query, index_t key) {
        return key < lengths[static_cast<std::size_t>(query.batch)];
      };
      check(Problem<float>(shape), KeyLengths{lengths}, kept);
      check(Problem<float>(shape), KeyLengths{lengths} & Causal{},
            [&](const Query& query, index_t key) { return kept(query, key) && before(query, key); });
    }
  }
}

TEST_CASE("gradients under Lengths alone and with a window", "[attention][backward][masks]") {
  for (const Shape& shape : shapes) {
    std::vector<index_t> lengths;
    for (index_t row = 0; row < shape.batch * shape.heads * shape.queries; ++row) {
      lengths.push_back(row % 9 == 4 ? 0 : row * 37 % (shape.keys + 1));
    }
    const auto visible = [&](const Query& query, index_t key) {
      const index_t row = (query.batch * shape.heads + query.head) * shape.queries + query.index;
      return key < lengths[static_cast<std::size_t>(row)];
    };
    check(Problem<float>(shape), Lengths{lengths}, visible);
    check(Problem<float>(shape), Lengths{lengths} & SlidingWindow{50, 3},
          [&](const Query& query, index_t key) {
            return visible(query, key) && key >= query.position() - 50 && key <= query.position() + 3;
          });
  }
}

TEST_CASE("gradients under a user mask with ranges", "[attention][backward][masks]") {
  for (const Shape& shape : shapes) {
    const auto range = [](const Query& query, index_t key) {
      const KeyRange keys = own_policies::Careless{}.keys(query);
      return key >= keys.begin && key < keys.end;
    };
    check(Problem<float>(shape), own_policies::Careless{}, range);
    check(Problem<double>(shape), own_policies::Careless{}, range);
  }
}

// ---- Predicates -------------------------------------------------------------------------------------------

bool is_picked(const Query& query, index_t key) {
  return (query.index * 7919 + query.head * 31 + query.batch + key * 104729) % 5 < 2;
}
/// Shows few, distant keys, and no key to most queries.
bool is_rare(const Query& query, index_t key) { return key % 61 == 60 && query.index % 17 < 3; }

TEST_CASE("gradients under a predicate function", "[attention][backward][masks]") {
  for (const Shape& shape : shapes) {
    check(Problem<float>(shape), Where(is_picked), is_picked);
    check(Problem<float>(shape), Where(is_rare), is_rare);
    check(Problem<double>(shape), Causal{} & Where(is_picked),
          [](const Query& query, index_t key) { return is_picked(query, key) && before(query, key); });
    check(Problem<ssmax::half>(shape), Where(is_picked), is_picked);
  }
}

TEST_CASE("gradients under a matrix mask", "[attention][backward][masks]") {
  for (const Shape& shape : shapes) {
    const std::array<index_t, 4> extents{shape.batch, shape.heads, shape.queries, shape.keys};
    std::vector<char> matrix(
        static_cast<std::size_t>(shape.batch * shape.heads * shape.queries * shape.keys));
    for (std::size_t i = 0; i < matrix.size(); ++i) matrix[i] = i * i % 11 < 5;
    const bool* const bools = reinterpret_cast<const bool*>(matrix.data());
    for (const auto& view :
         {View<const bool, 4>(bools, extents), View<const bool, 4>(bools, extents, {0, shape.keys, 1, 1}),
          View<const bool, 4>(bools, extents, {1, 0, 2, 0})}) {
      const auto sees = [&](const Query& query, index_t key) {
        return view(query.batch, query.head, query.index, key);
      };
      check(Problem<float>(shape), ssmax::MatrixMask(view), sees);
    }
  }
}

// ---- Documents --------------------------------------------------------------------------------------------

struct Case {
  Shape shape;
  std::vector<index_t> queries, keys;
};

const std::array<Case, 5> cases{{
    {{1, 4, 2, 70, 70, 8, 5}, {0, 0, 1, 1, 34, 70, 70}, {0, 0, 1, 1, 34, 70, 70}},
    {{2, 2, 1, 61, 300, 6, 9}, {0, 1, 3, 61, 61}, {0, 100, 102, 260, 300}},
    {{1, 4, 2, 61, 130, 8, 5}, {0, 9, 9, 41, 61}, {0, 9, 50, 110, 130}},
    {{1, 2, 2, 7, 9, 8, 5}, {0, 1, 2, 3, 4, 5, 6, 7}, {0, 1, 3, 4, 6, 7, 8, 9}},
    {{1, 2, 1, 50, 30, 8, 5}, {0, 20, 30, 50}, {0, 7, 30, 30}},  // more queries than keys
}};

TEST_CASE("gradients of packed documents", "[attention][backward][masks]") {
  for (const Case& test : cases) {
    for (const bool causal : {false, true}) {
      const Packed packed{test.queries, test.keys, causal};
      const auto sees = [&](const Query& query, index_t key) { return packed.sees(query, key); };
      const Documents mask(packed.queries, packed.keys, causal);
      check(Problem<float>(test.shape), mask, sees, Identity{}, {}, {}, packed.positions());
      check(
          Problem<float>(test.shape), mask & SlidingWindow{20, 2},
          [&](const Query& query, index_t key) {
            const index_t distance = packed.position(key) - packed.position(query);
            return packed.sees(query, key) && distance >= -20 && distance <= 2;
          },
          Identity{}, {}, {}, packed.positions());
    }
  }
}

TEST_CASE("gradients rotate back by the position in the document", "[attention][backward][masks]") {
  for (std::size_t i = 0; i + 1 < cases.size(); ++i) {
    const Packed packed{cases[i].queries, cases[i].keys, true};
    const auto sees = [&](const Query& query, index_t key) { return packed.sees(query, key); };
    const ssmax::Rope<float> rope({.width = 4, .pairing = ssmax::Pairing::interleaved}, 400);
    check(Problem<float>(cases[i].shape), Documents(packed.queries, packed.keys, true), sees, Identity{}, {},
          {.rope = &rope, .key_position = 40}, packed.positions());
  }
}

/// A user mask with its own positions for each head.
struct Moved {
  KeyRange keys(const Query& query) const { return {0, query.shape.keys}; }
  index_t query_position(const Query& query) const { return 3 * query.index + query.head + 5; }
  index_t key_position(const Query& query, index_t key) const {
    return 2 * key + query.batch + 10 * (query.head / 2);
  }
};

TEST_CASE("gradients rotate back by the positions of a user mask", "[attention][backward][masks]") {
  const Shape shape{2, 4, 2, 40, 70, 6, 5};
  const ssmax::Rope<double> rope({.width = 6, .theta = 100}, 400);
  const AttentionOptions<double> options{.rope = &rope, .key_position = 7};
  check(Problem<double>(shape), Moved{}, [](const Query&, index_t) { return true; }, Identity{}, {}, options,
        {[](const Query& query) { return Moved{}.query_position(query); },
         [](const Query& query, index_t key) { return Moved{}.key_position(query, key); }});
}

}  // namespace attention_problem::backward_problem::attention_backward_masks_test
