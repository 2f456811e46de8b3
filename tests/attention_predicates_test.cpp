// Attention with SSMax under masks with predicates: Where, MatrixMask, user masks and compositions.

#include "attention_problem.hpp"
#include "test.hpp"

namespace attention_problem::attention_predicates_test {

constexpr std::array<Shape, 5> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 5, 300, 8, 5},
    {2, 4, 2, 61, 300, 9, 24},
    {1, 3, 1, 70, 33, 8, 9},
    {2, 2, 2, 7, 3, 5, 4},
    {1, 2, 1, 10, 1100, 6, 3},
}};

/// Shows scattered keys, and no key to every eleventh query.
bool is_picked(const Query& query, index_t key) {
  const index_t number = (query.batch * 5 + query.head * 3 + query.index);
  return number % 11 != 3 && (number * 7919 + key * 104729) % 7 < 3;
}

struct Picky {
  KeyRange keys(const Query& query) const { return {query.index % 50, query.shape.keys + 9}; }
  bool sees(const Query& query, index_t key) const { return is_picked(query, key); }
};

/// [batch, heads, queries, keys] of bool.
struct Matrix {
  std::vector<char> storage;
  std::array<index_t, 4> extents;

  explicit Matrix(const Shape& s)
      : storage(static_cast<std::size_t>(s.batch * s.heads * s.queries * s.keys)),
        extents{s.batch, s.heads, s.queries, s.keys} {
    for (std::size_t i = 0; i < storage.size(); ++i) storage[i] = static_cast<char>(i * i % 13 < 6);
  }
  const bool* data() const { return reinterpret_cast<const bool*>(storage.data()); }
  View<const bool, 4> view() const { return {data(), extents}; }
};

TEST_CASE("SSMax counts the keys visible under a predicate function", "[attention][masks]") {
  for (const Shape& shape : shapes) {
    check_mask<float>(shape, Where(is_picked), is_picked);
    check_mask<double>(shape, Where(is_picked), is_picked);
  }
}

TEST_CASE("a user mask with a range and a predicate", "[attention][masks]") {
  for (const Shape& shape : shapes) {
    check_mask<float>(shape, Picky{}, [](const Query& query, index_t key) {
      return key >= query.index % 50 && is_picked(query, key);
    });
  }
}

TEST_CASE("a matrix of bool selects keys, with and without broadcast", "[attention][masks]") {
  for (const Shape& shape : shapes) {
    const Matrix matrix(shape);
    check_mask<float>(shape, MatrixMask(matrix.view()), [&](const Query& query, index_t key) {
      return matrix.view()(query.batch, query.head, query.index, key);
    });
    const View<const bool, 4> of_queries(matrix.data(), matrix.extents, {0, 0, shape.keys, 1});
    check_mask<float>(shape, MatrixMask(of_queries), [&](const Query& query, index_t key) {
      return matrix.data()[query.index * shape.keys + key];
    });
    const View<const bool, 4> of_rows(matrix.data(), matrix.extents, {shape.heads, 1, 2, 0});
    check_mask<float>(shape, MatrixMask(of_rows), [&](const Query& query, index_t) {
      return matrix.data()[query.batch * shape.heads + query.head + 2 * query.index];
    });
  }
}

template <class T>
void check_finite(const Shape& shape) {
  const Matrix matrix(shape);
  std::vector<T> values;
  for (const char visible : matrix.storage) {
    // A large negative finite value does not mask a key.
    values.push_back(visible != 0 ? T(-3e38F) : T(-std::numeric_limits<float>::infinity()));
  }
  const View<const T, 4> view(values.data(), matrix.extents);
  check_mask<float>(shape, MatrixMask(view), [&](const Query& query, index_t key) {
    return matrix.view()(query.batch, query.head, query.index, key);
  });
}

TEST_CASE("an additive mask selects the keys where the mask is not -inf", "[attention][masks]") {
  for (const Shape& shape : shapes) {
    check_finite<float>(shape);
    check_finite<ssmax::bfloat16>(shape);
  }
}

TEST_CASE("predicates and ranges compose", "[attention][masks]") {
  for (const Shape& shape : shapes) {
    const Matrix matrix(shape);
    const auto in_matrix = [&](const Query& query, index_t key) {
      return matrix.view()(query.batch, query.head, query.index, key);
    };
    const std::vector<index_t> lengths{shape.keys - 1, shape.keys / 2};
    check_mask<float>(shape, MatrixMask(matrix.view()) & Causal{}, [&](const Query& query, index_t key) {
      return in_matrix(query, key) && key <= query.position();
    });
    check_mask<float>(shape, SlidingWindow{70, 3} & Where(is_picked), [&](const Query& query, index_t key) {
      return is_picked(query, key) && key >= query.position() - 70 && key <= query.position() + 3;
    });
    if (shape.batch > 2) continue;
    check_mask<float>(shape,
                      KeyLengths{std::span(lengths).first(static_cast<std::size_t>(shape.batch))} &
                          MatrixMask(matrix.view()) & Where(is_picked),
                      [&](const Query& query, index_t key) {
                        return in_matrix(query, key) && is_picked(query, key) &&
                               key < lengths[static_cast<std::size_t>(query.batch)];
                      });
  }
}

TEST_CASE("a predicate that is always true is bit-identical to its range", "[attention][masks]") {
  for (const Shape& shape : shapes) {
    const Problem<float> problem(shape);
    const auto everything = Where([](const Query&, index_t) { return true; });
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      CHECK(run(problem, ssmax::SSMax<float>{0.7F}, Causal{} & everything) ==
            run(problem, ssmax::SSMax<float>{0.7F}, Causal{}));
    });
  }
}

/// Scalings get the position of the last visible key, even if the mask's range continues after the key.
TEST_CASE("a scaling gets the position of the last key that a predicate shows", "[attention][masks]") {
  const auto by_position = [](const ssmax::Row& row) {
    return 0.5 + 0.01 * static_cast<double>(row.position);
  };
  const auto multiplier = [&](index_t head, index_t position, index_t n) {
    return static_cast<Real>(by_position({head, position, n}));
  };
  const auto some_before = [](const Query& query, index_t key) {
    return key <= query.position() && key % 3 == 0;
  };
  for (const Shape& shape : shapes) {
    const Problem<float> problem(shape);
    const auto expected = expect(problem, some_before, multiplier);
    for_each_target([&](const std::string& target) {
      Rules<float> rules;
      rules.take(run(problem, by_position, Where(some_before)), expected, name_of(shape));
      rules.check(target);
    });
  }
}

}  // namespace attention_problem::attention_predicates_test
