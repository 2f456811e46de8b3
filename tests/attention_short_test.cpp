// Many short sequences: kv heads of at most 128 keys take their own path. The path agrees with the formula and is
// bit-identical to long sequences with the same visible keys.

#include "attention_problem.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace attention_problem::attention_short_test {

/// From the fewest queries on that go this way: parts of a vector, one and several, groups of two vectors and
/// of three; keys and channels that fill passes and vectors and that do not.
constexpr std::array<Shape, 12> shapes{{
    // batch, heads, kv_heads, queries, keys, d, dv
    {70, 2, 2, 4, 24, 16, 16},
    {3, 4, 2, 2, 3, 5, 7},
    {2, 1, 1, 5, 1, 1, 1},
    {9, 4, 4, 16, 16, 16, 16},
    {2, 3, 1, 7, 18, 9, 24},
    {2, 2, 2, 24, 24, 16, 40},
    {1, 2, 2, 32, 32, 8, 8},
    {1, 4, 1, 9, 50, 33, 17},
    {2, 2, 2, 64, 64, 32, 64},
    {1, 1, 1, 65, 127, 12, 48},
    {1, 1, 1, 300, 128, 16, 16},
    {2, 2, 1, 6, 0, 4, 4},
}};

TEST_CASE("short sequences: full, causal and padded", "[attention][short]") {
  for (const Shape& shape : shapes) {
    check_mask<float>(shape, Full{}, all_keys);
    check_mask<float>(shape, Causal{}, before);
    std::vector<index_t> lengths;
    for (index_t batch = 0; batch < shape.batch; ++batch) lengths.push_back(batch * 7 % (shape.keys + 1));
    check_mask<float>(shape, KeyLengths{lengths}, [&](const Query& query, index_t key) {
      return key < lengths[static_cast<std::size_t>(query.batch)];
    });
  }
  check_mask<double>(shapes[5], Causal{}, before);
  check_mask<ssmax::half>(shapes[4], Causal{}, before);
  check_mask<ssmax::bfloat16>(shapes[5], Full{}, all_keys);
}

/// Appends `extra` poisoned keys to every kv head.
template <class T>
Problem<T> lengthened(const Problem<T>& problem, index_t extra) {
  Shape shape = problem.shape;
  shape.keys += extra;
  Problem<T> result(shape);
  result.q = problem.q;
  const auto lengthen = [&](const std::vector<T>& rows, index_t width) {
    std::vector<T> all;
    const auto size = static_cast<std::size_t>(problem.shape.keys * width);
    for (index_t head = 0; head < shape.batch * shape.kv_heads; ++head) {
      const auto first = rows.begin() + static_cast<std::ptrdiff_t>(size) * head;
      all.insert(all.end(), first, first + static_cast<std::ptrdiff_t>(size));
      all.insert(all.end(), static_cast<std::size_t>(extra * width), T(nan<float>));
    }
    return all;
  };
  result.k = lengthen(problem.k, shape.d);
  result.v = lengthen(problem.v, shape.dv);
  return result;
}

template <class T, class C = ssmax::Identity>
void check_bits(const Shape& shape, const C& score = {}, const AttentionOptions<T>& options = {}) {
  static ssmax::ThreadPool three(3);
  const FourHeads<Compute<T>> heads(shape.heads);
  const Problem<T> problem(shape), longer = lengthened(problem, 150);
  const std::vector<index_t> lengths(static_cast<std::size_t>(shape.batch), shape.keys);
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target << ' ' << name_of(shape));
    const Output<T> result = run(problem, heads.scaling(), Full{}, score, options);
    CHECK(result.explanation.path == Path::short_keys);
    CHECK(result.explanation.key_chunks == 1);
    CHECK(run(problem, heads.scaling(), Full{}, score, options, three) == result);
    CHECK(run(problem, heads.scaling(), Full{}, score, options, test_executors::Reverse{64}) == result);
    CHECK(run(problem, heads.scaling(), KeyLengths{lengths}, score, options) == result);
    // Few queries on more keys take another path, and with a rope the queries have other positions.
    if (shape.queries * shape.heads / shape.kv_heads <= 16 || options.rope != nullptr) return;
    AttentionOptions<T> in_float = options;  // short sequences also use float products
    in_float.float_products = true;
    const Output<T> of_longer = run(longer, heads.scaling(), KeyLengths{lengths}, score, in_float);
    const index_t rows = shape.queries * shape.heads / shape.kv_heads;
    CHECK(of_longer.explanation.path == (rows > 16 ? Path::prefill : Path::decode));
    CHECK(of_longer == result);
  });
}

