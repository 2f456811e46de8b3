// Types of the user's whose members or bases look like a fast path: each is computed by its own formula,
// forward with few and with many queries, backward, and over rows. And types that ask for a fast path by name.

#include <functional>

#include "attention_backward_problem.hpp"
#include "attention_problem.hpp"
#include "decode_problem.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem::fast_path_test {

using ssmax::Lanes, ssmax::PlacedLanes;

/// Few queries, many queries, and as many of them as make whole vectors.
constexpr std::array<Shape, 3> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {1, 4, 2, 3, 40, 8, 5},
    {2, 4, 4, 37, 50, 8, 4},
    {1, 4, 1, 48, 140, 5, 8},
}};

// ---- Scores -----------------------------------------------------------------------------------------------

/// What all of them make of a logit, and nothing that a fast path of the library's computes.
template <class Z>
Z curve(Z z, index_t head, index_t key) {
  return z / 2 + z * z / 8 + static_cast<Z>(head + key % 3) / 4;
}
template <class Z>
Z curve_derivative(Z z) {
  return Z(0.5) + z / 4;
}

struct Curve {
  template <class Z>
  Z operator()(Z z, const Key& key) const {
    return curve(z, key.query.head, key.index);
  }
  template <class Z>
  Z derivative(Z z, const Key&) const {
    return curve_derivative(z);
  }
};

/// The same as a formula that shares nothing with the library.
struct Formula {
  template <class Z>
  Z operator()(Z z, const Query& query, index_t key) const {
    return curve(z, query.head, key);
  }
  template <class Z>
  Z derivative(Z z, const Query&, index_t) const {
    return curve_derivative(z);
  }
  template <class Z>
  void collect(Z, Z, Z, const Query&, index_t, Gradients<Z>&) const {}
};

struct HasSlope : Curve {
  double slope(int head) const { return 100.0 * head; }
};
struct HasSlopeFunctor : Curve {
  std::function<double(index_t)> slope = [](index_t) { return 100.0; };
};
struct HasRowNumber : Curve {
  int row(const Query& query) const { return static_cast<int>(query.index); }
};
struct HasRow : Curve {
  const float* row(const Query&) const { return numbers.data(); }
  std::vector<float> numbers = std::vector<float>(200, 50.0f);
};
struct HasApply : Curve {
  template <class T>
  void apply(const Lanes<T>& lanes) const {
    for (index_t i = 0; i < lanes.count; ++i) lanes.z[i] = 7;
  }
  template <class T>
  void differentiate(const Lanes<const T>& lanes, T* d) const {
    for (index_t i = 0; i < lanes.count; ++i) d[i] = 7;
  }
};
struct HasApplyWithDefault : Curve {
  template <class T>
  void apply(const Lanes<T>& lanes, int times = 3) const {
    for (index_t i = 0; i < lanes.count; ++i) lanes.z[i] *= static_cast<T>(times);
  }
};
struct HasParts : Curve {
  ssmax::Softcap first() const { return ssmax::Softcap(1); }
  ssmax::Softcap second() const { return ssmax::Softcap(2); }
};

/// A class that has a fast path itself, with another formula.
template <class Base>
struct From : Base, Curve {
  explicit From(const Base& base) : Base(base) {}
  using Curve::operator();
  using Curve::derivative;
};

template <class C>
void check_own_formula(const C& score) {
  for (const Shape& shape : shapes) {
    check_score(attention_problem::Problem<float>(shape), ssmax::Causal{}, keys_before, score, Formula{});
    check(Problem<float>(shape), ssmax::Causal{}, keys_before, score, Formula{});
  }
}

TEST_CASE("a score with members that look like a fast path has its own formula", "[attention][fast_path]") {
  SECTION("slope") { check_own_formula(HasSlope{}); }
  SECTION("slope, a data member") { check_own_formula(HasSlopeFunctor{}); }
  SECTION("row, a number") { check_own_formula(HasRowNumber{}); }
  SECTION("row, a pointer") { check_own_formula(HasRow{}); }
  SECTION("apply and differentiate") { check_own_formula(HasApply{}); }
  SECTION("apply with a second argument") { check_own_formula(HasApplyWithDefault{}); }
  SECTION("first and second") { check_own_formula(HasParts{}); }
}

