// The gradient of a bias, summed over every kind of broadcast, in float and double, with masks and other scores.
// User scores with parameter gradients.

#include "attention_backward_problem.hpp"
#include "score_formulas.hpp"
#include "test.hpp"

namespace attention_problem::backward_problem::attention_backward_bias_test {

using Extents = std::array<index_t, 4>;

constexpr std::array<Shape, 4> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 5, 150, 8, 5},
    {2, 4, 2, 33, 67, 9, 6},
    {1, 4, 1, 70, 33, 8, 9},
    {2, 2, 2, 3, 1, 2, 1},
}};

/// Returns the strides of a contiguous view. Dimensions whose bit in `summed` is set have stride 0.
Extents strides_without(const Extents& extents, int summed) {
  Extents strides{};
  index_t stride = 1;
  for (std::size_t i = 4; i-- > 0;) {
    if ((summed >> i & 1) != 0) continue;
    strides[i] = stride;
    stride *= extents[i];
  }
  return strides;
}

Extents extents_of(const Shape& s) { return {s.batch, s.heads, s.queries, s.keys}; }
std::size_t size_of(const Shape& s) {
  return static_cast<std::size_t>(s.batch * s.heads * s.queries * s.keys);
}

/// Checks a bias of B that is broadcast along some dimensions, and its gradient summed over the dimensions.
template <class T, class B, class G, class M>
void check_bias(const Shape& shape, int broadcast, const M& mask, const Visible& visible) {
  const std::vector<B> values = reference::normals<B>(size_of(shape), 5);
  const Extents extents = extents_of(shape), strides = strides_without(extents, broadcast);
  const View<const B, 4> bias(values.data(), extents, strides);
  index_t size = 1;
  for (std::size_t i = 0; i < 4; ++i) size += (extents[i] - 1) * strides[i];
  ScoreGradients<G> learnt{{}, std::vector<G>(static_cast<std::size_t>(size))};
  const View<G, 4> dbias(learnt.dbias.data(), extents, strides);
  INFO("broadcast along " << broadcast);
  check(Problem<T>(shape), mask, visible, Bias(bias).gradient(dbias), Added<B>{bias, strides}, {}, {},
        &learnt);
}

TEST_CASE("the gradient of a bias is summed over broadcast dimensions",
          "[attention][backward][scores][slow]") {
  for (const Shape& shape : shapes) {
    for (int broadcast = 0; broadcast < 16; ++broadcast) {
      check_bias<float, float, double>(shape, broadcast, Causal{}, keys_before);
      check_bias<float, float, float>(shape, broadcast, Full{}, all_keys);
    }
  }
  for (int broadcast = 0; broadcast < 16; ++broadcast) {
    check_bias<double, double, double>(shapes[1], broadcast, Causal{}, keys_before);
  }
}

TEST_CASE("the gradient of a bias of any type under any mask", "[attention][backward][scores]") {
  const auto picked = [](const Query& query, index_t key) { return (query.index + 3 * key) % 5 < 3; };
  for (const Shape& shape : shapes) {
    check_bias<float, ssmax::half, float>(shape, 0, ssmax::Where(picked), picked);
    check_bias<float, ssmax::bfloat16, double>(shape, 5, ssmax::Where(picked), picked);
    check_bias<float, double, double>(shape, 1, ssmax::SlidingWindow{10, 2},
                                      [](const Query& query, index_t key) {
                                        return key >= query.position() - 10 && key <= query.position() + 2;
                                      });
    check_bias<ssmax::half, float, float>(shape, 3, Causal{}, keys_before);
    check_bias<double, float, float>(shape, 2, Causal{}, keys_before);
  }
}