TEST_CASE("short sequences: bit-identical for any executor and to long sequences", "[attention][short]") {
  const ssmax::Rope<float> rope({.width = 8}, 800);
  const std::vector<float> sinks{0.5F, -1, -infinity<float>, 3};
  for (const Shape& shape : shapes) {
    check_bits<float>(shape);
    check_bits<float>(shape, ssmax::Softcap{2});
    check_bits<float>(shape, ssmax::Identity{}, {.sinks = for_heads_of(shape, sinks)});
    if (shape.d >= 8) check_bits<float>(shape, ssmax::Identity{}, {.rope = &rope, .key_position = 400});
    check_bits<double>(shape);
    check_bits<ssmax::half>(shape);
    check_bits<ssmax::bfloat16>(shape);
  }
}

TEST_CASE("short sequences: NaN and infinity affect only the queries that see the key",
          "[attention][short]") {
  for (const Shape& shape : shapes) {
    if (shape.keys < 16) continue;
    const FourHeads<float> heads(shape.heads);
    Problem<float> problem(shape);
    const index_t hidden = shape.keys - 1;
    const auto see_all_but_one = [&](const Query& query, index_t key) {
      return key != hidden || query.index % 3 == 1;
    };
    const ssmax::Where mask(see_all_but_one);
    for_each_target([&](const std::string& target) {
      INFO(target << ' ' << name_of(shape));
      Problem<float> poisoned = problem;
      const Output<float> clean = run(problem, heads.scaling(), mask);
      for (index_t head = 0; head < shape.batch * shape.kv_heads; ++head) {
        const auto at = static_cast<std::size_t>((head * shape.keys + hidden) * shape.dv);
        poisoned.v[at] = head % 2 == 0 ? nan<float> : infinity<float>;
      }
      const Output<float> result = run(poisoned, heads.scaling(), mask);
      CHECK(result.explanation.path == Path::short_keys);
      int leaked = 0, lost = 0;
      for (index_t row = 0; row < problem.rows(); ++row) {
        const auto at = static_cast<std::size_t>(row * shape.dv);
        const bool sees = row % shape.queries % 3 == 1;
        if (sees && std::isfinite(result.out[at])) ++lost;
        if (!sees && result.out[at] != clean.out[at]) ++leaked;
      }
      CHECK(leaked == 0);
      CHECK(lost == 0);
    });
  }
}

/// A mask under which the first queries see some keys and later queries see all keys.
struct Growing {
  ssmax::KeyRange keys(const Query& query) const { return {0, std::min(query.index + 1, query.shape.keys)}; }
};

TEST_CASE("short sequences: NaN and infinity reach query blocks that see all keys", "[attention][short]") {
  const Shape shape{2, 2, 1, 150, 40, 8, 24};
  Problem<float> problem(shape);
  for (index_t batch = 0; batch < shape.batch; ++batch) {
    problem.v[static_cast<std::size_t>((batch * shape.keys + 3) * shape.dv + 1)] = nan<float>;
  }
  for_each_target([&](const std::string&) {
    const Output<float> result = run(problem, ssmax::Softmax{}, Growing{});
    CHECK(result.explanation.path == Path::short_keys);
    int wrong = 0;
    for (index_t row = 0; row < problem.rows(); ++row) {
      const bool sees = row % shape.queries >= 3;
      wrong += std::isnan(result.out[static_cast<std::size_t>(row * shape.dv + 1)]) != sees;
      wrong += std::isnan(result.out[static_cast<std::size_t>(row * shape.dv)]);
    }
    CHECK(wrong == 0);
  });
}

}  // namespace attention_problem::attention_short_test
