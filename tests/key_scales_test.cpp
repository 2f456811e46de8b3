// PagedKeys with factors: attention over a pool in 8 bits is attention over contiguous codes and factors,
// in every layout of the factors. Codes and factors that no sequence uses are NaN.

#include <bit>
#include <numeric>
#include <random>

#include "decode_sources.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace decode_problem::key_scales_test {

using ssmax::KeyScales, ssmax::PagedKeys, ssmax::PageTable;

/// The factors of a pool: [pages, P, kv_heads], the same with kv_heads before P, the factors of k and v in one tensor, and
/// factors that rows share.
enum class Layout { rows, heads_first, both_in_one, of_key, of_head, of_tensor };

bool is_shared(Layout layout) { return layout >= Layout::of_key; }

/// Codes and factors [batch][kv head][key]. A source with one run per sequence.
template <class X>
struct Stored {
  using Element = X;

  Shape shape_of_data;
  std::vector<X> k, v;
  std::vector<float> k_factors, v_factors;

  Stored(const Data<float>& data, Layout layout) : shape_of_data(data.shape) {
    round(data.k, data.shape.d, layout, k, k_factors);
    round(data.v, data.shape.dv, layout, v, v_factors);
  }
  /// Returns which rows share a factor: rows with the same number.
  std::size_t owner(std::size_t row, Layout layout) const {
    const auto longest = static_cast<std::size_t>(shape_of_data.longest());
    const auto heads = static_cast<std::size_t>(shape_of_data.kv_heads);
    if (layout == Layout::of_key) return row / longest / heads * longest + row % longest;
    if (layout == Layout::of_head) return row / longest % heads;
    return layout == Layout::of_tensor ? 0 : row;
  }
  void round(const std::vector<float>& numbers, index_t n, Layout layout, std::vector<X>& codes,
             std::vector<float>& factors) const {
    const auto width = static_cast<std::size_t>(n);
    std::vector<float> largest(numbers.size() / width);
    for (std::size_t row = 0; row < largest.size(); ++row) {
      float& factor = largest[owner(row, layout)];
      factor = std::max(factor, ssmax::StorageTraits<X>::scale(numbers.data() + row * width, n));
    }
    for (std::size_t row = 0; row < largest.size(); ++row) {
      factors.push_back(largest[owner(row, layout)]);
      for (std::size_t i = 0; i < width; ++i) codes.push_back(X(numbers[row * width + i] / factors.back()));
    }
  }
  /// Returns the numbers that the codes and factors stand for.
  Data<float> dequantized(Data<float> data) const {
    const auto widen = [](const std::vector<X>& codes, const std::vector<float>& factors, index_t n,
                          std::vector<float>& out) {
      for (std::size_t i = 0; i < out.size(); ++i)
        out[i] = static_cast<float>(codes[i]) * factors[i / static_cast<std::size_t>(n)];
    };
    widen(k, k_factors, shape_of_data.d, data.k);
    widen(v, v_factors, shape_of_data.dv, data.v);
    return data;
  }

  index_t row_of(index_t b, index_t h, index_t key) const {
    return (b * shape_of_data.kv_heads + h) * shape_of_data.longest() + key;
  }
  ssmax::KeySourceShape shape() const {
    return {shape_of_data.batch(), shape_of_data.kv_heads, shape_of_data.d, shape_of_data.dv};
  }
  index_t length(index_t b) const { return shape_of_data.length(b); }
  ssmax::KeyRange stored(index_t b) const { return {0, length(b)}; }
  KeyRun<X> run(index_t b, index_t h, index_t key) const {
    const index_t row = row_of(b, h, key), d = shape_of_data.d, dv = shape_of_data.dv;
    return {.k = k.data() + row * d,
            .k_stride = d,
            .v = v.data() + row * dv,
            .v_stride = dv,
            .count = length(b) - key,
            .k_scales = k_factors.data() + row,
            .v_scales = v_factors.data() + row};
  }
};

