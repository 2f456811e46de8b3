// Attention with every score, compositions and user scores, followed by SSMax's multiplier.

#include "attention_problem.hpp"
#include "test.hpp"

namespace attention_problem::attention_scores_test {

constexpr std::array<Shape, 4> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {2, 4, 2, 5, 300, 8, 5},
    {2, 4, 2, 61, 300, 9, 24},
    {1, 4, 1, 70, 33, 8, 9},
    {1, 4, 4, 3, 1100, 6, 3},
}};

/// Numbers [batch, heads, queries, keys], -inf where `hides` is true.
template <class B>
struct Numbers {
  std::vector<B> values;
  std::array<index_t, 4> extents;

  explicit Numbers(const Shape& s) : extents{s.batch, s.heads, s.queries, s.keys} {
    values = reference::normals<B>(static_cast<std::size_t>(s.batch * s.heads * s.queries * s.keys), 5);
  }
  View<B, 4> view() { return {values.data(), extents}; }
};

/// The formula of a bias in any view.
template <class B>
auto plus(const View<B, 4>& bias) {
  return [bias](auto z, const Query& query, index_t key) {
    return z + static_cast<decltype(z)>(bias(query.batch, query.head, query.index, key));
  };
}

constexpr double cap = 1.5;
const auto capped = [](auto z, const Query&, index_t) {
  using Z = decltype(z);
  return z == -std::numeric_limits<Z>::infinity() ? z
                                                  : static_cast<Z>(cap) * std::tanh(z / static_cast<Z>(cap));
};

const std::vector<double> slopes = Alibi::slopes(4);
const auto nearby = [](auto z, const Query& query, index_t key) {
  using Z = decltype(z);
  return z + static_cast<Z>(slopes[static_cast<std::size_t>(query.head)]) *
                 static_cast<Z>(key - query.position());
};

TEST_CASE("a softcap caps logits before SSMax multiplies them", "[attention][scores][slow]") {
  for (const Shape& shape : shapes) {
    for (const double deviation : {1.0, 3.0}) {
      check_score(Problem<float>(shape, deviation), Full{}, all_keys, Softcap(cap), capped);
    }
    check_score(Problem<float>(shape), Causal{}, keys_before, Softcap(cap), capped);
    check_score(Problem<double>(shape), Causal{}, keys_before, Softcap(cap), capped);
  }
}

TEST_CASE("ALiBi lowers logits by distance", "[attention][scores]") {
  for (const Shape& shape : shapes) {
    check_score(Problem<float>(shape), Full{}, all_keys, Alibi(slopes), nearby);
    check_score(Problem<float>(shape), Causal{}, keys_before, Alibi(slopes), nearby);
  }
}

TEST_CASE("ALiBi of absolute distances lowers logits before and after the query", "[attention][scores]") {
  const auto absolute = [](auto z, const Query& query, index_t key) {
    using Z = decltype(z);
    return z - static_cast<Z>(slopes[static_cast<std::size_t>(query.head)]) *
                   static_cast<Z>(std::abs(key - query.position()));
  };
  const Alibi score(slopes, AlibiDistance::absolute);
  const auto near = [](const Query& query, index_t key) { return std::abs(key - query.position()) <= 150; };
  for (const Shape& shape : shapes) {
    check_score(Problem<float>(shape), Full{}, all_keys, score, absolute);
    check_score(Problem<double>(shape), SlidingWindow(150, 150), near, Alibi(4, AlibiDistance::absolute),
                absolute);
  }
}

template <class B>
void check_sloped_bias(const Shape& shape, const std::array<index_t, 4>& strides) {
  Numbers<B> matrix(shape);
  const View<const B, 4> view(matrix.values.data(), matrix.extents, strides);
  check_score(Problem<float>(shape), Causal{}, keys_before, SlopedBias(view, slopes),
              [&](auto z, const Query& query, index_t key) {
                using Z = decltype(z);
                return z + static_cast<Z>(slopes[static_cast<std::size_t>(query.head)]) *
                               static_cast<Z>(view(query.batch, query.head, query.index, key));
              });
}

TEST_CASE("a sloped bias adds a matrix times the slope of the head", "[attention][scores]") {
  for (const Shape& shape : shapes) {
    check_sloped_bias<float>(shape, {0, shape.queries * shape.keys, shape.keys, 1});
    check_sloped_bias<half>(shape, {shape.queries * shape.keys, 0, shape.keys, 1});
    check_sloped_bias<double>(shape, {0, 0, shape.keys, 1});
    check_sloped_bias<bfloat16>(shape, {1, 0, 2, 0});
  }
}

template <class T, class B>
void check_bias() {
  for (const Shape& shape : shapes) {
    Numbers<B> bias(shape);
    const Problem<T> problem(shape);
    check_score(problem, Causal{}, keys_before, Bias(bias.view()), plus(bias.view()));
  }
}

