// PagedKeys with factors per channel: attention over a pool in 8 bits whose pages have a factor per channel is attention
// over the dequantized numbers. Codes and factors that no sequence uses are NaN or infinite.

#include <bit>
#include <numeric>
#include <random>
#include <set>

#include "attention_problem.hpp"
#include "decode_problem.hpp"
#include "dequantized_codes.hpp"
#include "own_int8.hpp"
#include "refusal.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace decode_problem::channel_scales_test {

using attention_problem::for_each_target_of_products;
using ssmax::ChannelScales, ssmax::KeyScales, ssmax::PagedKeys, ssmax::PageTable;

constexpr float nan = std::numeric_limits<float>::quiet_NaN(),
                infinity = std::numeric_limits<float>::infinity();

/// The factors that keys, or values, have.
enum class Factors { rows, channels, both };
bool has_rows(Factors factors) { return factors != Factors::channels; }
bool has_channels(Factors factors) { return factors != Factors::rows; }

/// The order of a sequence's pages in the pool.
enum class Order { neighbours, random };

/// The codes of keys, or of values, and their factors. Factors of channels are [pages, kv_heads, n] or, if they are
/// strided, lie in [kv_heads, pages, 2, n + 3].
template <class X>
struct Tensor {
  index_t pages, size, heads, n;
  Factors factors;
  bool strided;
  std::vector<X> codes;                                // [pages, size, heads, n]
  std::vector<float> of_rows, of_channels, unlimited;  // of_rows: [pages, size, heads]

  Tensor(index_t a_pages, index_t a_size, index_t a_heads, index_t width, Factors a_factors, bool is_strided)
      : pages(a_pages), size(a_size), heads(a_heads), n(width), factors(a_factors), strided(is_strided) {
    const auto rows = static_cast<std::size_t>(pages * size * heads);
    codes.assign(rows * static_cast<std::size_t>(n), std::bit_cast<X>(std::uint8_t{0x7F}));
    of_rows.assign(rows, nan);
    of_channels.assign(static_cast<std::size_t>(2 * pages * heads * (n + 3)), nan);
    for (std::size_t i = 0; i < of_channels.size(); i += 2) of_channels[i] = infinity;
  }
  View<const X, 4> view() const { return {codes.data(), {pages, size, heads, n}}; }
  View<const float, 3> rows() const {
    if (!has_rows(factors)) return {};
    return {of_rows.data(), {pages, size, heads}};
  }
  View<const float, 3> channels() const {
    if (!has_channels(factors)) return {};
    const index_t row = n + 3;
    if (strided) return {of_channels.data() + 2, {pages, heads, n}, {2 * row, pages * 2 * row, 1}};
    return {of_channels.data(), {pages, heads, n}};
  }
  /// Writes a row of codes and its factors, and replaces the numbers by those that the codes and factors stand for.
  /// `block` chooses the factors of the channels.
  void write(index_t page, index_t at, index_t head, index_t key, index_t block, float* numbers) {
    const float of_row = 0.008f * std::exp2(static_cast<float>((key + head) % 3));
    if (has_rows(factors)) const_cast<float&>(rows()(page, at, head)) = of_row;
    for (index_t c = 0; c < n; ++c) {
      const float of_channel =
          (has_rows(factors) ? 1.1f : 0.02f) * std::exp2(static_cast<float>((3 * block + head + c) % 5) / 2);
      if (has_channels(factors)) const_cast<float&>(channels()(page, head, c)) = of_channel;
      const X code(numbers[c] * 20);
      codes[static_cast<std::size_t>(((page * size + at) * heads + head) * n + c)] = code;
      numbers[c] = static_cast<float>(code);
      if (has_rows(factors)) numbers[c] *= of_row;
      if (has_channels(factors)) numbers[c] *= of_channel;
    }
  }
};

/// How a pool stores keys and values.
struct Form {
  index_t size;  // keys of a page
  Factors k, v;
  bool strided = false;
  index_t block = 0;  // keys that share the factors of channels, 0: those of a page
};

/// Sequences of a shape in the pages of a pool, and the numbers that codes and factors stand for.
template <class X>
struct Pool {
  Data<float> numbers;
  index_t columns;
  Tensor<X> k, v;
  std::vector<int> table, lengths;

