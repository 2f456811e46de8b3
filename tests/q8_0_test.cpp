// Q8_0: bytes and rounding of the format, and attention over caches and pools of it against the naive loop over the rows
// that they hold.

#include <bit>
#include <cstring>
#include <numeric>
#include <random>

#include "decode_sources.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace decode_problem::q8_0_test {

using ssmax::Q8_0;
using Traits = ssmax::StorageTraits<Q8_0>;

constexpr float nan = std::numeric_limits<float>::quiet_NaN(),
                infinity = std::numeric_limits<float>::infinity();

static_assert(sizeof(Q8_0) == 34 && alignof(Q8_0) == 2);
static_assert(ssmax::detail::KeyStorage<Q8_0> && !ssmax::detail::Storage<Q8_0>);
static_assert(ssmax::detail::group_of<Q8_0> == 32 && ssmax::detail::group_of<float> == 1);

// ---- Groups -----------------------------------------------------------------------------------------------

std::vector<Q8_0> rounded(const std::vector<float>& numbers) {
  std::vector<Q8_0> groups(numbers.size() / 32);
  Traits::store(numbers.data(), std::ssize(numbers), groups.data());
  return groups;
}
std::vector<float> widened(const std::vector<Q8_0>& groups) {
  std::vector<float> numbers(groups.size() * 32);
  Traits::load(groups.data(), std::ssize(numbers), numbers.data());
  return numbers;
}
/// A group whose numbers are 0, except for the first ones.
std::vector<float> group_of(std::vector<float> first) {
  first.resize(32);
  return first;
}

TEST_CASE("a group has the bytes of ggml: a half factor, then 32 integers", "[q8_0]") {
  // d = 2.54 / 127 = 0.02, which is 0x251F as half.
  const std::vector<Q8_0> groups = rounded(group_of({2.54f, -2.54f, 0.02f, -0.04f}));
  std::uint8_t bytes[34];
  std::memcpy(bytes, groups.data(), sizeof(bytes));
  const std::uint8_t expected[34] = {0x1F, 0x25, 127, 0x81, 1, 0xFE};
  CHECK(std::equal(bytes, bytes + 34, expected));
}

TEST_CASE("values of a group are rounded to the nearest integer, halves away from 0", "[q8_0]") {
  const Q8_0 group = rounded(group_of({127, 0.5f, -0.5f, 1.5f, -2.5f, 0.49999997f, -126.5f, 2.4999998f}))[0];
  CHECK(static_cast<float>(group.scale) == 1);
  const std::vector<int> expected{127, 1, -1, 2, -3, 0, -127, 2};
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK(group.values[i].value == expected[i]);
}

TEST_CASE("a group widens to its integers times its factor, on every target", "[q8_0]") {
  std::vector<Q8_0> groups(64);
  std::mt19937 random(1);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    groups[i].scale.bits = static_cast<std::uint16_t>(i == 0 ? 1 : random() % 0x7C00u);
    for (Int8& x : groups[i].values) x.value = static_cast<std::int8_t>(random());
  }
  for_each_target([&](const std::string&) {
    const std::vector<float> wide = widened(groups);
    int wrong = 0;
    for (std::size_t i = 0; i < wide.size(); ++i) {
      const Q8_0& group = groups[i / 32];
      wrong += wide[i] != static_cast<float>(group.values[i % 32].value) * static_cast<float>(group.scale);
    }
    CHECK(wrong == 0);
  });
}

TEST_CASE("the error of rounding to groups is within the bound", "[q8_0]") {
  Real worst = 0;
  for (int exponent = -60; exponent <= 22; ++exponent) {
    std::vector<float> numbers = reference::normals<float>(32 * 50, static_cast<unsigned>(exponent + 100), 1);
    for (float& x : numbers) x = std::ldexp(x, exponent);
    const std::vector<float> held = widened(rounded(numbers));
    for (std::size_t first = 0; first < numbers.size(); first += 32) {
      Real most = 0;
      for (std::size_t i = first; i < first + 32; ++i) most = std::max(most, std::abs(Real(numbers[i])));
      const Real of_factor = most < 127 * 0x1p-14L ? 127 * 0x1p-25L : most * 0x1p-11L;
      const Real bound = most / 254 + of_factor + most * 0x1p-21L;
      if (most >= 127 * Real(65520)) continue;
      for (std::size_t i = first; i < first + 32; ++i)
        worst = worse(worst, std::abs(Real(held[i]) - Real(numbers[i])) / bound);
    }
  }
  CHECK(worst <= 1);
  CHECK(worst > 0.9L);
}

