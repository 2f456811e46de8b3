// NaN and infinities in keys and values do not change one bit of the queries that do not see them: every storage type
// over a cache, every kind of mask, every path.

#include <memory>

#include "decode_problem.hpp"
#include "test.hpp"

namespace decode_problem::masked_nonfinite_test {

constexpr index_t heads = 2, d = 32, dv = 32;

/// Calls f(name, mask) for each kind of mask, or for one each of ranges, runs, a matrix and two joined masks. None shows
/// all of the keys to all queries.
template <bool every, class F>
void for_each_mask(index_t queries, index_t keys, const F& f) {
  const auto shows = [](const Query& query, index_t key) { return (key * 7 + query.index * 3) % 5 != 2; };
  const auto plane = static_cast<std::size_t>(queries * keys);
  const auto visible = std::make_unique<bool[]>(plane);
  std::vector<float> additive(plane);
  for (index_t i = 0; i < queries; ++i) {
    for (index_t key = 0; key < keys; ++key) {
      const auto at = static_cast<std::size_t>(i * keys + key);
      visible[at] = shows({.index = i}, key);
      additive[at] = visible[at] ? 0 : -std::numeric_limits<float>::infinity();
    }
  }
  const std::array<index_t, 4> extents{1, heads, queries, keys}, strides{0, 0, keys, 1};
  const View<const bool, 4> matrix(visible.get(), extents, strides);
  const View<const float, 4> addend(additive.data(), extents, strides);
  const std::vector<index_t> lengths{keys * 2 / 3};
  const ssmax::SparseBlocks blocks{.query_block = 16, .key_block = 32, .query_blocks = 19, .key_blocks = 10};
  const std::vector<std::uint64_t> bitmap(19, 0b1010011010);
  f("KeyLengths", KeyLengths{lengths});
  f("BlockSparse", ssmax::BlockSparse{blocks, bitmap});
  f("MatrixMask", ssmax::MatrixMask{matrix});
  f("SlidingWindow & MatrixRuns", SlidingWindow{70} & ssmax::MatrixRuns{matrix});
  if constexpr (every) {
    f("SlidingWindow", SlidingWindow{40, 3});
    f("SlidingWindow with first keys", SlidingWindow{49, 0, 3});
    f("MatrixRuns", ssmax::MatrixRuns{matrix});
    f("MatrixMask of an additive mask", ssmax::MatrixMask{addend});
    f("Causal & Where", Causal{} & ssmax::Where(shows));
  }
}

template <class M>
bool sees(const M& mask, const Shape& s, index_t query, index_t key) {
  const Query q{0, 0, query, {.batch = 1, .heads = heads, .queries = s.queries, .keys = s.longest()}};
  const KeyRange keys = mask.keys(q);
  return key >= keys.begin && key < keys.end && ssmax::detail::sees(mask, q, key);
}

/// Stores NaN and infinities in every third key that the first query does not see. Returns these keys.
template <class T, class M>
std::vector<index_t> poison(Data<T>& data, const M& mask) {
  using Limits = std::numeric_limits<float>;
  const T inf(Limits::infinity()), minus_inf(-Limits::infinity()), nan(Limits::quiet_NaN());
  std::vector<index_t> keys;
  for (index_t key = 0; key < data.shape.longest(); ++key) {
    if (key % 3 != 0 || sees(mask, data.shape, 0, key)) continue;
    keys.push_back(key);
    data.k_row(0, 0, key)[key % d] = key % 2 == 0 ? nan : inf;
    data.v_row(0, 0, key)[key % dv] = key % 4 < 2 ? nan : minus_inf;
  }
  return keys;
}

/// Compares the bits of the queries that do not see poison. `call` computes a call over the keys and values of its
/// argument, under a mask.
template <class T, bool every = true, class N, class Call>
void check_rows(const Data<N>& numbers, const Call& call) {
  const Shape& s = numbers.shape;
  for_each_mask<every>(s.queries, s.longest(), [&](const std::string& name, const auto& mask) {
    Data<N> bad = numbers;
    const std::vector<index_t> poisoned = poison(bad, mask);
    CHECK(std::ssize(poisoned) >= 5);
    const Output<T> clean = call(numbers, mask), result = call(bad, mask);
    bool same = true, spreads = false;
    for (index_t row = 0; row < s.rows(); ++row) {
      const bool reached =
          std::ranges::any_of(poisoned, [&](index_t key) { return sees(mask, s, row % s.queries, key); });
      const auto at = static_cast<std::size_t>(row);
      spreads = spreads || (reached && std::isnan(result.lse[at]));
      if (reached) continue;
      same = same && same_bits(clean.lse[at], result.lse[at]);
      for (std::size_t i = at * dv; i < (at + 1) * dv; ++i)
        same = same && same_bits(clean.out[i], result.out[i]);
    }
    INFO(name << ", path " << ssmax::path_name(result.explanation.path));
    CHECK(same);
    // The masks that hide other keys from other queries let the poison reach some of them.
    if (s.queries > 3 && name.find("Matrix") != std::string::npos) CHECK(spreads);
  });
}

/// Queries of T over a cache of X.
template <class X, class T>
void check_cache(const Data<T>& data) {
  const Data<Compute<X>> numbers(data.shape);
  constexpr bool every = std::same_as<X, float> || std::same_as<X, bfloat16>;
  check_rows<T, every>(numbers, [&](const auto& stored, const auto& mask) {
    return run(data, filled<X>(stored), LogN{}, mask);
  });
}

template <class T>
void check_views(const Data<T>& data) {
  const index_t keys = data.shape.longest();
  check_rows<T>(data, [&](const Data<T>& numbers, const auto& mask) {
    Output<T> result(data.shape);
    AttentionArguments<Compute<T>> a = arguments_of(data, result);
    a.k = numbers.k_view(0, keys);
    a.v = numbers.v_view(0, keys);
    a.explanation = &result.explanation;
    attention<Compute<T>>(a, LogN{}, mask);
    return result;
  });
}

Shape shape_of(index_t queries, index_t keys = 300) { return {heads, 1, queries, d, dv, {keys}}; }

constexpr index_t query_counts[] = {1, 3, 12, 40};

TEMPLATE_TEST_CASE("masked NaN and infinities in a cache do not change a bit", "[decode][eight_bit]", float,
                   double, half, bfloat16, Int8, Fp8E4M3, Fp8E5M2, Q8_0) {
  for (const index_t queries : query_counts) {
    const Data<Compute<TestType>> data(shape_of(queries));
    for_each_target([&](const std::string& target) {
      INFO(target << ", queries " << queries);
      check_cache<TestType>(data);
    });
  }
}

TEMPLATE_TEST_CASE("masked NaN and infinities in a cache do not change a bit on the bf16 path",
                   "[decode][eight_bit][bfloat16]", bfloat16, Int8, Fp8E4M3, Fp8E5M2, Q8_0) {
  for (const index_t queries : query_counts) {
    const Data<bfloat16> data(shape_of(queries));
    attention_problem::for_each_target_of_products([&](const std::string& target) {
      INFO(target << ", queries of bfloat16 " << queries);
      check_cache<TestType>(data);
    });
  }
}

TEMPLATE_TEST_CASE("masked NaN and infinities in views do not change a bit", "[attention][bfloat16]", float,
                   double, half, bfloat16) {
  for (const index_t queries : query_counts) {
    for (const index_t keys : {100, 300}) {
      const Data<TestType> data(shape_of(queries, keys));
      for_each_target_of<TestType>([&](const std::string& target) {
        INFO(target << ", queries " << queries << ", keys " << keys);
        check_views(data);
      });
    }
  }
}

}  // namespace decode_problem::masked_nonfinite_test