  Pool(const Shape& shape, const Form& form, Order order = Order::random)
      : numbers(shape),
        columns((shape.longest() + form.size - 1) / form.size),
        k(2 * shape.batch() * columns, form.size, shape.kv_heads, shape.d, form.k, form.strided),
        v(k.pages, form.size, shape.kv_heads, shape.dv, form.v, form.strided) {
    table.resize(static_cast<std::size_t>(k.pages));
    std::iota(table.begin(), table.end(), 0);
    if (order == Order::random) std::shuffle(table.begin(), table.end(), std::mt19937(7));
    table.resize(table.size() / 2);
    for (index_t b = 0; b < shape.batch(); ++b) {
      lengths.push_back(static_cast<int>(shape.length(b)));
      for (index_t key = 0; key < shape.length(b); ++key) {
        const index_t page = table[static_cast<std::size_t>(b * columns + key / form.size)],
                      block = b + key / (form.block == 0 ? form.size : form.block);
        for (index_t h = 0; h < shape.kv_heads; ++h) {
          k.write(page, key % form.size, h, key, block, numbers.k_row(b, h, key));
          v.write(page, key % form.size, h, key, block, numbers.v_row(b, h, key));
        }
      }
    }
  }
  KeyScales scales() const { return {k.rows(), v.rows()}; }
  ChannelScales channel_scales() const { return {k.channels(), v.channels()}; }
  PageTable<int> pages() const {
    return {View<const int, 2>(table.data(), {std::ssize(lengths), columns}), lengths};
  }
  auto keys() const { return PagedKeys(k.view(), v.view(), pages(), scales(), channel_scales()); }
  /// Returns a bfloat16 cache of the numbers, each rounded once.
  KvCache<bfloat16> rounded() const {
    Data<bfloat16> held(numbers.shape);
    const auto to_bfloat16 = [](float x) { return bfloat16(x); };
    std::ranges::transform(numbers.k, held.k.begin(), to_bfloat16);
    std::ranges::transform(numbers.v, held.v.begin(), to_bfloat16);
    return filled<bfloat16>(held);
  }
};

struct Case {
  Shape shape;
  Form form;
};

using enum Factors;
const std::vector<Case> cases{
    // heads, kv_heads, queries, d, dv, lengths; keys of a page, factors of keys, of values
    {{4, 2, 1, 64, 72, {300, 40, 7}}, {16, channels, channels}},
    {{4, 2, 3, 72, 64, {300, 40, 7}}, {32, channels, rows}},
    {{4, 2, 2, 64, 64, {130, 50}}, {1, both, both}},
    {{2, 1, 20, 72, 40, {200, 33}}, {48, rows, channels}},
    {{4, 2, 40, 64, 72, {140, 40}}, {16, both, channels, true}},
    {{6, 2, 5, 64, 72, {1100, 90}}, {48, channels, both, true}},
    {{1, 1, 1, 72, 72, {1100}}, {32, both, both}},
    {{2, 1, 40, 40, 24, {60}}, {16, channels, channels}},
    {{3, 1, 4, 7, 5, {50}}, {33, both, both, true}},
};

TEMPLATE_TEST_CASE("attention over pages with factors of channels is attention over the dequantized numbers",
                   "[decode][channel_scales]", Int8, Fp8E4M3, Fp8E5M2) {
  std::set<Path> paths;
  for (const Case& one : cases) {
    const Shape& shape = one.shape;
    const Form& form = one.form;
    const Pool<TestType> pool(shape, form), in_order(shape, form, Order::neighbours);
    const Expected<float> expected(pool.numbers, Plan{});
    for_each_target([&](const std::string& target) {
      INFO(target << ", pages of " << form.size);
      Rule rule;
      for (const bool invariant : {true, false}) {
        const AttentionOptions<float> options{.batch_invariant = invariant};
        const auto got = run(pool.numbers, pool.keys(), Softmax{}, Causal{}, Identity{}, options);
        rule.take(got, expected, name_of(shape));
        CHECK(got == run(pool.numbers, in_order.keys(), Softmax{}, Causal{}, Identity{}, options));
        CHECK(got == run(pool.numbers, pool.keys(), Softmax{}, Causal{}, Identity{}, options,
                         test_executors::Threads{3}));
        if (invariant) {
          CHECK(got ==
                run(pool.numbers, filled<float>(pool.numbers), Softmax{}, Causal{}, Identity{}, options));
        }
        paths.insert(got.explanation.path);
      }
      rule.check(target);
    });
  }
  CHECK(paths.contains(Path::decode));
  CHECK(paths.contains(Path::prefill));
}

