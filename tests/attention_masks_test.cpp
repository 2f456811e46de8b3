// Attention under every mask that is a range of keys, and compositions of them, with SSMax: n is exactly the
// number of keys that a query sees.

#include "attention_problem.hpp"
#include "own_policies.hpp"
#include "test.hpp"

namespace attention_problem::attention_masks_test {

constexpr index_t unlimited = std::numeric_limits<index_t>::max();

/// Few queries and many, of a kv head; more keys than queries and fewer; more keys than a chunk has.
constexpr std::array<Shape, 6> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 5, 300, 8, 5},
    {2, 4, 2, 61, 300, 9, 24},
    {2, 4, 4, 131, 131, 3, 2},
    {2, 3, 1, 70, 33, 8, 9},
    {2, 2, 2, 7, 3, 5, 4},
    {2, 1, 1, 20, 1100, 6, 12},
}};

TEST_CASE("SSMax counts the keys of a full and of a causal mask", "[attention][masks][slow]") {
  for (const Shape& shape : shapes) {
    check_mask<float>(shape, Full{}, [](const Query&, index_t) { return true; });
    check_mask<float>(shape, Causal{}, before);
    check_mask<double>(shape, Causal{}, before);
  }
}

TEST_CASE("queries attend only to keys in a sliding window", "[attention][masks][slow]") {
  for (const Shape& shape : shapes) {
    for (const index_t left : {index_t{0}, index_t{1}, index_t{2}, index_t{63}, index_t{200}, unlimited}) {
      for (const index_t right : {index_t{0}, index_t{1}, index_t{40}, unlimited}) {
        const auto window = [&](const Query& query, index_t key) {
          const index_t distance = key - query.position();
          return distance >= -left && distance <= right;
        };
        check_mask<float>(shape, SlidingWindow{left, right}, window);
      }
    }
  }
  check_mask<double>(shapes[1], SlidingWindow{30, 2}, [](const Query& query, index_t key) {
    return key >= query.position() - 30 && key <= query.position() + 2;
  });
}

TEST_CASE("queries attend only to keys of their chunk", "[attention][masks]") {
  for (const Shape& shape : shapes) {
    for (const index_t size : {index_t{1}, index_t{7}, index_t{64}, index_t{1030}, unlimited}) {
      const auto chunk = [&](const Query& query, index_t key) {
        return before(query, key) && key / size == query.position() / size;
      };
      check_mask<float>(shape, Chunks{size}, chunk);
    }
  }
  check_mask<double>(shapes[1], Chunks{30}, [](const Query& query, index_t key) {
    return before(query, key) && key / 30 == query.position() / 30;
  });
}

TEST_CASE("a top-left causal mask and its positions", "[attention][masks]") {
  const Rope<float> rope({.width = 4}, 1200);
  const Positions positions{[](const Query& query) { return query.index; },
                            [](const Query&, index_t key) { return key; }};
  const auto top_left = [](const Query& query, index_t key) { return key <= query.index; };
  for (const Shape& shape : shapes) {
    check_mask<float>(shape, CausalTopLeft{}, top_left, {}, positions);
    check_mask<double>(shape, CausalTopLeft{}, top_left, {}, positions);
    if (shape.d % 2 == 0)
      check_mask<float>(shape, CausalTopLeft{}, top_left, {.rope = &rope, .key_position = 40}, positions);
    check_mask<float>(
        shape, CausalTopLeft{} & SlidingWindow{20},
        [&](const Query& query, index_t key) { return top_left(query, key) && key >= query.index - 20; }, {},
        positions);
  }
}

TEST_CASE("a prefix per batch entry is visible to all queries", "[attention][masks][slow]") {
  for (const Shape& shape : shapes) {
    for (const auto& prefix : {std::vector<index_t>{0, 1}, {17, 1000}, {130, -4}}) {
      check_mask<float>(shape, PrefixLM{prefix}, [&](const Query& query, index_t key) {
        return before(query, key) || key < prefix[static_cast<std::size_t>(query.batch)];
      });
    }
  }
}

TEST_CASE("padding per batch entry is masked for all queries", "[attention][masks][slow]") {
  for (const Shape& shape : shapes) {
    for (const auto& lengths : {std::vector<index_t>{0, 1}, {129, 2}, {-3, 5000}}) {
      const auto kept = [&](const Query& query, index_t key) {
        return key < lengths[static_cast<std::size_t>(query.batch)];
      };
      check_mask<float>(shape, KeyLengths{lengths}, kept);
      check_mask<float>(shape, KeyLengths{lengths} & Causal{}, [&](const Query& query, index_t key) {
        return kept(query, key) && before(query, key);
      });
    }
  }
}

TEST_CASE("Lengths and a window show only keys visible under both", "[attention][masks]") {
  for (const Shape& shape : shapes) {
    std::vector<index_t> lengths;
    for (index_t row = 0; row < shape.batch * shape.heads * shape.queries; ++row) {
      lengths.push_back(row % 9 == 4 ? 0 : row * 37 % (shape.keys + 1));
    }
    check_mask<float>(shape, Lengths{lengths} & SlidingWindow{50, 3}, [&](const Query& query, index_t key) {
      const index_t row = (query.batch * shape.heads + query.head) * shape.queries + query.index;
      return key < lengths[static_cast<std::size_t>(row)] && key >= query.position() - 50 &&
             key <= query.position() + 3;
    });
  }
}

TEST_CASE("the range of a user mask may exceed the keys and may be reversed", "[attention][masks]") {
  for (const Shape& shape : shapes) {
    const auto range = [](const Query& query, index_t key) {
      const KeyRange keys = own_policies::Careless{}.keys(query);
      return key >= keys.begin && key < keys.end;
    };
    check_mask<float>(shape, own_policies::Careless{}, range);
    check_mask<double>(shape, own_policies::Careless{}, range);
  }
}

}  // namespace attention_problem::attention_masks_test