/// The rows of `Stored` in pages of a pool [pages, P, kv_heads, width], in random order.
template <class X>
struct Pool {
  index_t size, heads, d, dv, pages = 0, columns;
  Layout layout;
  std::vector<X> k, v;
  std::vector<float> factors;  // of k, then of v; or of both, interleaved
  std::vector<int> table, lengths;

  Pool(const Stored<X>& from, index_t a_size, Layout a_layout)
      : size(a_size),
        heads(from.shape().kv_heads),
        d(from.shape().width),
        dv(from.shape().value_width),
        layout(a_layout) {
    const index_t batch = from.shape().batch, longest = from.shape_of_data.longest();
    columns = (longest + size - 1) / size;
    pages = 2 * batch * columns;
    k.assign(static_cast<std::size_t>(pages * size * heads * d), std::bit_cast<X>(std::uint8_t{0x7F}));
    v.assign(static_cast<std::size_t>(pages * size * heads * dv), std::bit_cast<X>(std::uint8_t{0x7F}));
    factors.assign(static_cast<std::size_t>(2 * pages * size * heads),
                   std::numeric_limits<float>::quiet_NaN());
    std::vector<int> free(static_cast<std::size_t>(pages));
    std::iota(free.begin(), free.end(), 0);
    // Pairs of pages stay neighbours.
    for (std::size_t i = free.size() / 2; i-- > 1;) {
      const std::size_t other = std::mt19937(static_cast<unsigned>(i))() % (i + 1);
      std::swap_ranges(free.begin() + static_cast<std::ptrdiff_t>(2 * i),
                       free.begin() + static_cast<std::ptrdiff_t>(2 * i + 2),
                       free.begin() + static_cast<std::ptrdiff_t>(2 * other));
    }
    for (index_t b = 0; b < batch; ++b) {
      lengths.push_back(static_cast<int>(from.length(b)));
      table.insert(table.end(), free.begin() + b * columns, free.begin() + (b + 1) * columns);
      for (index_t key = 0; key < longest; ++key) {
        const index_t page = table[static_cast<std::size_t>(b * columns + key / size)], at = key % size;
        for (index_t h = 0; h < heads && key < from.length(b); ++h) {
          const KeyRun<X> row = from.run(b, h, key);
          std::copy_n(row.k, d, k.data() + ((page * size + at) * heads + h) * d);
          std::copy_n(row.v, dv, v.data() + ((page * size + at) * heads + h) * dv);
          const_cast<float&>(scales().k(page, at, h)) = row.k_scales[0];
          const_cast<float&>(scales().v(page, at, h)) = row.v_scales[0];
        }
      }
    }
  }

  KeyScales scales() const {
    View<const float, 3>::Extents strides{size * heads, heads, 1};
    if (layout == Layout::heads_first) strides = {size * heads, 1, size};
    if (layout == Layout::both_in_one) strides = {2 * size * heads, 2 * heads, 2};
    if (layout == Layout::of_key) strides = {size, 1, 0};
    if (layout == Layout::of_head) strides = {0, 0, 1};
    const float* v_factors = factors.data() + (layout == Layout::both_in_one ? 1 : pages * size * heads);
    if (layout == Layout::of_tensor)
      return KeyScales::per_tensor(k_view(), factors.data(), v_view(), v_factors);
    return {{factors.data(), {pages, size, heads}, strides}, {v_factors, {pages, size, heads}, strides}};
  }
  View<const X, 4> k_view() const { return {k.data(), {pages, size, heads, d}}; }
  View<const X, 4> v_view() const { return {v.data(), {pages, size, heads, dv}}; }
  auto keys() const {
    const View<const int, 2> entries(table.data(), {std::ssize(lengths), columns});
    return PagedKeys(k_view(), v_view(), PageTable<int>(entries, lengths), scales());
  }
};

/// Checks that calls over two sources of the same codes and factors are bit-identical, and that all results are as good as a naive loop over the dequantized data.
template <class A, class B>
void compare(const Data<float>& data, const A& got, const B& contiguous, const Expected<float>& expected,
             const std::string& target) {
  Rule rule;
  for (const bool invariant : {true, false}) {
    const AttentionOptions<float> options{.batch_invariant = invariant};
    const Output<float> a = run(data, got, Softmax{}, Causal{}, Identity{}, options);
    const Output<float> b = run(data, contiguous, Softmax{}, Causal{}, Identity{}, options);
    CHECK(a == b);
    rule.take(a, expected, name_of(data.shape));
  }
  rule.check(target);
}