TEST_CASE("a bias of any type is added", "[attention][scores][slow]") {
  check_bias<float, float>();
  check_bias<float, half>();
  check_bias<float, bfloat16>();
  check_bias<float, double>();
  check_bias<double, double>();
}

TEST_CASE("a bias may be broadcast along any of its dimensions", "[attention][scores][slow]") {
  for (const Shape& shape : shapes) {
    Numbers<float> bias(shape);
    const std::array<std::array<index_t, 4>, 5> strides{
        {{0, 0, 0, 1}, {0, 0, shape.keys, 1}, {shape.heads, 1, 0, 0}, {0, 7, 1, 0}, {0, 0, 0, 0}}};
    for (const auto& stride : strides) {
      const View<const float, 4> view(bias.values.data(), bias.extents, stride);
      check_score(Problem<float>(shape), Full{}, all_keys, Bias(view), plus(view));
    }
  }
}

TEST_CASE("a bias of -inf gives weight 0, and n counts the key", "[attention][scores]") {
  for (const Shape& shape : shapes) {
    Numbers<float> bias(shape);
    for (std::size_t i = 0; i < bias.values.size(); ++i) {
      if (i * i % 13 < 6) bias.values[i] = -infinity<float>;
    }
    // The first, a middle and the last row contain only -inf.
    for (const index_t row : {index_t{0}, shape.queries / 2, shape.queries - 1}) {
      for (index_t key = 0; key < shape.keys; ++key) bias.view()(0, 1, row, key) = -infinity<float>;
    }
    check_score(Problem<float>(shape), Full{}, all_keys, Bias(bias.view()), plus(bias.view()));
    check_score(Problem<float>(shape), Causal{}, keys_before, Bias(bias.view()), plus(bias.view()));
    const Output<float> output = run(Problem<float>(shape), SSMax<float>{}, Full{}, Bias(bias.view()));
    const auto row = static_cast<std::size_t>(shape.queries + shape.queries / 2);
    CHECK(output.lse[row] == -infinity<float>);
    CHECK(output.out[row * static_cast<std::size_t>(shape.dv)] == 0);
  }
}

TEST_CASE("a mask of -inf gives weight 0, and n does not count the key", "[attention][scores]") {
  const Shape shape = shapes[1];
  Numbers<float> bias(shape);
  for (std::size_t i = 0; i < bias.values.size(); ++i) {
    if (i * i % 13 < 6) bias.values[i] = -infinity<float>;
  }
  const auto finite = [&](const Query& query, index_t key) {
    return bias.view()(query.batch, query.head, query.index, key) != -infinity<float>;
  };
  check_score(Problem<float>(shape), ssmax::MatrixMask(bias.view()), finite, Bias(bias.view()),
              plus(bias.view()));
}

// ---- Compositions -----------------------------------------------------------------------------------------

TEST_CASE("scores are applied from left to right, then the multiplier", "[attention][scores]") {
  for (const Shape& shape : shapes) {
    Numbers<float> bias(shape);
    bias.values[7] = bias.values[bias.values.size() / 2] = -infinity<float>;
    const auto added = plus(bias.view());
    const Problem<float> problem(shape, 2);
    check_score(problem, Causal{}, keys_before, Softcap(cap) | Bias(bias.view()) | Alibi(slopes),
                [&](auto z, const Query& query, index_t key) {
                  return nearby(added(capped(z, query, key), query, key), query, key);
                });
    check_score(problem, Full{}, all_keys, Alibi(slopes) | Bias(bias.view()) | Softcap(cap),
                [&](auto z, const Query& query, index_t key) {
                  return capped(added(nearby(z, query, key), query, key), query, key);
                });
  }
}

TEST_CASE("scores work with predicates, windows and rope", "[attention][scores]") {
  const auto picked = [](const Query& query, index_t key) {
    return (query.index * 7919 + key * 104729 + query.head) % 7 < 3;
  };
  for (const Shape& shape : shapes) {
    if (shape.queries > shape.keys) continue;
    const ssmax::Rope<float> rope({.width = 4, .theta = 100}, shape.keys + 11);
    const ssmax::AttentionOptions<float> options{.scale = 0.2, .rope = &rope, .key_position = 11};
    const Problem<float> problem(shape, 2);
    const auto score = Softcap(cap) | Alibi(slopes);
    const auto formula = [](auto z, const Query& query, index_t key) {
      return nearby(capped(z, query, key), query, key);
    };
    check_score(problem, ssmax::Where(picked), picked, score, formula, options);
    check_score(
        problem, ssmax::SlidingWindow(100, 5),
        [](const Query& query, index_t key) {
          return key >= query.position() - 100 && key <= query.position() + 5;
        },
        score, formula, options);
  }
}

// ---- User scores ------------------------------------------------------------------------------------------