TEMPLATE_TEST_CASE("a call of attention over pages with factors of channels", "[channel_scales]", Int8,
                   Fp8E4M3, Fp8E5M2) {
  const Shape shape{4, 2, 40, 72, 40, {90, 40}};
  const Pool<TestType> pool(shape, {16, channels, both});
  const Expected<float> expected(pool.numbers, Plan{});
  for_each_target([&](const std::string&) {
    Output<float> got(shape);
    ssmax::attention(
        over(with(arguments_of(pool.numbers, got), AttentionOptions<float>{.explanation = &got.explanation}),
             pool.keys()),
        Causal{});
    CHECK(got.explanation.path == Path::short_keys);
    check_output(got, expected, name_of(shape));
  });
}

TEMPLATE_TEST_CASE("bfloat16 queries over pages with factors of channels",
                   "[bfloat16][products][channel_scales]", Int8, Fp8E4M3, Fp8E5M2) {
  std::vector<Case> wide = cases;  // at least 5 rows per kv head, for the bf16 path
  for (Case& one : wide) one.shape.heads = one.shape.kv_heads * std::max<index_t>(6, one.shape.heads);
  wide.push_back({{8, 1, 1, 96, 136, {1300}}, {16, channels, channels}});  // prefetches
  for (const Case& one : wide) {
    const Shape& shape = one.shape;
    const Form& form = one.form;
    const Data<bfloat16> data(shape);
    const Pool<TestType> pool(shape, form), in_order(shape, form, Order::neighbours);
    const KvCache<bfloat16> rounded = pool.rounded();
    for_each_target_of_products([&](const std::string& target) {
      INFO(target << ", pages of " << form.size << ", " << name_of(shape));
      const Output<bfloat16> got = run(data, pool.keys()), expected = run(data, rounded);
      CHECK(got.explanation.path == expected.explanation.path);
      CHECK((got.explanation.path == Path::decode_bf16 || got.explanation.path == Path::prefill_bf16));
      CHECK(got == expected);
      CHECK(got == run(data, in_order.keys()));
      CHECK(run(data, pool.keys(), Softmax{}, ssmax::SlidingWindow{99, 0, 4}) ==
            run(data, rounded, Softmax{}, ssmax::SlidingWindow{99, 0, 4}));
    });
  }
}

TEMPLATE_TEST_CASE("few bfloat16 queries over pages with factors of channels", "[channel_scales]", Int8,
                   Fp8E4M3, Fp8E5M2) {
  const Shape shape{2, 1, 2, 72, 64, {300, 20}};
  const Pool<TestType> pool(shape, {16, both, channels});
  Data<float> wide = pool.numbers;
  const Data<bfloat16> data(shape);
  std::ranges::transform(data.q, wide.q.begin(), [](bfloat16 x) { return static_cast<float>(x); });
  const Expected<float> expected(wide, Plan{});
  for_each_target_of<bfloat16>([&](const std::string&) {
    const Output<bfloat16> got = run(data, pool.keys());
    CHECK(got.explanation.path == Path::decode);
    const Output<float> floats = run(wide, pool.keys());
    check_output(floats, expected, name_of(shape));
    int wrong = 0;
    for (std::size_t i = 0; i < got.out.size(); ++i)
      wrong +=
          std::abs(static_cast<float>(got.out[i]) - floats.out[i]) > std::abs(floats.out[i]) / 200 + 1e-5f;
    CHECK(wrong == 0);
  });
}

TEMPLATE_TEST_CASE(
    "every code, factor of a row and factor of a channel is dequantized to the nearest bfloat16",
    "[products][channel_scales]", Int8, Fp8E4M3, Fp8E5M2) {
  for_each_target_of_products([&](const std::string&) {
    for (const float factor : {1.0f, 0.7f, 3e-20f, 1.5e38f, nan}) {
      std::vector<float> channels(256);
      for (std::size_t c = 0; c < 256; ++c)
        channels[c] =
            c % 17 == 3 ? infinity : (factor > 1e38f ? 1e-6f : 0.3f) * static_cast<float>(1 + c % 7);
      for (const index_t n : {1, 31, 32, 33, 40, 72, 256})
        check_dequantized_codes<TestType>(factor, n, channels);
    }
  });
}

