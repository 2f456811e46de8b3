// What KvCache's append stores: rows as they are, rounded as scalar conversions round, from any strides.

#include "allocation_count.hpp"
#include "kv_cache_rows.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace kv_cache_rows::kv_cache_append_test {

constexpr index_t widths[] = {1, 2, 3, 7, 8, 15, 16, 17, 33, 59, 64, 111, 128};

template <class X, class U>
void check_append_stores() {
  for_each_target([](const std::string&) {
    bool same = true;
    for (const index_t width : widths) {
      const index_t value_width = width % 5 + 1;
      KvCache<X> cache(
          {.batch = 2, .kv_heads = 3, .width = width, .value_width = value_width, .capacity = 9});
      index_t start = 0;
      for (const index_t added : {1, 0, 3, 5}) {
        const Rows<U> k(2, 3, added, width, static_cast<unsigned>(width + added));
        const Rows<U> v(2, 3, added, value_width, static_cast<unsigned>(width + added + 1));
        cache.append(k.view(), v.view());
        same = same && holds(cache, start, k.view(), v.view());
        start += added;
        same = same && cache.length(0) == start && cache.length(1) == start;
      }
    }
    CHECK(same);
  });
}

TEST_CASE("append stores what it is given, rounded as the scalar conversions round", "[kv_cache]") {
  SECTION("float") { check_append_stores<float, float>(); }
  SECTION("double") { check_append_stores<double, double>(); }
  SECTION("half") { check_append_stores<half, float>(); }
  SECTION("bfloat16") { check_append_stores<bfloat16, float>(); }
}

TEST_CASE("append copies rows of the cache's type without rounding", "[kv_cache]") {
  SECTION("half") { check_append_stores<half, half>(); }
  SECTION("bfloat16") { check_append_stores<bfloat16, bfloat16>(); }
}

struct Rounded {
  float from, to;
};

template <class X>
void check_rounding(const std::vector<Rounded>& cases) {
  for_each_target([&](const std::string&) {
    const auto count = static_cast<index_t>(cases.size());
    for (const index_t width : {count, index_t{1}}) {  // whole vectors and their remainders, and one by one
      const index_t rows = count / width;
      std::vector<float> from;
      for (const Rounded& c : cases) from.push_back(c.from);
      KvCache<X> cache({.width = width, .capacity = rows});
      const View<const float, 4> view(from.data(), {1, 1, rows, width});
      cache.append(view, view);
      for (index_t i = 0; i < count; ++i) {
        const float expected = cases[static_cast<std::size_t>(i)].to;
        const float k = key(cache, 0, 0, i / width, i % width), v = value(cache, 0, 0, i / width, i % width);
        CAPTURE(i, cases[static_cast<std::size_t>(i)].from, k, v, expected);
        CHECK(same_bits(k, expected));
        CHECK(same_bits(v, expected));
      }
    }
  });
}

constexpr float infinity = std::numeric_limits<float>::infinity();

TEST_CASE("16-bit caches round to nearest, ties to even", "[kv_cache]") {
  SECTION("half") {
    check_rounding<half>({{1, 1},
                          {-0.F, -0.F},
                          {1 + 0x1p-11F, 1},  // ties
                          {1 + 0x3p-11F, 1 + 0x1p-9F},
                          {-1 - 0x1p-11F, -1},
                          {-1 - 0x3p-11F, -1 - 0x1p-9F},
                          {1 + 0x1.002p-11F, 1 + 0x1p-10F},  // just above one, just below the next
                          {1 + 0x2.FFp-11F, 1 + 0x1p-10F},
                          {65519, 65504},  // the largest half, and what is too large
                          {65520, infinity},
                          {-1e30F, -infinity},
                          {0x1p-24F, 0x1p-24F},  // subnormal
                          {0x1p-25F, 0},
                          {0x1.8p-24F, 0x2p-24F},
                          {0x2.8p-24F, 0x2p-24F},
                          {0x1.FFEp-15F, 0x1p-14F},  // rounded up to the smallest normal half
                          {infinity, infinity},
                          {-infinity, -infinity},
                          {0.1F, 0x1.998p-4F}});
  }
  SECTION("bfloat16") {
    check_rounding<bfloat16>({{1, 1},
                              {-0.F, -0.F},
                              {1 + 0x1p-8F, 1},
                              {1 + 0x3p-8F, 1 + 0x1p-6F},
                              {-1 - 0x1p-8F, -1},
                              {-1 - 0x3p-8F, -1 - 0x1p-6F},
                              {1 + 0x1.002p-8F, 1 + 0x1p-7F},
                              {1 + 0x2.FFp-8F, 1 + 0x1p-7F},
                              {0x1.FEp127F, 0x1.FEp127F},
                              {0x1.FEFFp127F, 0x1.FEp127F},
                              {0x1.FFp127F, infinity},
                              {-0x1.FFp127F, -infinity},
                              {0x1p-133F, 0x1p-133F},
                              {0x1p-134F, 0},
                              {0x3p-134F, 0x4p-134F},
                              {infinity, infinity},
                              {-infinity, -infinity},
                              {0.1F, 0x1.9Ap-4F}});
  }
}