TEST_CASE("a score does not inherit a fast path", "[attention][fast_path]") {
  const std::vector<double> slopes = ssmax::Alibi::slopes(4);
  const std::vector<float> zeros(1, 0.0f);
  const ssmax::Softcap cap(0.5);
  SECTION("Alibi") { check_own_formula(From<ssmax::Alibi>(ssmax::Alibi(slopes))); }
  SECTION("Softcap") { check_own_formula(From<ssmax::Softcap>(cap)); }
  SECTION("a | b") { check_own_formula(From<ssmax::Composed<ssmax::Softcap, ssmax::Softcap>>(cap | cap)); }
}

TEST_CASE("a score derived from Bias has its own formula", "[attention][fast_path]") {
  for (const Shape& s : shapes) {
    std::vector<float> numbers(static_cast<std::size_t>(s.heads * s.keys), 9.0f);
    const View<const float, 4> bias(numbers.data(), {s.batch, s.heads, s.queries, s.keys}, {0, s.keys, 0, 1});
    const From<ssmax::Bias<float>> score{ssmax::Bias<float>(bias)};
    check_score(attention_problem::Problem<float>(s), ssmax::Full{}, all_keys, score, Formula{});
    check(Problem<float>(s), ssmax::Full{}, all_keys, score, Formula{});
  }
}

// ---- Scores that ask --------------------------------------------------------------------------------------

/// z / 2, vectorized. Counts the calls of each way.
struct Halved {
  int* alone;
  int* together;

  template <class Z>
  Z operator()(Z z, const Key&) const {
    ++*alone;
    return z / 2;
  }
  template <class Z>
  Z derivative(Z, const Key&) const {
    ++*alone;
    return Z(0.5);
  }
  template <class T>
  void apply(const Lanes<T>& lanes) const {
    ++*together;
    for (index_t i = 0; i < lanes.count; ++i) lanes.z[i] /= 2;
  }
  template <class T>
  void differentiate(const Lanes<const T>& lanes, T* d) const {
    ++*together;
    for (index_t i = 0; i < lanes.count; ++i) d[i] /= 2;
  }
};

/// A score that reads the distance and the head: z·w + 0.01·head·distance with w = 1 / (1 + |distance| / 8).
template <class Z>
Z weight(Z distance) {
  return 1 / (1 + std::abs(distance) / 8);
}
template <class Z>
Z near(Z z, index_t head, Z distance) {
  return z * weight(distance) + static_cast<Z>(0.01) * static_cast<Z>(head) * distance;
}

struct Nearby {
  int* alone;
  int* together;

  template <class Z>
  Z operator()(Z z, const Key& key) const {
    ++*alone;
    return near(z, key.query.head, static_cast<Z>(key.key_position - key.query_position));
  }
  template <class Z>
  Z derivative(Z, const Key& key) const {
    ++*alone;
    return weight(static_cast<Z>(key.key_position - key.query_position));
  }
  template <class T>
  void apply(const PlacedLanes<T>& lanes) const {
    ++*together;
    for (index_t i = 0; i < lanes.count; ++i)
      lanes.z[i] = near(lanes.z[i], lanes.query(i).head, lanes.distance(i));
  }
  template <class T>
  void differentiate(const PlacedLanes<const T>& lanes, T* d) const {
    ++*together;
    for (index_t i = 0; i < lanes.count; ++i) d[i] *= weight(lanes.distance(i));
  }
};

/// The same, with the place of a query that the test gives.
struct NearbyFormula {
  std::function<index_t(const Query&)> place = [](const Query& query) { return query.position(); };
  std::function<index_t(const Query&, index_t)> place_of_key = [](const Query&, index_t key) { return key; };