TEST_CASE("only keys have 8 bits and factors of channels", "[decode][channel_scales]") {
  const Shape shape{2, 1, 2, 16, 24, {96}};
  const Pool<Int8> pool(shape, {16, channels, rows}, Order::neighbours);
  Data<float> numbers = pool.numbers;
  const std::vector<float> v(static_cast<std::size_t>(pool.v.pages * 16 * 24), 0.25f);
  std::ranges::fill(numbers.v, 0.25f);
  const Expected<float> expected(numbers, Plan{});
  const View<const float, 4> v_view(v.data(), {pool.v.pages, 16, 1, 24});
  const PagedKeys keys(pool.k.view(), v_view, pool.pages(), {}, {.k = pool.k.channels()});
  check(numbers, keys, expected);
}

TEST_CASE("a user's storage type with factors of channels", "[decode][channel_scales]") {
  for (const index_t queries : {2, 20}) {
    const Shape shape{2, 1, queries, 24, 17, {100}};
    const Pool<Int8> pool(shape, {16, both, channels});
    std::vector<OwnInt8> k, v;
    for (const Int8 x : pool.k.codes) k.emplace_back(static_cast<float>(x.value));
    for (const Int8 x : pool.v.codes) v.emplace_back(static_cast<float>(x.value));
    const View<const OwnInt8, 4> k_view(k.data(), {pool.k.pages, 16, 1, 24}),
        v_view(v.data(), {pool.v.pages, 16, 1, 17});
    const PagedKeys keys(k_view, v_view, pool.pages(), pool.scales(), pool.channel_scales());
    const Expected<float> expected(pool.numbers, Plan{});
    check(pool.numbers, keys, expected);
  }
}

TEMPLATE_TEST_CASE("pages with factors of channels and keys that are rotated in the call",
                   "[decode][channel_scales]", Int8, Fp8E4M3, Fp8E5M2) {
  for (const index_t queries : {1, 20}) {
    const Shape shape{4, 2, queries, 72, 40, {300, 33}};
    const Pool<TestType> pool(shape, {16, both, channels});
    const ssmax::RopeOptions options{.width = 72};
    const ssmax::Rope<float> rope(options, 400);
    const Expected<float> expected(pool.numbers, Plan{.rope = &options});
    for_each_target([&](const std::string& target) {
      INFO(target << ", queries " << queries);
      const auto got = run(pool.numbers, pool.keys(), Softmax{}, Causal{}, Identity{},
                           {.rope = &rope, .rotate_source_keys = true});
      // The tables of angles are rounded to float.
      CHECK(largest_error(got.out, expected.exact.out) < 1e-4 * largest(expected.exact.out));
      CHECK(largest_error(got.lse, expected.exact.lse) < 1e-4 * largest(expected.exact.lse));
    });
  }
}

TEMPLATE_TEST_CASE("factors of channels: with batch_invariant, results do not depend on the size of pages",
                   "[channel_scales][bfloat16]", Int8, Fp8E4M3) {
  for (const index_t queries : {1, 20}) {
    const Shape shape{4, 2, queries, 64, 72, {300, 40}};
    const Pool<TestType> large(shape, {48, both, channels}), small(shape, {16, both, channels, false, 48});
    const Data<bfloat16> rounded(shape);
    for_each_target_of<bfloat16>([&](const std::string& target) {
      INFO(target << ", queries " << queries);
      CHECK(run(large.numbers, large.keys(), Softmax{}, Causal{}, Identity{}, {.batch_invariant = true}) ==
            run(large.numbers, small.keys(), Softmax{}, Causal{}, Identity{}, {.batch_invariant = true}));
      CHECK(run(rounded, large.keys(), Softmax{}, Causal{}, Identity{}, {.batch_invariant = true}) ==
            run(rounded, small.keys(), Softmax{}, Causal{}, Identity{}, {.batch_invariant = true}));
    });
  }
}

/// Pages of 200 keys reach over several blocks that the mask of runs skips for one sequence and not for the other.
TEST_CASE("factors of channels: results are bit-identical with and without common keys, under a mask of runs",
          "[decode][channel_scales]") {
  const index_t queries = 1, longest = 1230;
  const Pool<Int8> pool({2, 1, queries, 64, 72, {longest}}, {200, channels, channels});
  std::vector<int> table = pool.table, lengths{1200, longest};
  table.insert(table.begin(), pool.table.begin(), pool.table.begin() + pool.columns);
  const View<const int, 2> entries(table.data(), {2, pool.columns});
  const Data<float> both_sequences({2, 1, queries, 64, 72, {1200, longest}});
  const ssmax::SlidingWindow mask{1099, 0, 4};
  for_each_target([&](const std::string&) {
    const PagedKeys keys(pool.k.view(), pool.v.view(), PageTable<int>(entries, lengths), {},
                         pool.channel_scales());
    const auto together = run(both_sequences, keys, Softmax{}, mask);
    CHECK(together.explanation.shared_sequences == 2);
    Data<float> last({2, 1, queries, 64, 72, {longest}});
    std::copy_n(both_sequences.q.data() + last.q.size(), last.q.size(), last.q.data());
    const auto alone = run(last, pool.keys(), Softmax{}, mask);
    CHECK(alone.explanation.path == Path::decode);
    CHECK(std::equal(alone.out.begin(), alone.out.end(), together.out.begin() + std::ssize(alone.out)));
  });
}