template <class X>
bool is_nan(X x) {
  return std::isnan(static_cast<Compute<X>>(x));
}

TEST_CASE("a NaN stays one in every storage, and stays where it is", "[kv_cache]") {
  const auto check = [](auto storage) {
    using X = decltype(storage);
    for_each_target([](const std::string&) {
      Rows<Compute<X>> k(1, 1, 3, 19, 1), v(1, 1, 3, 19, 2);
      k.view()(0, 0, 1, 4) = std::numeric_limits<Compute<X>>::quiet_NaN();
      v.view()(0, 0, 2, 18) = std::numeric_limits<Compute<X>>::quiet_NaN();
      KvCache<X> cache({.width = 19, .capacity = 3});
      cache.append(k.view(), v.view());
      bool right = true;
      for_each_index(k.extents, [&](index_t b, index_t h, index_t i, index_t c) {
        right = right && is_nan(key(cache, b, h, i, c)) == (i == 1 && c == 4) &&
                is_nan(value(cache, b, h, i, c)) == (i == 2 && c == 18);
      });
      CHECK(right);
    });
  };
  check(float{});
  check(double{});
  check(half{});
  check(bfloat16{});
}

template <class X, class U>
void check_layouts() {
  const index_t batch = 2, heads = 3, positions = 4, width = 5, value_width = 7;
  const Rows<U> k(batch, heads, positions, width, 1), v(batch, heads, positions, value_width, 2);
  const KvCacheOptions options{
      .batch = batch, .kv_heads = heads, .width = width, .value_width = value_width, .capacity = positions};
  KvCache<X> expected(options);
  expected.append(k.view(), v.view());

  // [batch, position, head, channel], keys and values side by side, with a gap behind them.
  const index_t head_pitch = width + value_width + 2, pitch = heads * head_pitch;
  std::vector<U> packed(static_cast<std::size_t>(batch * positions * pitch),
                        U(std::numeric_limits<Compute<U>>::quiet_NaN()));
  const View<U, 4> packed_k(packed.data(), {batch, heads, positions, width},
                            {positions * pitch, head_pitch, pitch, 1});
  const View<U, 4> packed_v(packed.data() + width, {batch, heads, positions, value_width},
                            {positions * pitch, head_pitch, pitch, 1});
  for_each_index(k.extents, [&](auto... at) { packed_k(at...) = k.view()(at...); });
  for_each_index(v.extents, [&](auto... at) { packed_v(at...) = v.view()(at...); });
  KvCache<X> cache(options);
  cache.append(View<const U, 4>(packed_k), View<const U, 4>(packed_v));
  CHECK(Contents(cache) == Contents(expected));

  // Backwards in memory, and one head's rows for all.
  KvCache<X> other(options);
  const View<const U, 4> backwards(&k.view()(0, 0, positions - 1, 0), {batch, heads, positions, width},
                                   {heads * positions * width, 0, -width, 1});
  other.append(backwards, v.view());
  CHECK(holds(other, 0, backwards, v.view()));
  CHECK(same_bits(key(other, 1, 2, 0, 0), X(k.view()(1, 0, positions - 1, 0))));
}

TEST_CASE("append takes any strides", "[kv_cache]") {
  check_layouts<float, float>();
  check_layouts<double, double>();
  check_layouts<half, float>();
  check_layouts<half, half>();
  check_layouts<bfloat16, float>();
  check_layouts<bfloat16, bfloat16>();
}

TEST_CASE("append does not allocate", "[kv_cache]") {
  const Rows<float> k(2, 2, 5, 9, 1), v(2, 2, 5, 9, 2);
  const Rope<float> rope({.width = 8}, 40);
  const std::vector<index_t> counts{5, 3};
  const long start = allocation_count();
  KvCache<half> cache({.batch = 2, .kv_heads = 2, .width = 9, .capacity = 7, .ring = true});
  const long before = allocation_count();
  for (int i = 0; i < 5; ++i) cache.append(k.view(), v.view(), &rope, counts);
  cache.clear();
  const long during = allocation_count() - before;
  CHECK(during == 0);
  CHECK(before > start);  // or they were not counted
}

}  // namespace kv_cache_rows::kv_cache_append_test