TEST_CASE("the gradient of a bias accepts any strides and leaves the gaps unchanged",
          "[attention][backward][scores]") {
  const Shape shape = shapes[1];
  const std::vector<float> values = reference::normals<float>(size_of(shape), 5);
  const Extents extents = extents_of(shape);
  const View<const float, 4> bias(values.data(), extents);
  for_each_target([&](const std::string&) {
    const Problem<float> problem(shape);
    std::vector<double> together(size_of(shape)), apart(2 * size_of(shape) + 10, -8);
    run_backward(problem, SSMax<float>{}, Causal{},
                 Bias(bias).gradient(View<double, 4>(together.data(), extents)));
    // [query, head, batch, key] with a gap after every row of keys. The buffer is filled with -8.
    const index_t pitch = shape.keys + 3, of_head = pitch * shape.batch, of_query = of_head * shape.heads;
    const View<double, 4> elsewhere(apart.data() + 5, extents, {pitch, of_head, of_query, 1});
    run_backward(problem, SSMax<float>{}, Causal{}, Bias(bias).gradient(elsewhere));
    int wrong = 0;
    for (index_t row = 0; row < problem.rows(); ++row) {
      const index_t batch = row / shape.queries / shape.heads, head = row / shape.queries % shape.heads;
      for (index_t key = 0; key < shape.keys; ++key) {
        double& element = elsewhere(batch, head, row % shape.queries, key);
        const double expected = together[static_cast<std::size_t>(row * shape.keys + key)];
        wrong += std::abs(element + 8 - expected) <= 1e-14 ? 0 : 1;
        if (key > row % shape.queries + shape.keys - shape.queries) wrong += expected == 0 ? 0 : 1;
        element = -8;
      }
    }
    CHECK(wrong == 0);
    CHECK(std::ranges::all_of(apart, [](double x) { return x == -8; }));
  });
}

TEST_CASE("a bias of -inf removes a key from all gradients", "[attention][backward][scores]") {
  for (const Shape& shape : shapes) {
    std::vector<float> values = reference::normals<float>(size_of(shape), 5);
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (i * i % 13 < 6) values[i] = -infinity<float>;
    }
    const Extents extents = extents_of(shape);
    const View<float, 4> bias(values.data(), extents);
    // Rows in which every bias is -inf.
    for (const index_t row : {index_t{0}, shape.queries / 2, shape.queries - 1}) {
      for (index_t key = 0; key < shape.keys; ++key) bias(0, 1, row, key) = -infinity<float>;
    }
    ScoreGradients<float> learnt{{}, std::vector<float>(values.size())};
    const View<float, 4> dbias(learnt.dbias.data(), extents);
    const Added<float> formula{bias, {dbias.stride(0), dbias.stride(1), dbias.stride(2), 1}};
    const Problem<float> problem(shape);
    check(problem, Full{}, all_keys, Bias(bias).gradient(dbias), formula, {}, {}, &learnt);
    check(problem, Causal{}, keys_before, Softcap(3) | Bias(bias).gradient(dbias),
          Then<Capped, Added<float>>{{3}, formula}, {}, {}, &learnt);
    check(problem, Causal{}, keys_before, Bias(bias).gradient(dbias) | Softcap(3),
          Then<Added<float>, Capped>{formula, {3}}, {}, {}, &learnt);
    const auto finite = [&](const Query& query, index_t key) {
      return bias(query.batch, query.head, query.index, key) != -infinity<float>;
    };
    check(problem, ssmax::MatrixMask(View<const float, 4>(bias)), finite, Bias(bias).gradient(dbias), formula,
          {}, {}, &learnt);
    int wrong = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (values[i] == -infinity<float>) wrong += learnt.dbias[i] == 0 ? 0 : 1;
    }
    CHECK(wrong == 0);
  }
}

// ---- User scores with parameter gradients -----------------------------------------------------------------

/// z' = z · w of the head: one parameter per head, accumulated per query.
struct Weighted {
  std::span<const double> w;
  std::span<double> dw;

  template <class T>
  T operator()(T z, const Key& key) const {
    return z * static_cast<T>(w[static_cast<std::size_t>(key.query.head)]);
  }
  template <class T>
  T derivative(T, const Key& key) const {
    return static_cast<T>(w[static_cast<std::size_t>(key.query.head)]);
  }
  template <class T>
  T parameter_derivative(T z, const Key&) const {
    return z;
  }
  void accumulate(const Query& query, double d) const { dw[static_cast<std::size_t>(query.head)] += d; }
};