TEMPLATE_TEST_CASE("common pages with factors of channels", "[decode][channel_scales]", Int8, Fp8E5M2) {
  for (const index_t queries : {1, 4}) {
    const Shape shape{4, 2, queries, 64, 72, {1500, 1400}};
    const Pool<TestType> pool(shape, {48, channels, both});
    // Both sequences begin with the pages of the first.
    std::vector<int> table = pool.table;
    const index_t common = 1104 / 48;
    std::copy_n(table.begin(), common, table.begin() + pool.columns);
    Data<float> numbers = pool.numbers;
    for (index_t h = 0; h < 2; ++h) {
      std::copy_n(numbers.k_row(0, h, 0), common * 48 * 64, numbers.k_row(1, h, 0));
      std::copy_n(numbers.v_row(0, h, 0), common * 48 * 72, numbers.v_row(1, h, 0));
    }
    const PageTable<int> pages(View<const int, 2>(table.data(), {2, pool.columns}), pool.lengths);
    const PagedKeys keys(pool.k.view(), pool.v.view(), pages, pool.scales(), pool.channel_scales());
    const Expected<float> expected(numbers, Plan{});
    for_each_target([&](const std::string& target) {
      INFO(target << ", queries " << queries);
      const auto got = run(numbers, keys);
      CHECK(got.explanation.shared_sequences == 2);
      check_output(got, expected, name_of(shape));
      // The same sequence alone has no common keys.
      Data<float> second({4, 2, queries, 64, 72, {1400}});
      std::copy_n(numbers.q.data() + numbers.q.size() / 2, second.q.size(), second.q.data());
      const std::vector<int> lengths{1400};
      const PageTable<int> own(View<const int, 2>(table.data() + pool.columns, {1, pool.columns}), lengths);
      const auto alone =
          run(second, PagedKeys(pool.k.view(), pool.v.view(), own, pool.scales(), pool.channel_scales()));
      CHECK(alone.explanation.shared_sequences == 0);
      CHECK(std::equal(alone.out.begin(), alone.out.end(), got.out.begin() + std::ssize(got.out) / 2));
    });
  }
}

TEMPLATE_TEST_CASE("NaN and infinities in the factors of masked pages do not reach a result",
                   "[decode][channel_scales][bfloat16]", Int8, Fp8E4M3, Fp8E5M2) {
  const auto without_second_page = [](const Query& query, index_t key) {
    return key <= query.index + query.shape.keys - query.shape.queries && (key < 16 || key >= 32);
  };
  const auto mask = Causal{} & ssmax::Where([](const Query&, index_t key) { return key < 16 || key >= 32; });
  for (const index_t queries : {1, 3, 20}) {
    const Shape shape{2, 1, queries, 64, 72, {200}};
    const Pool<TestType> pool(shape, {16, channels, both});
    Pool<TestType> bad = pool;
    const index_t page = bad.table[1];
    for (index_t c = 0; c < 64; ++c)
      const_cast<float&>(bad.k.channels()(page, 0, c)) = c % 2 == 0 ? nan : infinity;
    for (index_t c = 0; c < 72; ++c)
      const_cast<float&>(bad.v.channels()(page, 0, c)) = c % 2 == 0 ? nan : infinity;
    const Expected<float> expected(pool.numbers, Plan{.visible = without_second_page});
    for_each_target([&](const std::string& target) {
      INFO(target << ", queries " << queries);
      check_output(run(pool.numbers, bad.keys(), Softmax{}, mask), expected, name_of(shape));
      const ssmax::SlidingWindow window{100};
      CHECK(run(pool.numbers, bad.keys(), Softmax{}, window) ==
            run(pool.numbers, pool.keys(), Softmax{}, window));
      CHECK(std::isnan(run(pool.numbers, bad.keys()).out[0]));
    });
    const Data<bfloat16> data({8, 1, queries, 64, 72, {200}});
    for_each_target_of_products([&](const std::string& target) {
      INFO(target << ", queries " << queries);
      CHECK(run(data, bad.keys(), Softmax{}, mask) == run(data, pool.keys(), Softmax{}, mask));
      CHECK(std::isnan(static_cast<float>(run(data, bad.keys()).out[0])));
    });
  }
}

