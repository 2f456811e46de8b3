// Attention's backward with every score, compositions, user scores, user scalings and sinks: gradients of q, k, v and
// all parameters.

#include "attention_backward_problem.hpp"
#include "score_formulas.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem::attention_backward_scores_test {

constexpr std::array<Shape, 5> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 5, 150, 8, 5},
    {2, 4, 2, 33, 131, 9, 6},
    {1, 4, 1, 70, 33, 8, 9},
    {1, 4, 4, 3, 600, 6, 3},
    {2, 2, 2, 2, 1, 1, 1},
}};

// ---- Scores without parameters, and the slopes of ALiBi ---------------------------------------------------

TEST_CASE("gradients through a softcap", "[attention][backward][scores]") {
  for (const Shape& shape : shapes) {
    for (const double deviation : {1.0, 3.0}) {
      check(Problem<float>(shape, deviation), Full{}, all_keys, Softcap(1.5), Capped{1.5});
    }
    check(Problem<double>(shape), Causal{}, keys_before, Softcap(1.5), Capped{1.5});
    check(Problem<ssmax::half>(shape), Causal{}, keys_before, Softcap(1.5), Capped{1.5});
  }
}

TEST_CASE("gradients far beyond the cap are zero, not NaN", "[attention][backward][scores]") {
  for_each_target([](const std::string&) {
    Problem<float> problem({1, 1, 1, 20, 40, 4, 4});
    std::ranges::fill(problem.q, 100.0F);
    std::ranges::fill(problem.k, 100.0F);
    const Result<float> result = run_backward(problem, SSMax<float>{}, Full{}, Softcap(5));
    CHECK(std::ranges::all_of(result.dq, [](float x) { return x == 0; }));
    CHECK(std::ranges::all_of(result.dk, [](float x) { return x == 0; }));
    CHECK(std::ranges::all_of(result.dv, [](float x) { return std::isfinite(x) && x != 0; }));
  });
}

template <class T, class M>
void check_alibi(const Shape& shape, const M& mask, const Visible& visible,
                 AlibiDistance kind = AlibiDistance::relative) {
  std::vector<double> slopes = Alibi::slopes(4);
  slopes.resize(static_cast<std::size_t>(shape.heads));
  ScoreGradients<double> learnt{std::vector<double>(slopes.size())};
  const Sloped formula{slopes, {}, kind == AlibiDistance::absolute};
  check(Problem<T>(shape), mask, visible, Alibi(slopes, kind).gradient(learnt.dslopes), formula, {}, {},
        &learnt);
  check(Problem<T>(shape), mask, visible, Alibi(slopes, kind), formula);
}

TEST_CASE("the slopes of ALiBi get gradients", "[attention][backward][scores][bfloat16][slow]") {
  for (const Shape& shape : shapes) {
    check_alibi<float>(shape, Full{}, all_keys);
    check_alibi<float>(shape, Full{}, all_keys, AlibiDistance::absolute);
    check_alibi<float>(shape, Causal{}, keys_before);
    check_alibi<double>(shape, Causal{}, keys_before);
    const auto picked = [](const Query& query, index_t key) { return (query.index + 2 * key) % 3 != 0; };
    check_alibi<float>(shape, ssmax::Where(picked), picked);
  }
  check_alibi<ssmax::bfloat16>(shapes[1], Causal{}, keys_before);
}

TEST_CASE("gradients of slopes use positions in documents", "[attention][backward][scores]") {
  const std::vector<index_t> begins{0, 30, 31, 70};
  const auto document_of = [&](index_t i) { return i < 30 ? 0U : i < 31 ? 1U : 2U; };
  const std::vector<double> slopes{0.5, -0.25};
  const Positions positions{
      [&](const Query& query) { return query.index - begins[document_of(query.index)]; },
      [&](const Query&, index_t key) { return key - begins[document_of(key)]; }};
  const auto same = [&](const Query& query, index_t key) {
    return document_of(query.index) == document_of(key);
  };
  ScoreGradients<double> learnt{std::vector<double>(2)};
  check(Problem<float>({1, 2, 1, 70, 70, 5, 4}), ssmax::Documents(begins, false), same,
        Softcap(3) | Alibi(slopes).gradient(learnt.dslopes), Then<Capped, Sloped>{{3}, {slopes, positions}},
        {}, positions, &learnt);
}