struct WeightedFormula {
  std::vector<double> w;

  template <class Z>
  Z operator()(Z z, const Query& query, index_t) const {
    return z * static_cast<Z>(w[static_cast<std::size_t>(query.head)]);
  }
  template <class Z>
  Z derivative(Z, const Query& query, index_t) const {
    return static_cast<Z>(w[static_cast<std::size_t>(query.head)]);
  }
  template <class Z>
  void collect(Z z, Z dz, Z size, const Query& query, index_t, Gradients<Z>& into) const {
    into.dslopes.add(static_cast<std::size_t>(query.head), dz * z, size * std::abs(z));
  }
};

TEST_CASE("a user score gets the gradient of its parameter", "[attention][backward][scores]") {
  for (const Shape& shape : shapes) {
    std::vector<double> w{0.5, -0.75, 1.5, 0.25};
    w.resize(static_cast<std::size_t>(shape.heads));
    ScoreGradients<double> learnt{std::vector<double>(w.size())};
    check(Problem<float>(shape), Causal{}, keys_before, Weighted{w, learnt.dslopes}, WeightedFormula{w}, {},
          {}, &learnt);
    check(Problem<double>(shape), Full{}, all_keys, ssmax::Composed(Softcap(2), Weighted{w, learnt.dslopes}),
          Then<Capped, WeightedFormula>{{2}, {w}}, {}, {}, &learnt);
  }
}

/// z' = z + table[(key - query) mod 16]: relative positions as in T5. The score gets the gradient of every logit and
/// does not declare thread safety.
struct Relative {
  std::span<const float> table;
  std::span<double> dtable;

  static std::size_t bucket(index_t key, index_t position) {
    return static_cast<std::size_t>((key - position) % 16 + 16) % 16;
  }
  template <class T>
  T operator()(T z, const Key& key) const {
    return z + static_cast<T>(table[bucket(key.index, key.query.index)]);
  }
  template <class T>
  T derivative(T, const Key&) const {
    return T{1};
  }
  void accumulate(const Key& key, double dz) const { dtable[bucket(key.index, key.query.index)] += dz; }
};

struct RelativeFormula {
  std::vector<float> table;

  template <class Z>
  Z operator()(Z z, const Query& query, index_t key) const {
    return z + static_cast<Z>(table[Relative::bucket(key, query.index)]);
  }
  template <class Z>
  Z derivative(Z, const Query&, index_t) const {
    return 1;
  }
  template <class Z>
  void collect(Z, Z dz, Z size, const Query& query, index_t key, Gradients<Z>& into) const {
    into.dbias.add(Relative::bucket(key, query.index), dz, size);
  }
};

TEST_CASE("a user score gets the gradient of each logit", "[attention][backward][scores]") {
  const std::vector<float> table = reference::normals<float>(16, 3);
  ssmax::ThreadPool pool(3);
  for (const Shape& shape : shapes) {
    ScoreGradients<double> learnt{{}, std::vector<double>(16)};
    const Relative relative{table, learnt.dbias};
    check(Problem<float>(shape), Causal{}, keys_before, relative, RelativeFormula{table}, {}, {}, &learnt);
    check(Problem<double>(shape), Full{}, all_keys, ssmax::Composed(relative, Softcap(2)),
          Then<RelativeFormula, Capped>{{table}, {2}}, {}, {}, &learnt);
    const Problem<float> problem(shape);
    const auto by = [&](auto&& executor) {
      std::ranges::fill(learnt.dbias, 0.0);
      run_backward(problem, SSMax<float>{}, Causal{}, relative, {}, executor);
      return learnt.dbias;
    };
    CHECK(same_bits(by(pool), by(ssmax::Serial{})));
  }
}

}  // namespace attention_problem::backward_problem::attention_backward_bias_test
