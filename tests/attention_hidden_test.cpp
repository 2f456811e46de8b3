// NaN and infinity in masked keys and values leave the result bit-identical: every kind of mask, few and many
// queries, scores, sinks and every type. In visible keys and values, they affect the result.

#include "attention_problem.hpp"
#include "test.hpp"

namespace attention_problem::attention_hidden_test {

/// 6 and 16 rows per kv head take one path, 17 and 82 the other. Some widths fill vectors, others do not.
constexpr std::array<Shape, 5> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {1, 4, 2, 3, 300, 8, 5},
    {1, 2, 1, 8, 290, 16, 32},
    {1, 1, 1, 17, 270, 3, 16},
    {1, 2, 1, 41, 300, 8, 24},
    {1, 1, 1, 10, 1100, 8, 17},
}};

/// Returns the keys of the shape that lie at borders of blocks, vectors and chunks.
std::vector<index_t> keys_of(const Shape& shape) {
  std::vector<index_t> keys;
  for (const index_t key : {0, 1, 30, 127, 128, 131, 255, 256, 263, 289, 1023, 1024, 1099}) {
    if (key < shape.keys) keys.push_back(key);
  }
  keys.push_back(shape.keys - 2);
  return keys;
}

struct Count {
  int leaked = 0, lost = 0;
};

/// Compares the clean run with runs that have poison in one key or in the odd channels of its value.
template <class T, class M, class C, class Visible>
void count_leaks(const Problem<T>& clean, const M& mask, const C& score, const Visible& visible,
                 const AttentionOptions<T>& options, Count& count) {
  const Shape& s = clean.shape;
  const SSMax<Compute<T>> scaling{Compute<T>(0.7)};
  const Output<T> expected = run(clean, scaling, mask, score, options);
  for (const index_t key : keys_of(s)) {
    for (const T poison : {T(nan<float>), T(infinity<float>), T(-infinity<float>)}) {
      const bool is_nan = std::isnan(static_cast<float>(poison));
      Problem<T> in_k = clean, in_v = clean;
      for (index_t h = 0; h < s.kv_heads; ++h) {
        T* k = in_k.k.data() + (h * s.keys + key) * s.d;
        T* v = in_v.v.data() + (h * s.keys + key) * s.dv;
        for (index_t c = 0; c < s.d; ++c) k[c] = poison;
        for (index_t c = 1; c < s.dv; c += 2) v[c] = poison;
      }
      const Output<T> of_k = run(in_k, scaling, mask, score, options),
                      of_v = run(in_v, scaling, mask, score, options);
      for (index_t row = 0; row < clean.rows(); ++row) {
        const Query query{0, row / s.queries, row % s.queries, clean.query_shape()};
        const bool sees = visible(query, key);
        const auto r = static_cast<std::size_t>(row);
        if (!same_bits(of_v.lse[r], expected.lse[r])) ++count.leaked;
        if (!sees && !same_bits(of_k.lse[r], expected.lse[r])) ++count.leaked;
        if (sees && is_nan && !std::isnan(of_k.lse[r])) ++count.lost;
        for (index_t c = 0; c < s.dv; ++c) {
          const auto at = static_cast<std::size_t>(row * s.dv + c);
          const auto is_not_finite = [&](const Output<T>& output) {
            return !std::isfinite(static_cast<float>(output.out[at]));
          };
          if (!sees && !same_bits(of_k.out[at], expected.out[at])) ++count.leaked;
          if (!(sees && c % 2 == 1) && !same_bits(of_v.out[at], expected.out[at])) ++count.leaked;
          if (sees && is_nan && !is_not_finite(of_k)) ++count.lost;
          if (sees && c % 2 == 1 && !is_not_finite(of_v)) ++count.lost;
        }
      }
    }
  }
}

template <class T, class M, class Visible, class C = ssmax::Identity>
void check_hidden(const Shape& shape, const M& mask, const Visible& visible, const C& score = {},
                  const AttentionOptions<T>& options = {}) {
  const Problem<T> clean(shape);
  for_each_target_of<T>([&](const std::string& target) {
    Count count;
    count_leaks(clean, mask, score, visible, options, count);
    INFO(target << ' ' << name_of(shape));
    CHECK(count.leaked == 0);
    CHECK(count.lost == 0);
  });
}

bool is_picked(const Query& query, index_t key) {
  return (query.index * 7919 + query.head * 31 + key * 104729) % 5 < 2;
}

/// Returns true for visible keys. Every 128th key is masked for all queries, other even keys for all but query 1.
bool is_far(const Query& query, index_t key) {
  return key % 128 == 0 ? false : key % 2 == 1 || query.index == 1;
}

