// NaN and infinities in keys and values do not change one bit of the queries that do not see them: every storage type
// over a cache, every kind of mask, every path.

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <ssmax/ssmax.hpp>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "decode_problem.hpp"
#include "same_bits.hpp"
#include "target_scope.hpp"

namespace decode_problem::masked_nonfinite_test {

constexpr index_t longest = 300, heads = 2, d = 32, dv = 32;

/// Calls f(name, mask) for each kind of mask over `queries` queries and `longest` keys. None shows all of the keys to
/// all queries.
template <class F>
void for_each_mask(index_t queries, const F& f) {
  const auto shows = [](const Query& query, index_t key) { return (key * 7 + query.index * 3) % 5 != 2; };
  const auto plane = static_cast<std::size_t>(queries * longest);
  const auto visible = std::make_unique<bool[]>(plane);
  std::vector<float> additive(plane);
  for (index_t i = 0; i < queries; ++i) {
    for (index_t key = 0; key < longest; ++key) {
      const auto at = static_cast<std::size_t>(i * longest + key);
      visible[at] = shows({.index = i}, key);
      additive[at] = visible[at] ? 0 : -std::numeric_limits<float>::infinity();
    }
  }
  const std::array<index_t, 4> extents{1, heads, queries, longest}, strides{0, 0, longest, 1};
  const View<const bool, 4> matrix(visible.get(), extents, strides);
  const View<const float, 4> addend(additive.data(), extents, strides);
  const std::vector<index_t> lengths{210};
  const ssmax::SparseBlocks blocks{.query_block = 16, .key_block = 32, .query_blocks = 19, .key_blocks = 10};
  const std::vector<std::uint64_t> bitmap(19, 0b1010011010);
  f("SlidingWindow", SlidingWindow{40, 3});
  f("KeyLengths", KeyLengths{lengths});
  f("SinkWindow", SinkWindow{3, 50});
  f("BlockSparse", ssmax::BlockSparse{blocks, bitmap});
  f("MatrixRuns", ssmax::MatrixRuns{matrix});
  f("MaskMatrix", ssmax::MaskMatrix{matrix});
  f("Finite", ssmax::Finite{addend});
  f("Causal & Where", Causal{} & ssmax::Where(shows));
  f("SlidingWindow & MatrixRuns", SlidingWindow{100} & ssmax::MatrixRuns{matrix});
}

template <class M>
bool sees(const M& mask, index_t queries, index_t query, index_t key) {
  const Query q{0, 0, query, {.batch = 1, .heads = heads, .queries = queries, .keys = longest}};
  const KeyRange keys = mask.keys(q);
  return key >= keys.begin && key < keys.end && ssmax::detail::sees(mask, q, key);
}

/// Stores NaN and infinities in every third key that the first query does not see. Returns these keys.
template <class T, class M>
std::vector<index_t> poison(Data<T>& data, index_t queries, const M& mask) {
  constexpr T inf = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
  std::vector<index_t> keys;
  for (index_t key = 0; key < longest; ++key) {
    if (key % 3 != 0 || sees(mask, queries, 0, key)) continue;
    keys.push_back(key);
    data.k_row(0, 0, key)[key % d] = key % 2 == 0 ? nan : inf;
    data.v_row(0, 0, key)[key % dv] = key % 4 < 2 ? nan : -inf;
  }
  return keys;
}

/// Queries of T over a cache of X, in which `numbers` are stored.
template <class X, class T>
void check_rows(const Data<T>& data, const Data<Compute<X>>& numbers) {
  const Shape& s = data.shape;
  for_each_mask(s.queries, [&](const std::string& name, const auto& mask) {
    Data<Compute<X>> bad = numbers;
    const std::vector<index_t> poisoned = poison(bad, s.queries, mask);
    CHECK(std::ssize(poisoned) >= 10);
    const Output<T> clean = run(data, filled<X>(numbers), LogN{}, mask),
                    result = run(data, filled<X>(bad), LogN{}, mask);
    bool same = true, spreads = false;
    for (index_t row = 0; row < s.rows(); ++row) {
      const bool reached = std::ranges::any_of(
          poisoned, [&](index_t key) { return sees(mask, s.queries, row % s.queries, key); });
      const auto at = static_cast<std::size_t>(row);
      spreads = spreads || (reached && std::isnan(result.lse[at]));
      if (reached) continue;
      const auto bits = [&](const Output<T>& output) {
        std::vector<T> out(output.out.begin() + row * dv, output.out.begin() + (row + 1) * dv);
        return std::pair(std::move(out), std::vector{output.lse[at]});
      };
      const auto [out, lse] = bits(clean);
      const auto [bad_out, bad_lse] = bits(result);
      same = same && same_bits(out, bad_out) && same_bits(lse, bad_lse);
    }
    INFO(name << ", path " << ssmax::path_name(result.explanation.path));
    CHECK(same);
    // The masks that hide other keys from other queries let the poison reach some of them.
    if (s.queries > 3 && name.find("Matrix") != std::string::npos) CHECK(spreads);
  });
}

constexpr index_t query_counts[] = {1, 3, 12, 40};

Shape shape_of(index_t queries) { return {heads, 1, queries, d, dv, {longest}}; }

TEMPLATE_TEST_CASE("masked NaN and infinities do not change a bit", "[decode][eight_bit]", float, double,
                   half, bfloat16, Int8, Fp8E4M3, Fp8E5M2, Q8_0) {
  for (const index_t queries : query_counts) {
    const Data<Compute<TestType>> numbers(shape_of(queries));
    for_each_target([&](const std::string& target) {
      INFO(target << ", queries " << queries);
      check_rows<TestType>(numbers, numbers);
    });
  }
}

TEMPLATE_TEST_CASE("masked NaN and infinities do not change a bit on the bf16 path",
                   "[decode][eight_bit][bfloat16]", bfloat16, Int8, Fp8E4M3, Fp8E5M2, Q8_0) {
  for (const index_t queries : query_counts) {
    const Data<float> numbers(shape_of(queries));
    const Data<bfloat16> data(shape_of(queries));
    attention_problem::for_each_target_of_products([&](const std::string& target) {
      INFO(target << ", queries " << queries);
      check_rows<TestType>(data, numbers);
    });
  }
}

}  // namespace decode_problem::masked_nonfinite_test