  template <class Z>
  Z distance(const Query& query, index_t key) const {
    return static_cast<Z>(place_of_key(query, key) - place(query));
  }
  template <class Z>
  Z operator()(Z z, const Query& query, index_t key) const {
    return near(z, query.head, distance<Z>(query, key));
  }
  template <class Z>
  Z derivative(Z, const Query& query, index_t key) const {
    return weight(distance<Z>(query, key));
  }
  template <class Z>
  void collect(Z, Z, Z, const Query&, index_t, Gradients<Z>&) const {}
};

/// A number for each key.
struct Favoured {
  int* alone;
  int* together;
  const float* numbers;

  template <class Z>
  Z operator()(Z z, const Key& key) const {
    ++*alone;
    return z + static_cast<Z>(numbers[key.index]);
  }
  template <class Z>
  Z derivative(Z, const Key&) const {
    ++*alone;
    return Z(1);
  }
  const float* row(const Query&) const {
    ++*together;
    return numbers;
  }
};

}  // namespace attention_problem::backward_problem::fast_path_test

template <>
inline constexpr bool ssmax::by_lanes<attention_problem::backward_problem::fast_path_test::Halved> = true;
template <>
inline constexpr bool ssmax::by_lanes<attention_problem::backward_problem::fast_path_test::Nearby> = true;
template <>
inline constexpr bool ssmax::by_row<attention_problem::backward_problem::fast_path_test::Favoured> = true;