TEST_CASE("groups of zeros, tiny and huge numbers, NaN and infinities", "[q8_0]") {
  const auto held = [](std::vector<float> first) { return widened(rounded(group_of(std::move(first)))); };
  CHECK(std::ranges::count(held({}), 0.0f) == 32);
  CHECK(std::ranges::count(held({-0.0f}), 0.0f) == 32);
  CHECK(std::ranges::count(held({1e-42f, -1e-45f}), 0.0f) == 32);
  CHECK(rounded(group_of({1e-42f, -1e-45f}))[0].values[0].value == 0);
  CHECK(held({8e6f, -8e6f})[1] < -7.9e6f);
  const std::vector<float> huge = held({1e30f, -1e30f});
  CHECK(huge[0] == infinity);
  CHECK(huge[1] == -infinity);
  CHECK(std::isnan(huge[2]));
  for (const float special : {nan, infinity, -infinity}) {
    std::vector<float> numbers(64, 1.0f);
    numbers[37] = special;
    const std::vector<float> both = widened(rounded(numbers));
    CHECK(std::all_of(both.begin(), both.begin() + 32, [](float x) { return std::abs(x - 1) < 1e-3f; }));
    CHECK(std::all_of(both.begin() + 32, both.end(), [](float x) { return std::isnan(x); }));
  }
}

// ---- Attention --------------------------------------------------------------------------------------------

std::vector<float> held(const std::vector<float>& numbers) { return widened(rounded(numbers)); }

const std::vector<Shape> shapes{
    // heads, kv_heads, queries, d, dv, lengths
    {1, 1, 1, 32, 32, {1}},        {12, 4, 1, 64, 96, {300}},     {4, 2, 4, 96, 32, {257, 5}},
    {6, 2, 2, 64, 64, {1100, 70}}, {2, 2, 20, 64, 32, {20, 300}},  // more than 16 queries of a kv head: prefill
    {2, 1, 30, 32, 64, {100, 30}},
};

TEST_CASE("attention over a cache of groups is as good as a naive loop on what it holds", "[decode][q8_0]") {
  for (const Shape& shape : shapes) {
    const Data<float> data(shape);
    Data<float> rows = data;
    rows.k = held(data.k);
    rows.v = held(data.v);
    const Expected<float> expected(rows, Plan{});
    const KvCache<Q8_0> cache = filled<Q8_0>(data);
    CHECK(cache.run(0, 0, 0).k_stride == shape.d / 32);
    CHECK(cache.run(0, 0, 0).v_stride == shape.dv / 32);
    CHECK(std::ssize(cache.memory().first) ==
          shape.batch() * shape.kv_heads * shape.longest() * shape.d / 32);
    for_each_target([&](const std::string&) {
      check_output(run(data, cache), expected, name_of(shape));
      // Rows are widened to the numbers that a float cache holds.
      const KvCache<float> wide = filled<float>(rows);
      for (const bool invariant : {true, false}) {
        if (!invariant && shape.heads / shape.kv_heads * shape.queries <= 16) continue;
        const AttentionOptions<float> options{.batch_invariant = invariant};
        CHECK(run(data, cache, Softmax{}, Causal{}, Identity{}, options) ==
              run(data, wide, Softmax{}, Causal{}, Identity{}, options));
      }
    });
  }
}

/// Calls with one of keys and values in groups.
template <class K, class V>
void check_types(const Data<float>& data, const Expected<float>& expected) {
  KvCache<K, V> cache(options_of(data.shape));
  const index_t longest = data.shape.longest();
  cache.append(data.k_view(0, longest), data.v_view(0, longest), nullptr, data.shape.lengths);
  check(data, cache, expected);
}

TEST_CASE("keys and values of different storage types, one of them groups", "[decode][q8_0][slow]") {
  for (const index_t queries : {1, 20}) {
    const Data<float> data({6, 3, queries, 64, 96, {300, 1100}});
    Data<float> k_held = data, v_held = data;
    k_held.k = held(data.k);
    v_held.v = held(data.v);
    check_types<Q8_0, float>(data, Expected<float>(k_held, Plan{}));
    check_types<float, Q8_0>(data, Expected<float>(v_held, Plan{}));
  }
}