// ---- Compositions -----------------------------------------------------------------------------------------

struct Biased {
  std::array<index_t, 4> extents;
  std::vector<float> values;

  explicit Biased(const Shape& s)
      : extents{s.batch, s.heads, s.queries, s.keys},
        values(
            reference::normals<float>(static_cast<std::size_t>(s.batch * s.heads * s.queries * s.keys), 5)) {}
  View<const float, 4> view() const { return {values.data(), extents}; }
  View<const float, 4> broadcast() const { return {values.data(), extents, {0, extents[3], 0, 1}}; }
};

TEST_CASE("gradients through a sloped bias", "[attention][backward][scores]") {
  const std::vector<double> slopes{0.5, -2, 1, 0};
  for (const Shape& shape : shapes) {
    const auto size = static_cast<std::size_t>(shape.batch * shape.heads * shape.queries * shape.keys);
    const std::vector<float> matrix = reference::normals<float>(size, 5);
    std::vector<double> products(size);
    const std::array<index_t, 4> extents{shape.batch, shape.heads, shape.queries, shape.keys};
    const auto of_head = static_cast<std::size_t>(shape.queries * shape.keys);
    for (std::size_t i = 0; i < size; ++i)
      products[i] =
          slopes[i / of_head % static_cast<std::size_t>(shape.heads)] * static_cast<double>(matrix[i]);
    check(Problem<float>(shape), Causal{}, keys_before,
          SlopedBias(View<const float, 4>(matrix.data(), extents),
                     std::span(slopes).first(static_cast<std::size_t>(shape.heads))),
          Added<double>{{products.data(), extents}});
  }
}

TEST_CASE("gradients pass through scores from right to left", "[attention][backward][scores]") {
  for (const Shape& shape : shapes) {
    Biased bias(shape);
    bias.values[bias.values.size() / 2] = -infinity<float>;
    std::vector<double> slopes{0.5, 0.25, 0.0, -0.125};
    slopes.resize(static_cast<std::size_t>(shape.heads));
    const Problem<float> problem(shape, 2);
    ScoreGradients<double> learnt{std::vector<double>(slopes.size()),
                                  std::vector<double>(bias.values.size())};
    const Alibi alibi(slopes);
    const Bias added(bias.view());
    const View<double, 4> dbias(learnt.dbias.data(), bias.extents);
    const Added<float> formula{bias.view(), {dbias.stride(0), dbias.stride(1), dbias.stride(2), 1}};
    check(problem, Causal{}, keys_before,
          Softcap(1.5) | added.gradient(dbias) | alibi.gradient(learnt.dslopes),
          Then<Then<Capped, Added<float>>, Sloped>{{{1.5}, formula}, {slopes}}, {}, {}, &learnt);
    check(problem, Full{}, all_keys, alibi.gradient(learnt.dslopes) | added.gradient(dbias) | Softcap(1.5),
          Then<Sloped, Then<Added<float>, Capped>>{{slopes}, {formula, {1.5}}}, {}, {}, &learnt);
    check(problem, Full{}, all_keys,
          Softcap(4) | (alibi.gradient(learnt.dslopes) | Softcap(2)) | added.gradient(dbias),
          Then<Then<Capped, Then<Sloped, Capped>>, Added<float>>{{{4}, {{slopes}, {2}}}, formula}, {}, {},
          &learnt);
  }
}