namespace attention_problem::backward_problem::fast_path_test {

TEST_CASE("a score that requests a fast path is called by its fast path", "[attention][fast_path]") {
  const Shape many = shapes[1];
  int alone = 0, together = 0;
  const auto check = [&](const auto& score, const auto& formula) {
    alone = together = 0;
    check_score(attention_problem::Problem<float>(many), ssmax::Full{}, all_keys, score, formula);
    CHECK(together > 0);
    CHECK(alone == 0);
    const Problem<float> problem(many);
    together = 0;
    run_backward(problem, ssmax::Softmax{}, ssmax::Full{}, score);
    CHECK(together > 0);
    alone = together = 0;  // the same with few queries
    check_score(attention_problem::Problem<float>(shapes[0]), ssmax::Full{}, all_keys, score, formula);
    CHECK(together > 0);
    CHECK(alone == 0);
  };
  SECTION("by lanes") {
    check(Halved{&alone, &together}, [](auto z, const Query&, index_t) { return z / 2; });
  }
  SECTION("by lanes with their places") { check(Nearby{&alone, &together}, NearbyFormula{}); }
  SECTION("by row") {
    const auto numbers = reference::normals<float>(200, 3);
    check(Favoured{&alone, &together, numbers.data()}, [&](auto z, const Query&, index_t key) {
      return z + static_cast<decltype(z)>(numbers[static_cast<std::size_t>(key)]);
    });
  }
}

template <class T>
void check_nearby(const Shape& shape) {
  int alone = 0, together = 0;
  const Nearby score{&alone, &together};
  check_score(attention_problem::Problem<T>(shape), ssmax::Causal{}, keys_before, score, NearbyFormula{});
  check_score(attention_problem::Problem<T>(shape), ssmax::Causal{}, keys_before, ssmax::Softcap(4) | score,
              [](auto z, const Query& query, index_t key) {
                using Z = decltype(z);
                return NearbyFormula{}(Z(4) * std::tanh(z / Z(4)), query, key);
              });
  check(Problem<T>(shape), ssmax::Causal{}, keys_before, score, NearbyFormula{});
  CHECK(alone == 0);
}

TEST_CASE("a score by lanes reads distance and head on every path", "[attention][fast_path]") {
  // Few queries, few keys, many keys, and heads that share a kv head.
  for (const Shape& shape : {Shape{1, 4, 2, 3, 1100, 8, 5}, Shape{2, 4, 1, 37, 50, 8, 4},
                             Shape{1, 4, 2, 48, 300, 8, 8}, Shape{1, 3, 3, 61, 290, 9, 7}}) {
    check_nearby<float>(shape);
    check_nearby<double>(shape);
    check_nearby<ssmax::half>(shape);
    check_nearby<ssmax::bfloat16>(shape);
  }
}

TEST_CASE("a score that reads distances has its own formula under a mask with positions of keys",
          "[attention][fast_path]") {
  int alone = 0, together = 0;
  const Nearby score{&alone, &together};
  for (const Shape& shape : {Shape{1, 4, 2, 50, 50, 8, 4}, Shape{1, 2, 1, 200, 200, 8, 8}}) {
    const std::array<index_t, 4> ends{0, 20, 33, shape.keys};
    const ssmax::Documents mask(ends, true);
    const auto begin = [&](index_t position) {
      return position < ends[1] ? 0 : position < ends[2] ? ends[1] : ends[2];
    };
    const Visible visible = [&](const Query& query) {
      return KeyRange{begin(query.position()), query.position() + 1};
    };
    const NearbyFormula formula{
        [&](const Query& query) { return query.position() - begin(query.position()); },
        [&](const Query&, index_t key) { return key - begin(key); }};
    check_score(attention_problem::Problem<float>(shape), mask, visible, score, formula);
    check(Problem<float>(shape), mask, visible, score, formula);
    CHECK(together == 0);
    CHECK(alone > 0);
  }
}

TEST_CASE("a score by lanes in decode", "[decode][fast_path]") {
  int alone = 0, together = 0;
  const decode_problem::Data<float> data({4, 1, 1, 8, 8, {1500}});
  const auto cache = decode_problem::filled<float>(data);
  const auto exact = decode_problem::loops<Real>(
      data, {.score = [](Real z, index_t head, index_t distance) { return near(z, head, Real(distance)); }});
  for_each_target([&](const std::string&) {
    const auto got =
        decode_problem::run(data, cache, ssmax::Softmax{}, ssmax::Causal{}, Nearby{&alone, &together});
    CHECK(alone == 0);
    for (std::size_t i = 0; i < got.out.size(); ++i) CHECK(std::abs(Real(got.out[i]) - exact.out[i]) < 3e-6L);
  });
}

// ---- Masks ------------------------------------------------------------------------------------------------

/// Two keys more with every query.
constexpr auto stairs = [](const Query& query) {
  return KeyRange{0, std::min<index_t>(query.shape.keys, 2 * query.index + 1)};
};

struct HasUniform {
  static constexpr bool uniform = true;
  KeyRange keys(const Query& query) const { return stairs(query); }
};
struct HasUniformFunction {
  static constexpr bool uniform() { return true; }
  KeyRange keys(const Query& query) const { return stairs(query); }
};
struct FromFull : ssmax::Full {
  KeyRange keys(const Query& query) const { return stairs(query); }
};

template <class M>
void check_own_keys(const M& mask) {
  for (const Shape& shape : shapes) {
    check_mask<float>(shape, mask, stairs);
    check(Problem<float>(shape), mask, stairs);
  }
  constexpr index_t rows = 9, keys = 12;
  const auto logits = reference::normals<float>(rows * keys, 1);
  const View<const float, 2> in(logits.data(), {rows, keys});
  for_each_target([&](const std::string& target) {
    std::vector<float> values(rows * keys);
    const View<float, 2> out(values.data(), {rows, keys});
    ssmax::softmax(in, out, ssmax::Softmax{}, mask);
    for (index_t row = 0; row < rows; ++row) {
      const KeyRange seen = stairs(Query{0, 0, row, {1, 1, rows, keys}});
      Real sum = 0;
      for (index_t key = seen.begin; key < seen.end; ++key) sum += std::exp(static_cast<Real>(in(row, key)));
      for (index_t key = 0; key < keys; ++key) {
        const Real expected = key < seen.end ? std::exp(static_cast<Real>(in(row, key))) / sum : 0;
        INFO(target << ": row " << row << ", key " << key);
        CHECK(std::abs(static_cast<Real>(out(row, key)) - expected) <= 5e-7L * expected);
      }
    }
  });
}

TEST_CASE("a mask that does not request same_keys is called for each query", "[attention][fast_path]") {
  SECTION("a member uniform") { check_own_keys(HasUniform{}); }
  SECTION("a static function uniform") { check_own_keys(HasUniformFunction{}); }
  SECTION("derived from Full") { check_own_keys(FromFull{}); }
}

}  // namespace attention_problem::backward_problem::fast_path_test
