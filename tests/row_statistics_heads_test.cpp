// Statistics of heads against loops in long double: the maximum and the means over queries and batch entries.

#include "reference.hpp"
#include "refusal.hpp"
#include "same_bits.hpp"
#include "test.hpp"

namespace row_statistics_heads_test {

using namespace ssmax;
using reference::Real;

const auto at = [](auto& numbers, index_t i) -> auto& { return numbers[static_cast<std::size_t>(i)]; };

/// Statistics [batch 3, heads 2, queries 7] whose rows lie 9 apart.
template <class T>
struct Rows {
  static constexpr index_t batch = 3, heads = 2, queries = 7, pitch = 9;
  std::vector<T> largest = numbers(1), entropy = numbers(2), squares = numbers(3);

  static std::vector<T> numbers(unsigned seed) {
    std::vector<T> result = reference::normals<T>(batch * heads * pitch, seed);
    if (seed == 3) {
      for (T& number : result) number = T(0.01) + std::abs(number);
    }
    return result;
  }
  static View<T, 3> view(std::vector<T>& all) {
    return {all.data(), {batch, heads, queries}, {heads * pitch, pitch, 1}};
  }
  RowStatistics<T> statistics() {
    return {.largest = view(largest), .sum_of_squares = view(squares), .entropy = view(entropy)};
  }
};

template <class T>
struct Heads {
  std::vector<T> largest = std::vector<T>(2, T(-77)), entropy = largest, keys = largest;

  HeadStatistics<T> statistics() { return {largest, entropy, keys}; }
};

TEMPLATE_TEST_CASE("statistics of heads are maximum and means of rows", "[attention]", float, double) {
  using T = TestType;
  Rows<T> rows;
  Heads<T> heads;
  at(rows.squares, 9 + 3) = 0;  // head 1: a row without visible keys
  at(rows.entropy, 9 + 3) = T(1e6);
  reduce_heads(rows.statistics(), heads.statistics());
  for (index_t h = 0; h < 2; ++h) {
    Real top = -reference::infinity, entropy = 0, keys = 0, count = 0;
    for (index_t b = 0; b < 3; ++b) {
      for (index_t i = 0; i < 7; ++i) {
        const index_t row = (b * 2 + h) * 9 + i;
        top = std::max(top, Real(at(rows.largest, row)));
        if (at(rows.squares, row) == 0) continue;
        entropy += Real(at(rows.entropy, row));
        keys += 1 / Real(at(rows.squares, row));
        ++count;
      }
    }
    CHECK(count == (h == 0 ? 21 : 20));
    const Real bound = Real(std::numeric_limits<T>::epsilon()) / 2 + 16 * Real(0x1p-52);  // one rounding to T
    CHECK(Real(at(heads.largest, h)) == top);
    CHECK(std::abs(Real(at(heads.entropy, h)) - entropy / count) <= bound);
    CHECK(std::abs(Real(at(heads.keys, h)) - keys / count) <= bound * keys / count);
  }
}

TEST_CASE("NaN in a row makes the statistics of its head NaN", "[attention]") {
  for (const index_t row : {0, 6, 36 + 3}) {  // of head 0
    INFO(row);
    Rows<float> rows;
    Heads<float> clean, spoiled;
    reduce_heads(rows.statistics(), clean.statistics());
    for (auto* numbers : {&rows.largest, &rows.entropy, &rows.squares})
      at(*numbers, row) = std::numeric_limits<float>::quiet_NaN();
    reduce_heads(rows.statistics(), spoiled.statistics());
    for (const auto member : {&Heads<float>::largest, &Heads<float>::entropy, &Heads<float>::keys}) {
      CHECK(std::isnan((spoiled.*member)[0]));
      CHECK(same_bits((spoiled.*member)[1], (clean.*member)[1]));
    }
  }
}

TEST_CASE("a head without visible keys has means of 0", "[attention]") {
  std::vector<float> largest(2, -std::numeric_limits<float>::infinity()), zeros(2);
  Heads<float> heads;
  const auto view = [](std::vector<float>& numbers) { return View<float, 3>(numbers.data(), {1, 2, 1}); };
  reduce_heads<float>({.largest = view(largest), .sum_of_squares = view(zeros), .entropy = view(zeros)},
                      heads.statistics());
  CHECK(heads.largest == largest);
  CHECK(heads.entropy == zeros);
  CHECK(heads.keys == zeros);
  const View<float, 3> none(nullptr, {0, 2, 5});
  reduce_heads<float>({.largest = none, .sum_of_squares = none}, {heads.largest, {}, heads.keys});
  CHECK(heads.largest == largest);
  CHECK(heads.keys == zeros);
}

TEST_CASE("statistics of heads: one alone, and wrong ones are refused", "[attention][errors]") {
  Rows<float> rows;
  Heads<float> heads, all;
  reduce_heads(rows.statistics(), all.statistics());
  reduce_heads<float>({.sum_of_squares = Rows<float>::view(rows.squares)}, {.effective_keys = heads.keys});
  CHECK(same_bits(heads.keys, all.keys));
  CHECK(heads.largest[0] == -77);

  std::vector<float> three(3);
  const auto refused = [&](std::initializer_list<std::string_view> words, const HeadStatistics<float>& to) {
    check_refused(words, [&] { reduce_heads(rows.statistics(), to); });
  };
  refused({"ssmax::reduce_heads: heads.largest has extent 3", "rows.largest", "2"}, {.largest = three});
  refused({"heads.entropy has extent 3", "rows.entropy", "2"}, {.entropy = three});
  refused({"heads.effective_keys has extent 3", "rows.sum_of_squares", "2"}, {.effective_keys = three});
  refused({"heads.largest", "overlaps", "heads.entropy"}, {.largest = heads.keys, .entropy = heads.keys});
  refused({"heads.largest", "overlaps", "rows.largest"}, {.largest = {rows.largest.data(), {2}}});
  refused({"heads.largest", "overlaps", "rows.entropy"},
          {.largest = {rows.entropy.data(), {2}}, .entropy = heads.entropy});
  refused({"heads.entropy", "overlaps", "rows.largest"},
          {.largest = heads.largest, .entropy = {rows.largest.data(), {2}}});
  check_refused({"heads.entropy has extent 2", "rows.sum_of_squares", "0"}, [&] {
    reduce_heads<float>({.entropy = Rows<float>::view(rows.entropy)}, {.entropy = heads.entropy});
  });
}

}  // namespace row_statistics_heads_test