TEST_CASE("gradients through scores with a predicate, a window, rope and a scale",
          "[attention][backward][scores]") {
  const auto picked = [](const Query& query, index_t key) {
    return (query.index * 7919 + key * 104729 + query.head) % 7 < 3;
  };
  for (const Shape& shape : shapes) {
    if (shape.queries > shape.keys || shape.d < 4) continue;
    const ssmax::Rope<float> rope({.width = 4, .theta = 100}, shape.keys + 11);
    const AttentionOptions<float> options{.scale = 0.2, .rope = &rope, .key_position = 11};
    std::vector<double> slopes = Alibi::slopes(shape.heads);
    ScoreGradients<double> learnt{std::vector<double>(slopes.size())};
    const auto score = Softcap(2) | Alibi(slopes).gradient(learnt.dslopes);
    const Then<Capped, Sloped> formula{{2}, {slopes}};
    check(Problem<float>(shape, 2), ssmax::Where(picked), picked, score, formula, options, {}, &learnt);
    check(
        Problem<float>(shape, 2), ssmax::SlidingWindow(100, 5),
        [](const Query& query, index_t key) {
          return key >= query.position() - 100 && key <= query.position() + 5;
        },
        score, formula, options, {}, &learnt);
  }
}

// ---- User scores and scalings -----------------------------------------------------------------------------

/// A non-linear score that uses all members of Key.
struct Curious {
  static index_t number(const Key& key) {
    return (key.query.batch + 2 * key.query.head + 3 * key.query.index + 5 * key.index +
            7 * key.query_position + 11 * key.key_position) %
           17;
  }
  template <class T>
  T operator()(T z, const Key& key) const {
    return z * z / T(4) + static_cast<T>(number(key)) / T(16) * z;
  }
  template <class T>
  T derivative(T z, const Key& key) const {
    return z / T(2) + static_cast<T>(number(key)) / T(16);
  }
};

/// A score that computes in double for every type of logit.
struct Double {
  double operator()(double z, const Key&) const { return 0.1 * z * z; }
  double derivative(double z, const Key&) const { return 0.2 * z; }
};

struct Squared {
  template <class T>
  T operator()(T z, const Key&) const {
    return static_cast<T>(0.1) * z * z;
  }
  template <class T>
  T derivative(T z, const Key&) const {
    return static_cast<T>(0.2) * z;
  }
};

/// A formula that calls a score of the library.
template <class C>
struct Plain {
  C score{};

  static Key key_of(const Query& query, index_t key) { return {query, key, query.position(), key}; }
  template <class Z>
  Z operator()(Z z, const Query& query, index_t key) const {
    return static_cast<Z>(score(z, key_of(query, key)));
  }
  template <class Z>
  Z derivative(Z z, const Query& query, index_t key) const {
    return static_cast<Z>(score.derivative(z, key_of(query, key)));
  }
  template <class Z>
  void collect(Z, Z, Z, const Query&, index_t, Gradients<Z>&) const {}
};

TEST_CASE("gradients through user scores", "[attention][backward][scores]") {
  for (const Shape& shape : shapes) {
    check(Problem<float>(shape), Causal{}, keys_before, Curious{}, Plain<Curious>{});
    check(Problem<double>(shape), Full{}, all_keys, Curious{}, Plain<Curious>{});
    check(Problem<float>(shape), Full{}, all_keys, Softcap(2) | Curious{},
          Then<Capped, Plain<Curious>>{{2}, {}});
    check(Problem<float>(shape), Full{}, all_keys, ssmax::Composed(Double{}, Curious{}),
          Then<Plain<Squared>, Plain<Curious>>{});
  }
}

/// c = t·√n + position/100 with t per head. The scaling accumulates the gradient of t.
struct Root {
  const std::vector<double>* t;
  std::vector<double>* dt;

  double operator()(const ssmax::Row& row) const {
    return (*t)[static_cast<std::size_t>(row.head)] * std::sqrt(static_cast<double>(row.n)) +
           static_cast<double>(row.position) / 100;
  }
  void accumulate(const ssmax::Row& row, double dc) const {
    (*dt)[static_cast<std::size_t>(row.head)] += std::sqrt(static_cast<double>(row.n)) * dc;
  }
};