TEST_CASE("a paged cache and a pool of groups are a cache of groups", "[decode][q8_0]") {
  for (const index_t queries : {1, 3, 20}) {
    const Data<float> data({4, 2, queries, 64, 32, {500, 37, 90}});
    const KvCache<Q8_0> cache = filled<Q8_0>(data);
    const index_t batch = 3, heads = 2, size = 16, groups_k = 2, groups_v = 1;

    // 1. A paged cache. A copy of a shared page is used as well.
    PagedKvCache<Q8_0> paged({.kv_heads = heads, .width = 64, .value_width = 32, .page = size, .pages = 60});
    std::vector<index_t> ids;
    for (index_t b = 0; b < batch; ++b) {
      ids.push_back(paged.add());
      for (index_t key = 0; key < data.shape.length(b); ++key) {
        if (key == 25) {
          const index_t old = ids.back();
          ids.back() = paged.fork(old);
          paged.append(View<const float, 3>(data.k.data(), {1, heads, 64}),
                       View<const float, 3>(data.v.data(), {1, heads, 32}), std::span(&old, 1));
          // Now the fork has the original page, or a copy of it.
        }
        const View<const float, 3> k(data.k_row(b, 0, key), {1, heads, 64},
                                     {0, data.shape.longest() * 64, 1}),
            v(data.v_row(b, 0, key), {1, heads, 32}, {0, data.shape.longest() * 32, 1});
        paged.append(k, v, std::span(&ids.back(), 1));
      }
    }

    // 2. A pool of pages. Unused memory holds NaN.
    Q8_0 unused;
    unused.scale = half(nan);
    const index_t columns = 32, pages = 2 * batch * columns;
    std::vector<Q8_0> k(static_cast<std::size_t>(pages * size * heads * groups_k), unused),
        v(static_cast<std::size_t>(pages * size * heads * groups_v), unused);
    std::vector<int> table(static_cast<std::size_t>(pages)), lengths;
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(1));
    table.resize(static_cast<std::size_t>(batch * columns));
    for (index_t b = 0; b < batch; ++b) {
      lengths.push_back(static_cast<int>(cache.length(b)));
      for (index_t key = 0; key < columns * size; ++key) {
        const index_t token = table[static_cast<std::size_t>(b * columns + key / size)] * size + key % size;
        for (index_t h = 0; h < heads && key < cache.length(b); ++h) {
          const KeyRun<Q8_0> from = cache.run(b, h, key);
          std::copy_n(from.k, groups_k, k.data() + (token * heads + h) * groups_k);
          std::copy_n(from.v, groups_v, v.data() + (token * heads + h) * groups_v);
        }
      }
    }
    const ssmax::PagedKeys keys(
        View<const Q8_0, 4>(k.data(), {pages, size, heads, groups_k}),
        View<const Q8_0, 4>(v.data(), {pages, size, heads, groups_v}),
        ssmax::PageTable<int>(View<const int, 2>(table.data(), {batch, columns}), lengths));
    CHECK(keys.shape().width == 64);
    CHECK(keys.shape().value_width == 32);
    for_each_target([&](const std::string& target) {
      INFO(target << ", queries " << queries);
      check_source(data, cache, paged.source(ids));
      check_source(data, cache, keys);
    });
  }
}

TEST_CASE("lists of single tokens of groups", "[decode][q8_0]") {
  for (const index_t queries : {1, 3}) {
    const Shape shape{4, 2, queries, 96, 64, {300}};
    const Data<float> data(shape);
    const KvCache<Q8_0> cache = filled<Q8_0>(data);
    const index_t tokens = 311;  // token 7·i mod 311 of the pool is key i
    std::vector<Q8_0> k(static_cast<std::size_t>(tokens * 2 * 3)),
        v(static_cast<std::size_t>(tokens * 2 * 2));
    std::vector<int> list;
    for (index_t i = 0; i < 300; ++i) {
      const index_t token = 7 * i % tokens;
      list.push_back(static_cast<int>(token));
      for (index_t h = 0; h < 2; ++h) {
        const auto run = cache.run(0, h, i);
        std::copy_n(run.k, 3, k.begin() + (token * 2 + h) * 3);
        std::copy_n(run.v, 2, v.begin() + (token * 2 + h) * 2);
      }
    }
    const std::vector<int> lengths{300};
    const ssmax::PagedKeys keys(View<const Q8_0, 4>(k.data(), {tokens, 1, 2, 3}),
                                View<const Q8_0, 4>(v.data(), {tokens, 1, 2, 2}),
                                ssmax::PageTable(View<const int, 2>(list.data(), {1, 300}), lengths));
    for_each_target([&](const std::string& target) {
      INFO(target << ", queries " << queries);
      check_source(data, cache, keys);
    });
  }
}

TEST_CASE("a ring and kept keys of groups", "[decode][q8_0]") {
  const Data<float> data({2, 1, 1, 96, 64, {90}});
  KvCache<Q8_0> ring = filled<Q8_0>(data, nullptr, 40, true, 4);
  const KvCache<Q8_0> cache = filled<Q8_0>(data);
  check_source(data, cache, ring, ssmax::SlidingWindow{29, 0, 4});

  KvCache<Q8_0> kept = filled<Q8_0>(data);
  const std::vector<index_t> branch{61, 70, 89};
  kept.keep(0, 60, branch);
  for (index_t i = 0; i < 3; ++i) {
    const KeyRun<Q8_0> to = kept.run(0, 0, 60 + i),
                       from = cache.run(0, 0, branch[static_cast<std::size_t>(i)]);
    CHECK(std::memcmp(to.k, from.k, 3 * sizeof(Q8_0)) == 0);
    CHECK(std::memcmp(to.v, from.v, 2 * sizeof(Q8_0)) == 0);
  }
}