TEMPLATE_TEST_CASE("attention over a pool with factors is attention over contiguous codes and factors",
                   "[decode][key_scales][slow]", Int8, Fp8E4M3, Fp8E5M2) {
  using X = TestType;
  for (const index_t queries : {1, 3, 20}) {
    const Data<float> data({4, 2, queries, 24, 17, {queries == 1 ? 1300 : 400, 20, 90}});
    for (const Layout layout : {Layout::rows, Layout::heads_first, Layout::both_in_one, Layout::of_key,
                                Layout::of_head, Layout::of_tensor}) {
      const Stored<X> stored(data, layout);
      const Expected<float> expected(stored.dequantized(data), Plan{});
      for (const index_t size : {1, 16, 700}) {
        if (size == 700 && queries != 1) continue;
        const Pool<X> pool(stored, size, layout);
        for_each_target([&](const std::string& target) {
          INFO(target << ", pages of " << size << ", layout " << static_cast<int>(layout) << ", queries "
                      << queries);
          compare(data, pool.keys(), stored, expected, target);
          if (!is_shared(layout)) compare(data, pool.keys(), filled<X>(data), expected, target);
        });
      }
    }
  }
}

TEMPLATE_TEST_CASE("bfloat16 queries over a pool with factors", "[decode][key_scales][bfloat16]", Int8,
                   Fp8E4M3, Fp8E5M2) {
  using X = TestType;
  for (const index_t queries : {1, 3, 20}) {
    const Shape shape{4, 2, queries, 64, 32, {400, 20, 90}};
    const Data<bfloat16> data(shape);
    for (const Layout layout : {Layout::rows, Layout::heads_first, Layout::of_head, Layout::of_tensor}) {
      const Stored<X> stored(Data<float>(shape), layout);
      const Pool<X> pool(stored, 16, layout);
      for_each_target_of<bfloat16>([&](const std::string& target) {
        INFO(target << ", layout " << static_cast<int>(layout) << ", queries " << queries);
        for (const bool invariant : {true, false}) {
          const AttentionOptions<bfloat16> options{.batch_invariant = invariant};
          const auto a = run(data, pool.keys(), Softmax{}, Causal{}, Identity{}, options);
          const auto b = run(data, stored, Softmax{}, Causal{}, Identity{}, options);
          CHECK(a == b);
        }
      });
    }
  }
}

TEST_CASE("only one of keys and values has factors", "[decode][key_scales]") {
  const Data<float> data({2, 1, 2, 16, 16, {40}});
  const Stored<Int8> stored(data, Layout::of_tensor);
  Data<float> held = stored.dequantized(data);
  const View<const Int8, 4> k(stored.k.data(), {40, 1, 1, 16});
  std::vector<int> table(40), lengths{40};
  std::iota(table.begin(), table.end(), 0);
  const PageTable<int> pages(View<const int, 2>(table.data(), {1, 40}), lengths);
  held.v = data.v;
  const Expected<float> expected(held, Plan{});
  const View<const float, 4> v(data.v.data(), {40, 1, 1, 16});
  check(data, PagedKeys(k, v, pages, KeyScales::per_tensor(k, stored.k_factors.data(), v, nullptr)),
        expected);
}