TEST_CASE("keys masked by a causal mask or a window do not affect the result", "[attention][hidden]") {
  for (const Shape& shape : shapes) {
    check_hidden<float>(shape, Causal{},
                        [](const Query& query, index_t key) { return key <= query.position(); });
    check_hidden<float>(shape, SlidingWindow(9, 2), [](const Query& query, index_t key) {
      return key >= query.position() - 9 && key <= query.position() + 2;
    });
  }
}

TEST_CASE("keys masked by padding or documents do not affect the result", "[attention][hidden][slow]") {
  for (const Shape& shape : shapes) {
    const std::vector<index_t> lengths{shape.keys - 40};
    check_hidden<float>(shape, KeyLengths{lengths},
                        [&](const Query&, index_t key) { return key < lengths[0]; });
    const std::vector<index_t> queries{0, 2, shape.queries}, keys{0, 130, shape.keys};
    check_hidden<float>(shape, ssmax::Documents(queries, keys, false),
                        [&](const Query& query, index_t key) { return (query.index < 2) == (key < 130); });
  }
}

TEST_CASE("keys masked by a function do not affect the result", "[attention][hidden][slow]") {
  for (const Shape& shape : shapes) {
    check_hidden<float>(shape, Where(is_picked), is_picked);
    check_hidden<float>(shape, Where(is_far), is_far);
  }
  check_hidden<double>(shapes[0], Where(is_picked), is_picked);
  check_hidden<double>(shapes[3], Where(is_picked), is_picked);
}

TEST_CASE("keys masked by a matrix, by -inf or by compositions do not affect the result",
          "[attention][hidden][slow]") {
  for (const Shape& shape : shapes) {
    std::vector<char> matrix;
    std::vector<float> values;
    for (index_t row = 0; row < shape.heads * shape.queries; ++row) {
      for (index_t key = 0; key < shape.keys; ++key) {
        const bool picked = is_picked(Query{0, row / shape.queries, row % shape.queries}, key);
        matrix.push_back(picked ? 1 : 0);
        values.push_back(picked ? 0.25F : -infinity<float>);
      }
    }
    const std::array<index_t, 4> extents{1, shape.heads, shape.queries, shape.keys};
    const MatrixMask bools(View<const bool, 4>(reinterpret_cast<const bool*>(matrix.data()), extents));
    check_hidden<float>(shape, bools & Causal{}, [](const Query& query, index_t key) {
      return is_picked(query, key) && key <= query.position();
    });
    const ssmax::View<const float, 4> additive(values.data(), extents);
    check_hidden<float>(shape, ssmax::MatrixMask(additive), is_picked, ssmax::Bias(additive));
  }
}

TEST_CASE("masked keys do not affect the result with scores, sinks and rope", "[attention][hidden][slow]") {
  const std::vector<float> sinks{0.5F, -2, 1, 3};
  const ssmax::Rope<float> rope({.width = 2}, 1200);
  for (const Shape& shape : shapes) {
    check_hidden<float>(
        shape, Where(is_picked) & Causal{},
        [](const Query& query, index_t key) { return is_picked(query, key) && key <= query.position(); },
        ssmax::Softcap(5), {.rope = &rope, .sinks = for_heads_of(shape, sinks)});
  }
}

TEST_CASE("masked keys do not affect the result in half precision", "[attention][hidden][bfloat16][slow]") {
  for (const Shape& shape : {shapes[0], shapes[1], shapes[3]}) {
    check_hidden<ssmax::half>(shape, Where(is_picked), is_picked);
    check_hidden<ssmax::bfloat16>(shape, Causal{},
                                  [](const Query& query, index_t key) { return key <= query.position(); });
  }
}

TEST_CASE("NaN in a query affects only its row", "[attention][hidden]") {
  for (const Shape& shape : shapes) {
    const Problem<float> clean(shape);
    for (const float poison : {nan<float>, infinity<float>}) {
      Problem<float> poisoned = clean;
      const index_t row = shape.queries - 2;  // of head 0
      poisoned.q[static_cast<std::size_t>(row * shape.d)] = poison;
      for_each_target([&](const std::string& target) {
        INFO(target << ' ' << name_of(shape));
        const Output<float> expected = run(clean, SSMax<float>{}, Causal{}),
                            output = run(poisoned, SSMax<float>{}, Causal{});
        int wrong = 0;
        for (index_t i = 0; i < clean.rows() * shape.dv; ++i) {
          const auto at = static_cast<std::size_t>(i), of_row = static_cast<std::size_t>(i / shape.dv);
          const bool right = i / shape.dv == row
                                 ? std::isnan(output.out[at]) && std::isnan(output.lse[of_row])
                                 : same_bits(output.out[at], expected.out[at]) &&
                                       same_bits(output.lse[of_row], expected.lse[of_row]);
          wrong += right ? 0 : 1;
        }
        CHECK(wrong == 0);
      });
    }
  }
}

}  // namespace attention_problem::attention_hidden_test