TEST_CASE("a user scaling gets the gradient of its parameters", "[attention][backward][scores]") {
  const std::vector<double> t{0.5, -0.25, 0, 1};
  for (const Shape& shape : shapes) {
    const Problem<double> problem(shape);
    const auto expected = expect(problem, keys_before, [&](index_t head, index_t position, index_t n) {
      return Real(t[static_cast<std::size_t>(head)]) * std::sqrt(static_cast<Real>(n)) +
             static_cast<Real>(static_cast<double>(position) / 100);
    });
    for_each_target([&](const std::string& target) {
      std::vector<double> dt(4);
      Rules<double> rules;
      const auto got = rules.run(problem, expected, Root{&t, &dt}, Causal{});
      const auto root = [](index_t n) { return std::sqrt(static_cast<Real>(n)); };
      rules.take(
          dt, got, [&](const auto& g) { return per_head(g, shape, root); }, "dt");
      rules.check(target);
    });
  }
}

/// A scaling that counts the calls for each row.
struct Counting {
  std::vector<int>* rows;

  double operator()(const ssmax::Row&) const { return 0.5; }
  void accumulate(const ssmax::Row& row, double) const {
    ++(*rows)[static_cast<std::size_t>(row.head * 1000 + row.position)];
  }
};

TEST_CASE("a scaling gets each row with a visible key exactly once", "[attention][backward][scores]") {
  for_each_target([](const std::string& target) {
    for (const Shape& shape : {shapes[0], shapes[1], shapes[2]}) {
      INFO(target << ' ' << name_of(shape));
      std::vector<int> rows(4000), expected(4000);
      run_backward(Problem<float>(shape), Counting{&rows}, Causal{});
      for (index_t head = 0; head < shape.heads; ++head) {
        for (index_t i = std::max<index_t>(0, shape.queries - shape.keys); i < shape.queries; ++i) {
          expected[static_cast<std::size_t>(head * 1000 + i + shape.keys - shape.queries)] +=
              static_cast<int>(shape.batch);
        }
      }
      CHECK(rows == expected);
    }
  });
}

// ---- Sinks ------------------------------------------------------------------------------------------------

template <class T>
void check_sinks(const std::vector<T>& sinks) {
  for (const Shape& shape : {shapes[0], shapes[1], shapes[2], shapes[3], Shape{2, 4, 2, 3, 0, 5, 4}}) {
    const AttentionOptions<T> options{.sinks = sinks};
    check(Problem<T>(shape), Full{}, all_keys, Identity{}, {}, options);
    check(Problem<T>(shape), Causal{}, keys_before, Softcap(2), Capped{2}, options);
  }
}

TEST_CASE("sinks get gradients", "[attention][backward][scores][sinks]") {
  check_sinks<float>({0.5F, -3, 4, 0});
  check_sinks<double>({0.5, -3, 4, 0});
}

TEST_CASE("gradients of very large and very small sinks and without sinks",
          "[attention][backward][scores][sinks]") {
  check_sinks<float>({50, -50, 8, -infinity<float>});
  check_sinks<double>({-infinity<double>, 30, -500, 500});
}

TEST_CASE("dsinks is accumulated and optional", "[attention][backward][scores][sinks]") {
  const Shape s{2, 4, 2, 33, 40, 6, 5};
  const Problem<float> problem(s);
  const std::vector<float> sinks{0.5F, -3, 4, -infinity<float>};
  const AttentionOptions<float> options{.sinks = sinks};
  for_each_target([&](const std::string&) {
    const Output<float> output = run(problem, Softmax{}, Causal{}, options);
    const Result<float> expected = backward(problem, output, Softmax{}, Causal{}, Identity{}, options);
    std::vector<float> dsinks{64, 64, 64, 64};
    for (const bool wanted : {false, true}) {
      Result<float> result(problem, 4);
      AttentionGradients<float> gradients = gradients_to(problem, result);
      if (wanted) gradients.dsinks = dsinks;
      ssmax::attention_backward(backward_with(backward_arguments_of(problem, output), options), gradients,
                                Causal{});
      result.dsinks = expected.dsinks;
      CHECK(result == expected);
    }
    for (std::size_t head = 0; head < 4; ++head)
      CHECK(std::abs(dsinks[head] - 64 - expected.dsinks[head]) <= 1e-5F);
    CHECK(expected.dsinks[3] == 0);
  });
}

}  // namespace attention_problem::backward_problem::attention_backward_scores_test