TEST_CASE("pages with factors are one run if the factors continue as well", "[key_scales]") {
  const std::vector<Int8> codes(8 * 16 * 2 * 4);
  const std::vector<float> factors(8 * 16 * 2);
  std::vector<int> table{0, 1, 2, 3, 4, 5, 6, 7}, lengths{128};
  const View<const Int8, 4> rows(codes.data(), {8, 16, 2, 4});
  const PageTable<int> pages(View<const int, 2>(table.data(), {1, 8}), lengths);
  const View<const float, 3> same_order(factors.data(), {8, 16, 2}),
      heads_first(factors.data(), {8, 16, 2}, {32, 1, 16});
  const auto run_of = [&](const KeyScales& scales) {
    return PagedKeys(rows, rows, pages, scales).run(0, 1, 21);
  };

  const auto joined = run_of({same_order, same_order});
  CHECK(joined.count == 128 - 21);
  CHECK(joined.k_scales == factors.data() + 2 * 21 + 1);
  CHECK(joined.v_scales_stride == 2);
  CHECK(run_of({same_order, heads_first}).count == 11);
  CHECK(run_of({heads_first, same_order}).count == 11);
  CHECK(run_of({heads_first, same_order}).k_scales == factors.data() + 32 + 16 + 5);
  CHECK(run_of({heads_first, same_order}).k_scales_stride == 1);
  const auto of_tensor = run_of(KeyScales::per_tensor(rows, factors.data(), rows, factors.data() + 1));
  CHECK(of_tensor.count == 128 - 21);
  CHECK(of_tensor.k_scales == factors.data());
  CHECK(of_tensor.v_scales == factors.data() + 1);
  CHECK(of_tensor.k_scales_stride == 0);
  CHECK(of_tensor.v_scales_stride == 0);
}

TEST_CASE("wrong factors are refused", "[key_scales][errors]") {
  const std::vector<Int8> codes(4 * 16 * 2 * 8);
  const std::vector<float> numbers(codes.size());
  std::vector<int> table{0, 1, 2, 3}, lengths{64};
  const View<const Int8, 4> k(codes.data(), {4, 16, 2, 8});
  const View<const float, 4> wide(numbers.data(), {4, 16, 2, 8});
  const PageTable<int> pages(View<const int, 2>(table.data(), {1, 4}), lengths);
  const View<const float, 3> good(numbers.data(), {4, 16, 2}), none;
  const auto refused = [&](const View<const float, 3>& k_scales, const View<const float, 3>& v_scales,
                           std::string_view message) {
    check_refused({message}, [&] { PagedKeys keys(k, k, pages, {.k = k_scales, .v = v_scales}); });
  };
  refused(none, good, "ssmax::PagedKeys: k_scales has size 0, the storage type needs a factor per row: 128");
  refused(good, none, "ssmax::PagedKeys: v_scales has size 0, the storage type needs a factor per row: 128");
  check_refused({"ssmax::PagedKeys: k_scales has size 0"}, [&] { PagedKeys keys(k, k, pages); });
  refused({numbers.data(), {3, 16, 2}}, good,
          "ssmax::PagedKeys: k_scales has extent 3 in dimension 0, k has 4");
  refused(good, {numbers.data(), {4, 16, 1}},
          "ssmax::PagedKeys: v_scales has extent 1 in dimension 2, v has 2");
  refused({nullptr, {4, 16, 2}}, good, "ssmax::PagedKeys: k_scales is null but has size 128");
  refused({numbers.data(), {4, -16, 2}}, good, "ssmax::PagedKeys: k_scales has extent -16");
  refused({numbers.data(), {4, 16, 2}, {std::numeric_limits<index_t>::max() / 4, 2, 1}}, good,
          "ssmax::PagedKeys: k_scales has extent 4 and stride");
  check_refused({"ssmax::PagedKeys: k_scales has size 128, the storage type has no factors: must be 0"},
                [&] { PagedKeys keys(wide, k, pages, {.k = good, .v = good}); });
  check_refused({"ssmax::PagedKeys: v_scales has size 128"},
                [&] { PagedKeys keys(k, wide, pages, {.k = good, .v = good}); });
  CHECK(refusal([&] { PagedKeys keys(k, k, pages, {.k = good, .v = good}); }) == "(nothing was thrown)");
  const View<const Int8, 4> empty(nullptr, {0, 16, 2, 8});
  const std::vector<int> no_keys{0};
  CHECK(refusal([&] {
          PagedKeys keys(empty, empty, PageTable<int>(View<const int, 2>(table.data(), {1, 0}), no_keys));
        }) == "(nothing was thrown)");
}

}  // namespace decode_problem::key_scales_test