TEST_CASE("NaN in a group reaches the queries that see it, and only those", "[decode][q8_0]") {
  const Shape shape{2, 1, 3, 64, 64, {300}};
  for_each_target([&](const std::string& target) {
    for (const bool in_key : {true, false}) {
      CAPTURE(target, in_key);
      Data<float> data(shape);
      (in_key ? data.k_row(0, 0, 298) : data.v_row(0, 0, 298))[40] = nan;
      const Output<float> output = run(data, filled<Q8_0>(data));
      for (index_t row = 0; row < shape.rows(); ++row) {
        for (index_t c = 0; c < shape.dv; ++c) {
          const bool is_nan = row % shape.queries > 0 && (in_key || c >= 32);
          CHECK(std::isnan(output.out[static_cast<std::size_t>(row * shape.dv + c)]) == is_nan);
        }
      }
    }
  });
}

/// A source of one key.
struct OneKey {
  using Element = Q8_0;
  const Q8_0* row;
  index_t width, value_width;

  ssmax::KeySourceShape shape() const { return {1, 1, width, value_width}; }
  index_t length(index_t) const { return 1; }
  ssmax::KeyRange stored(index_t) const { return {0, 1}; }
  KeyRun<Q8_0> run(index_t, index_t, index_t) const {
    return {.k = row, .k_stride = 2, .v = row, .v_stride = 2, .count = 1};
  }
};

TEST_CASE("widths that are no multiple of a group are refused", "[q8_0][errors]") {
  check_refused({"ssmax::KvCache: width is 40, must be a multiple of the channels of an element, 32"},
                [] { KvCache<Q8_0> cache({.width = 40, .capacity = 1}); });
  check_refused({"ssmax::KvCache: value_width is 40, must be a multiple of the channels of an element, 32"},
                [] { KvCache<float, Q8_0> cache({.width = 40, .capacity = 1}); });
  CHECK(refusal([] { KvCache<Q8_0, float> cache({.width = 64, .value_width = 40, .capacity = 1}); }) ==
        "(nothing was thrown)");
  check_refused({"ssmax::PagedKvCache: width is 33, must be a multiple of the channels of an element, 32"},
                [] { PagedKvCache<Q8_0> cache({.width = 33, .pages = 1}); });
  check_refused({"ssmax::PagedKvCache: value_width is 16, must be a multiple"},
                [] { PagedKvCache<Q8_0> cache({.width = 32, .value_width = 16, .pages = 1}); });

  const std::vector<Q8_0> groups(64);
  const std::vector<float> q(64);
  std::vector<float> out(64);
  const auto decode_over = [&](index_t d, index_t dv) {
    return [&, d, dv] {
      attention({.q = {q.data(), {1, 1, 1, d}},
                 .keys = OneKey{groups.data(), d, dv},
                 .out = {out.data(), {1, 1, 1, dv}}},
                Causal{});
    };
  };
  CHECK(refusal(decode_over(64, 32)) == "(nothing was thrown)");
  check_refused({"ssmax::attention: k has channels 40, must be a multiple", "32"}, decode_over(40, 32));
  check_refused({"ssmax::attention: v has channels 40, must be a multiple", "32"}, decode_over(32, 40));

  const std::vector<int> table{0, 1}, lengths{20};
  const View<const Q8_0, 4> k(groups.data(), {2, 16, 1, 2});
  const ssmax::PageTable<int> pages(View<const int, 2>(table.data(), {1, 2}), lengths);
  const ssmax::PagedKeys keys(k, k, pages);
  check_refused({"ssmax::attention: ", "60", "64"}, [&] {
    attention({.q = {q.data(), {1, 1, 1, 60}}, .keys = keys, .out = {out.data(), {1, 1, 1, 64}}}, Causal{});
  });
  check_refused({"ssmax::PagedKeys: k_scales has size 32, the storage type has no factors: must be 0"}, [&] {
    ssmax::PagedKeys wide(k, k, pages, ssmax::KeyScales::per_tensor(k, q.data(), k, nullptr));
  });
  check_refused({"ssmax::PagedKeys: k has extent 2 and stride"}, [&] {
    const View<const Q8_0, 4> far(groups.data(), {2, 16, 1, 2},
                                  {std::numeric_limits<index_t>::max() / 34, 2, 2, 1});
    ssmax::PagedKeys wide(far, far, pages);
  });
}

}  // namespace decode_problem::q8_0_test