TEST_CASE("a page with factors of channels is a run of its own", "[channel_scales]") {
  const Pool<Int8> pool({2, 2, 1, 8, 4, {100}}, {16, channels, both}, Order::neighbours);
  const auto run = pool.keys().run(0, 1, 37);
  CHECK(run.count == 48 - 37);
  CHECK(run.k_scales == nullptr);
  CHECK(run.k_channel_scales == pool.k.of_channels.data() + 2 * 2 * 8 + 8);
  CHECK(run.v_scales == pool.v.of_rows.data() + 37 * 2 + 1);
  CHECK(run.v_channel_scales == pool.v.of_channels.data() + 2 * 2 * 4 + 4);
}

TEST_CASE("wrong factors of channels are refused", "[channel_scales][errors]") {
  const std::vector<Int8> codes(4 * 16 * 2 * 8);
  const std::vector<float> numbers(codes.size());
  const std::vector<ssmax::Q8_0> groups(4 * 16 * 2);
  std::vector<int> table{0, 1, 2, 3}, lengths{64};
  const View<const Int8, 4> k(codes.data(), {4, 16, 2, 8});
  const View<const float, 4> wide(numbers.data(), {4, 16, 2, 8});
  const View<const ssmax::Q8_0, 4> grouped(groups.data(), {4, 16, 2, 1});
  const PageTable<int> pages(View<const int, 2>(table.data(), {1, 4}), lengths);
  const View<const float, 3> good(numbers.data(), {4, 2, 8}), rows_of(numbers.data(), {4, 16, 2}), none;
  const auto refused = [&](const View<const float, 3>& of_k, const View<const float, 3>& of_v,
                           std::string_view message) {
    check_refused({message}, [&] { PagedKeys keys(k, k, pages, {}, {.k = of_k, .v = of_v}); });
  };
  refused(none, good, "ssmax::PagedKeys: k_scales has size 0, the storage type needs a factor per row: 128");
  refused(good, none, "ssmax::PagedKeys: v_scales has size 0");
  refused({numbers.data(), {3, 2, 8}}, good,
          "ssmax::PagedKeys: k_channel_scales has extent 3 in dimension 0, k has 4");
  refused(good, {numbers.data(), {4, 1, 8}},
          "ssmax::PagedKeys: v_channel_scales has extent 1 in dimension 1, v has 2");
  refused(good, {numbers.data(), {4, 2, 7}},
          "ssmax::PagedKeys: v_channel_scales has extent 7 in dimension 2, v has 8");
  refused({numbers.data(), {4, 2, 8}, {32, 16, 2}}, good,
          "ssmax::PagedKeys: k_channel_scales has last stride 2, must be 1");
  refused({nullptr, {4, 2, 8}}, good, "ssmax::PagedKeys: k_channel_scales is null but has size 64");
  refused({numbers.data(), {4, -2, 8}}, good, "ssmax::PagedKeys: k_channel_scales has extent -2");
  refused({numbers.data(), {4, 2, 8}, {std::numeric_limits<index_t>::max() / 4, 8, 1}}, good,
          "ssmax::PagedKeys: k_channel_scales has extent 4 and stride");
  check_refused(
      {"ssmax::PagedKeys: k_channel_scales has size 64, the storage type has no factors: must be 0"},
      [&] { PagedKeys keys(wide, k, pages, {.v = rows_of}, {.k = good}); });
  check_refused(
      {"ssmax::PagedKeys: k_channel_scales has size 64, the storage type has no factors: must be 0"},
      [&] { PagedKeys keys(grouped, k, pages, {.v = rows_of}, {.k = good}); });
  check_refused({"ssmax::PagedKeys: v_channel_scales has size 64, the storage type has no factors"},
                [&] { PagedKeys keys(k, wide, pages, {.k = rows_of}, {.v = good}); });
  CHECK(refusal([&] { PagedKeys keys(k, k, pages, {}, {.k = good, .v = good}); }) == "(nothing was thrown)");
  CHECK(refusal([&] { PagedKeys keys(k, k, pages, {.v = rows_of}, {.k = good}); }) == "(nothing was thrown)");
}

}  // namespace decode_problem::channel_scales_test