/// A score that computes in double for every type of logit.
struct Double {
  double operator()(double z, const Key& key) const {
    return 0.1 * z * z - 0.001 * static_cast<double>(key.index);
  }
  double derivative(double z, const Key&) const { return 0.2 * z; }
};

/// A score that uses all members of Key.
struct Curious {
  template <class T>
  T operator()(T z, const Key& key) const {
    const index_t sum = key.query.batch + 2 * key.query.head + 3 * key.query.index + 5 * key.index +
                        7 * key.query_position + 11 * key.key_position;
    return z + static_cast<T>(sum % 17) / T(16);
  }
  template <class T>
  T derivative(T, const Key&) const {
    return T{1};
  }
};

TEST_CASE("user scores", "[attention][scores]") {
  for (const Shape& shape : shapes) {
    const Problem<float> problem(shape);
    check_score(problem, Causal{}, keys_before, Curious{}, [](auto z, const Query& query, index_t key) {
      return Curious{}(z, Key{query, key, query.position(), key});
    });
    check_score(problem, Full{}, all_keys, ssmax::Composed(Double{}, Curious{}),
                [](auto z, const Query& query, index_t key) {
                  using Z = decltype(z);
                  const Z squared = static_cast<Z>(0.1) * z * z - static_cast<Z>(0.001) * static_cast<Z>(key);
                  return Curious{}(squared, Key{query, key, query.position(), key});
                });
  }
}

/// A score that records its calls and fails for masked keys.
struct Watchful {
  std::vector<char>* asked;

  template <class T>
  T operator()(T z, const Key& key) const {
    const Query& query = key.query;
    (*asked)[static_cast<std::size_t>(
        ((query.batch * query.shape.heads + query.head) * query.shape.queries + query.index) *
            query.shape.keys +
        key.index)] = 1;
    return z;
  }
  template <class T>
  T derivative(T, const Key&) const {
    return T{1};
  }
};

TEST_CASE("a score is called for every visible key and for no masked key", "[attention][scores]") {
  const auto picked = [](const Query& query, index_t key) {
    return key <= query.position() && (query.index + key + query.head) % 3 != 0;
  };
  for (const Shape& shape : shapes) {
    const Problem<float> problem(shape);
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      std::vector<char> asked(static_cast<std::size_t>(problem.rows() * shape.keys)), expected = asked;
      run(problem, SSMax<float>{}, ssmax::Where(picked), Watchful{&asked});
      for (index_t row = 0; row < problem.rows(); ++row) {
        const Query query{0, row / shape.queries % shape.heads, row % shape.queries, problem.query_shape()};
        for (index_t key = 0; key < shape.keys; ++key) {
          expected[static_cast<std::size_t>(row * shape.keys + key)] = picked(query, key);
        }
      }
      CHECK(asked == expected);
    });
  }
}

/// A user-defined identity, so that the library takes the path of scores.
struct Nothing {
  template <class T>
  T operator()(T z, const Key&) const {
    return z;
  }
  template <class T>
  T derivative(T, const Key&) const {
    return T{1};
  }
};

TEST_CASE("a score that returns its logit is as accurate as no score", "[attention][scores]") {
  for (const Shape& shape : shapes) {
    check_score(Problem<float>(shape), Causal{}, keys_before, Nothing{}, {});
    check_score(Problem<double>(shape), Causal{}, keys_before, Nothing{}, {});
  }
}

/// A score that returns NaN or +inf for one key.
struct Spoils {
  index_t key;
  float by;

  template <class T>
  T operator()(T z, const Key& at) const {
    return at.index == key ? static_cast<T>(by) : z;
  }
  template <class T>
  T derivative(T, const Key&) const {
    return T{1};
  }
};

TEST_CASE("NaN and +inf from a score affect only the rows that see the key", "[attention][scores]") {
  for (const Shape& shape : shapes) {
    if (shape.queries > shape.keys) continue;
    const Problem<float> problem(shape);
    const index_t key = shape.keys - 2;
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      const Output<float> clean = run(problem, ssmax::Softmax{}, Causal{}, Nothing{});
      for (const float by : {nan<float>, infinity<float>}) {
        const Output<float> spoiled = run(problem, ssmax::Softmax{}, Causal{}, Spoils{key, by});
        int wrong = 0;
        for (index_t i = 0; i < problem.rows() * shape.dv; ++i) {
          const index_t row = i / shape.dv;
          const auto at = static_cast<std::size_t>(i), of_row = static_cast<std::size_t>(row);
          const bool sees = row % shape.queries >= shape.queries - 2;
          const bool right = sees ? std::isnan(spoiled.out[at]) && std::isnan(spoiled.lse[of_row])
                                  : same_bits(spoiled.out[at], clean.out[at]) &&
                                        same_bits(spoiled.lse[of_row], clean.lse[of_row]);
          wrong += right ? 0 : 1;
        }
        CHECK(wrong == 0);
      }
    });
  }
}

}  // namespace attention_problem::attention_scores_test
