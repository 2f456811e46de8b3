// PagedKvCache: attention over its sequences is attention over a KvCache of the same keys, whatever they share and have
// shared. Memory that no sequence uses holds NaN.

#include <map>
#include <random>
#include <set>

#include "allocation_count.hpp"
#include "decode_sources.hpp"
#include "own_int8.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace decode_problem::paged_kv_cache_test {

using Int8 = OwnInt8;
using ssmax::PagedKvCache, ssmax::PagedKvCacheFull, ssmax::PagedKvCacheOptions;

static_assert(ssmax::KeySource<PagedKeys<float, float, PagedKvCache<float>::Pages>>);
static_assert(ssmax::KeySource<PagedKeys<Int8, float, PagedKvCache<Int8, float>::Pages>>);

template <class X>
void fill_with_nan(std::span<const X> memory) {
  std::fill_n(const_cast<X*>(memory.data()), memory.size(), X(std::numeric_limits<float>::quiet_NaN()));
}

/// A cache whose pool holds NaN.
template <class K, class V = K>
PagedKvCache<K, V> empty_cache(const PagedKvCacheOptions& options) {
  PagedKvCache<K, V> cache(options);
  const auto [k, v] = cache.source({}).memory();
  fill_with_nan(k);
  fill_with_nan(v);
  return cache;
}

/// Writes NaN to the pages that no sequence of `ids` uses.
template <class K, class V>
void forget_free_pages(PagedKvCache<K, V>& cache, std::span<const index_t> ids) {
  const PagedKvCacheOptions& options = cache.options();
  std::vector<char> used(static_cast<std::size_t>(options.pages));
  for (const index_t id : ids) {
    for (const index_t page : cache.pages_of(id)) used[static_cast<std::size_t>(page)] = 1;
  }
  const auto [k, v] = cache.source({}).memory();
  const auto rows = static_cast<std::size_t>(options.kv_heads * options.page);
  const std::size_t of_k = rows * static_cast<std::size_t>(options.width),
                    of_v = rows * static_cast<std::size_t>(options.value_width);
  for (std::size_t page = 0; page < used.size(); ++page) {
    if (used[page] != 0) continue;
    fill_with_nan(k.subspan(page * of_k, of_k));
    fill_with_nan(v.subspan(page * of_v, of_v));
  }
}

// ---- Results of attention ---------------------------------------------------------------------------------

/// Appends positions [begin, end) of a batch entry of `data` to a sequence.
template <class X, class T>
void append_positions(PagedKvCache<X>& cache, const Data<T>& data, index_t b, index_t id, index_t begin,
                      index_t end, const Rope<Compute<T>>* rope) {
  const View<const T, 4> k = data.k_view(begin, end), v = data.v_view(begin, end);
  const std::vector<index_t> sequences(static_cast<std::size_t>(end - begin), id);
  const auto tokens = [&](const View<const T, 4>& rows) {
    return View<const T, 3>(rows.data_handle() + b * rows.stride(0),
                            {rows.extent(2), rows.extent(1), rows.extent(3)},
                            {rows.stride(2), rows.stride(1), 1});
  };
  cache.append(tokens(k), tokens(v), sequences, rope);
}

/// X: storage of the cache. T: storage of q, k, v and out.
template <class X, class T>
void compare(index_t page, index_t queries, bool rotated) {
  const Data<T> data({4, 2, queries, 24, 9, {300, queries, 117}});
  const Rope<Compute<T>> tables({.width = 16}, 301);
  const Rope<Compute<T>>* rope = rotated ? &tables : nullptr;
  const KvCache<X> expected_cache = filled<X>(data, rope);
  PagedKvCache<X> cache = empty_cache<X>(
      {.kv_heads = 2, .width = 24, .value_width = 9, .page = page, .pages = 2 * 600 / page + 20});
  // Pages of the sequences are in no order, and the first sequence has been part of another one.
  const index_t other = cache.add();
  append_positions(cache, data, 0, other, 0, 100, rope);
  const std::array<index_t, 3> ids{cache.fork(other), cache.add(), cache.add()};
  cache.truncate(ids[0], 50);
  for (index_t begin = 0; begin < 300; begin += 7) {
    for (index_t b = 0; b < 3; ++b) {
      const index_t first = cache.length(ids[static_cast<std::size_t>(b)]),
                    last = std::min(begin + 7, data.shape.length(b));
      if (first < last) append_positions(cache, data, b, ids[static_cast<std::size_t>(b)], first, last, rope);
    }
  }
  cache.remove(other);
  forget_free_pages<X, X>(cache, ids);
  for_each_target_of<X>([&](const std::string& target) {
    INFO(target << " pages of " << page << ", queries " << queries << ", rotated " << rotated);
    check_source(data, expected_cache, cache.source(ids), Causal{}, {.rope = rope});
  });
}

TEST_CASE("attention over a paged cache is attention over a cache", "[decode][paged_kv_cache][bfloat16]") {
  SECTION("float") {
    for (const index_t page : {1, 3, 16, 1000}) compare<float, float>(page, 1, page == 3);
    compare<float, float>(16, 9, true);
  }
  SECTION("bfloat16") {
    for (const index_t page : {1, 16}) compare<bfloat16, bfloat16>(page, 3, page == 1);
    compare<bfloat16, float>(3, 20, true);
    compare<bfloat16, bfloat16>(16, 1, false);
  }
  SECTION("half") { compare<half, float>(7, 2, true); }
  SECTION("double") {
    compare<double, double>(3, 1, true);
    compare<double, double>(16, 12, false);
  }
  SECTION("a factor for each row") {
    compare<Int8, float>(3, 1, false);
    compare<Int8, float>(16, 9, true);
  }
}

TEST_CASE("a batch entry may repeat a sequence of a paged cache", "[decode][paged_kv_cache]") {
  const Data<float> data({2, 1, 1, 8, 8, {40}});
  Data<float> repeated({2, 1, 1, 8, 8, {40, 40}});
  repeated.q = data.q;
  repeated.q.insert(repeated.q.end(), data.q.begin(), data.q.end());
  PagedKvCache<float> cache = empty_cache<float>({.width = 8, .page = 16, .pages = 3});
  const index_t id = cache.add();
  append_positions(cache, data, 0, id, 0, 40, nullptr);
  const std::array<index_t, 2> ids{id, id};
  const auto attend = [](const Data<float>& of, const auto& keys) {
    return run(of, keys, ssmax::SSMax<float>{0.4f}, Causal{}, Identity{}, {.batch_invariant = true});
  };
  const Output<float> one = attend(data, cache.source(std::span(ids).first(1)));
  Output<float> expected = one;
  expected.out.insert(expected.out.end(), one.out.begin(), one.out.end());
  expected.lse.insert(expected.lse.end(), one.lse.begin(), one.lse.end());
  CHECK(attend(repeated, cache.source(ids)) == expected);
  const std::array<std::int32_t, 2> of_32_bits{static_cast<std::int32_t>(id), static_cast<std::int32_t>(id)};
  CHECK(attend(repeated, cache.source(of_32_bits)) == expected);
}

// ---- Contents ---------------------------------------------------------------------------------------------

/// A sequence as one number per token. Key c of kv head h of token x is 1000·h + x + c / 16, its value the negative.
using Tokens = std::vector<float>;

constexpr index_t kv_heads = 2, width = 3, value_width = 2;

constexpr float element(float token, index_t h, index_t c) {
  return static_cast<float>(1000 * h) + token + static_cast<float>(c) / 16;
}

template <class X>
void append(PagedKvCache<X>& cache, const Tokens& tokens, std::span<const index_t> sequences,
            const Rope<float>* rope = nullptr) {
  std::vector<float> k, v;
  for (const float token : tokens) {
    for (index_t h = 0; h < kv_heads; ++h) {
      for (index_t c = 0; c < width; ++c) k.push_back(element(token, h, c));
      for (index_t c = 0; c < value_width; ++c) v.push_back(-element(token, h, c));
    }
  }
  cache.append(View<const float, 3>(k.data(), {std::ssize(tokens), kv_heads, width}),
               View<const float, 3>(v.data(), {std::ssize(tokens), kv_heads, value_width}), sequences, rope);
}
template <class X>
void append(PagedKvCache<X>& cache, const Tokens& tokens, index_t id) {
  append(cache, tokens, std::vector<index_t>(tokens.size(), id));
}

/// Whether the runs of a sequence hold its tokens and end where pages end.
template <class X>
bool holds(const PagedKvCache<X>& cache, index_t id, const Tokens& tokens) {
  const std::array<index_t, 2> ids{-1, id};
  const auto source = cache.source(std::span(ids).last(1));
  const index_t page = cache.options().page, length = std::ssize(tokens);
  bool same = cache.length(id) == length && source.length(0) == length && source.stored(0).begin == 0 &&
              source.stored(0).end == length && std::ssize(cache.pages_of(id)) == (length + page - 1) / page;
  for (index_t h = 0; h < kv_heads; ++h) {
    for (index_t key = 0; same && key < length; ++key) {
      const ssmax::KeyRun<X> run = source.run(0, h, key);
      same = run.count == std::min(page - key % page, length - key);
      for (index_t i = 0; same && i < run.count; ++i) {
        const float token = tokens[static_cast<std::size_t>(key + i)];
        for (index_t c = 0; c < width; ++c)
          same = same && same_bits(run.k[i * run.k_stride + c], X(element(token, h, c)));
        for (index_t c = 0; c < value_width; ++c)
          same = same && same_bits(run.v[i * run.v_stride + c], X(-element(token, h, c)));
      }
    }
  }
  return same;
}

constexpr PagedKvCacheOptions options_of(index_t page, index_t pages) {
  return {.kv_heads = kv_heads, .width = width, .value_width = value_width, .page = page, .pages = pages};
}

Tokens joined(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST_CASE("append stores each token in its sequence and skips tokens below 0", "[paged_kv_cache]") {
  PagedKvCache<float> cache = empty_cache<float>(options_of(3, 10));
  const index_t a = cache.add(), b = cache.add();
  CHECK(cache.sequences() == 2);
  append(cache, {1, 2, 3, 4, 5, 6, 7}, std::vector<index_t>{b, -1, a, b, b, -7, b});
  CHECK(holds(cache, a, {3}));
  CHECK(holds(cache, b, {1, 4, 5, 7}));
  append(cache, {}, a);
  append(cache, {8, 9}, std::vector<index_t>{-1, -1});
  CHECK(cache.free_pages() == 7);
  append(cache, {8, 9, 10}, a);
  CHECK(holds(cache, a, {3, 8, 9, 10}));
  CHECK(holds(cache, b, {1, 4, 5, 7}));
  CHECK(cache.free_pages() == 6);
}

TEST_CASE("append to a paged cache takes rows with any strides, in storage type too", "[paged_kv_cache]") {
  const index_t tokens = 5;
  const std::vector<bfloat16> rows = reference::normals<bfloat16>(300, 1);
  // [kv head, token, channel], keys and values side by side.
  const View<const bfloat16, 3> k(rows.data(), {tokens, kv_heads, width}, {7, 40, 1}),
      v(rows.data() + width, {tokens, kv_heads, value_width}, {7, 40, 1});
  PagedKvCache<bfloat16> cache = empty_cache<bfloat16>(options_of(2, 3));
  const std::array<index_t, 1> ids{cache.add()};
  cache.append(k, v, std::vector<index_t>(tokens, ids[0]));
  bool same = true;
  for (index_t t = 0; t < tokens; ++t) {
    for (index_t h = 0; h < kv_heads; ++h) {
      const auto run = cache.source(ids).run(0, h, t);
      for (index_t c = 0; c < width; ++c) same = same && same_bits(run.k[c], k(t, h, c));
      for (index_t c = 0; c < value_width; ++c) same = same && same_bits(run.v[c], v(t, h, c));
    }
  }
  CHECK(same);
}

TEST_CASE("forked sequences share pages until one of them appends to a page", "[paged_kv_cache]") {
  for (const index_t page : {1, 3, 4, 16}) {
    CAPTURE(page);
    PagedKvCache<bfloat16> cache = empty_cache<bfloat16>(options_of(page, 40));
    const Tokens start{1, 2, 3, 4, 5};
    const index_t of_start = (5 + page - 1) / page, a = cache.add();
    append(cache, start, a);
    const index_t b = cache.fork(a), c = cache.fork(b);
    CHECK(cache.free_pages() == 40 - of_start);
    CHECK(std::ranges::equal(cache.pages_of(a), cache.pages_of(c)));
    append(cache, {6}, b);
    append(cache, {7, 8}, a);
    CHECK(holds(cache, a, {1, 2, 3, 4, 5, 7, 8}));
    CHECK(holds(cache, b, {1, 2, 3, 4, 5, 6}));
    CHECK(holds(cache, c, start));
    CHECK(cache.pages_of(a).back() != cache.pages_of(c).back());
    cache.remove(a);
    CHECK(holds(cache, b, {1, 2, 3, 4, 5, 6}));
    cache.remove(b);
    CHECK(cache.free_pages() == 40 - of_start);
    // The only user of a page appends to it without a copy.
    const index_t last = cache.pages_of(c).back();
    append(cache, {9}, c);
    CHECK(cache.pages_of(c)[static_cast<std::size_t>(of_start - 1)] == last);
    CHECK(holds(cache, c, joined(start, {9})));
    cache.remove(c);
    CHECK(cache.free_pages() == 40);
    CHECK(cache.sequences() == 0);
  }
}

TEST_CASE("append after truncate into a shared page leaves the other sequences unchanged",
          "[paged_kv_cache]") {
  PagedKvCache<float> cache = empty_cache<float>(options_of(4, 10));
  const index_t a = cache.add();
  append(cache, {1, 2, 3, 4, 5, 6, 7}, a);
  const index_t b = cache.fork(a);
  cache.truncate(a, 2);
  CHECK(holds(cache, a, {1, 2}));
  CHECK(cache.free_pages() == 8);
  append(cache, {8, 9, 10}, a);
  CHECK(holds(cache, a, {1, 2, 8, 9, 10}));
  CHECK(holds(cache, b, {1, 2, 3, 4, 5, 6, 7}));
  cache.truncate(b, 4);  // the end of a page
  append(cache, {11}, b);
  CHECK(holds(cache, b, {1, 2, 3, 4, 11}));
  cache.truncate(b, 0);
  CHECK(holds(cache, b, {}));
  CHECK(holds(cache, a, {1, 2, 8, 9, 10}));
  CHECK(cache.free_pages() == 8);
}

TEST_CASE("a copied page keeps the factors of its rows", "[paged_kv_cache]") {
  PagedKvCache<Int8> cache = empty_cache<Int8>(options_of(4, 4));
  const index_t a = cache.add();
  append(cache, {100, 2, 3}, a);
  const std::array<index_t, 2> ids{a, cache.fork(a)};
  append(cache, {40}, a);
  for (index_t h = 0; h < kv_heads; ++h) {
    const auto copied = cache.source(ids).run(0, h, 0), kept = cache.source(ids).run(1, h, 0);
    REQUIRE(copied.count == 4);
    REQUIRE(kept.count == 3);
    CHECK(copied.k != kept.k);
    CHECK(std::equal(kept.k_scales, kept.k_scales + 3, copied.k_scales));
    CHECK(std::equal(kept.v_scales, kept.v_scales + 3, copied.v_scales));
    CHECK(kept.k_scales[1] == element(2, h, width - 1) / 127);
  }
}

TEST_CASE("ids of removed sequences are used again", "[paged_kv_cache]") {
  PagedKvCache<float> cache(options_of(4, 4));
  const index_t a = cache.add(), b = cache.add(), c = cache.add();
  CHECK(std::set<index_t>{a, b, c}.size() == 3);
  append(cache, {1, 2}, b);
  cache.remove(b);
  CHECK(cache.sequences() == 2);
  CHECK(cache.add() == b);
  CHECK(holds(cache, b, {}));
  append(cache, {3}, b);
  cache.remove(c);
  CHECK(cache.fork(b) == c);
  CHECK(holds(cache, c, {3}));
}

TEST_CASE("append to a paged cache rotates each key to the position in its sequence", "[paged_kv_cache]") {
  const Rope<float> rope({.width = 2}, 10);
  PagedKvCache<float> cache(options_of(2, 8)), one(options_of(8, 2));
  const index_t a = cache.add(), b = cache.add(), alone = one.add();
  append(cache, {1, 2, 3}, a);
  append(cache, {4, 1, 5, 2, 3}, std::vector<index_t>{a, b, -1, b, b}, &rope);
  append(one, {1, 2, 3}, std::vector<index_t>(3, alone), &rope);
  std::vector<float> expected{element(4, 1, 0), element(4, 1, 1)};
  const View<float, 2> view(expected.data(), {1, 2});
  ssmax::rope(view, view, rope, 3);
  const std::array<index_t, 2> ids{a, b};
  CHECK(std::equal(expected.begin(), expected.end(), cache.source(ids).run(0, 1, 3).k));
  for (index_t key = 0; key < 3; ++key) {
    const std::array ids_of_one{alone};
    const float* k = one.source(ids_of_one).run(0, 1, key).k;
    CHECK(std::equal(k, k + width, cache.source(ids).run(1, 1, key).k));
  }
}

TEST_CASE("a full pool refuses append and stays unchanged", "[paged_kv_cache][errors]") {
  PagedKvCache<float> cache = empty_cache<float>(options_of(4, 5));
  const index_t a = cache.add(), c = cache.add();
  append(cache, {1, 2, 3, 4, 5}, a);  // two pages
  const index_t b = cache.fork(a);
  append(cache, {6}, c);
  const auto contents = [&] {
    const auto [k, v] = cache.source({}).memory();
    std::vector<float> result(k.begin(), k.end());
    result.insert(result.end(), v.begin(), v.end());
    return result;
  };
  const std::vector<float> before = contents();
  const auto check_full = [&](const Tokens& tokens, const std::vector<index_t>& sequences, index_t needed) {
    try {
      append(cache, tokens, sequences);
      FAIL("nothing was thrown");
    } catch (const PagedKvCacheFull& error) {
      CHECK(error.needed == needed);
      CHECK(error.free == 2);
      CHECK(error.what() ==
            "ssmax::PagedKvCache::append: k needs pages " + std::to_string(needed) + ", free pages are 2");
    }
    CHECK(holds(cache, a, {1, 2, 3, 4, 5}));
    CHECK(holds(cache, b, {1, 2, 3, 4, 5}));
    CHECK(holds(cache, c, {6}));
    CHECK(cache.free_pages() == 2);
    CHECK(same_bits(contents(), before));
  };
  check_full(Tokens(12, 7), std::vector<index_t>(12, c), 3);
  check_full({7, 7, 7, 7, 8, 8, 8, 8}, {a, a, a, a, c, c, c, c}, 3);  // a copy, and a page each
  check_full({7, 8, 7, 7, 7, 8, 8, 8}, {a, b, a, a, a, b, b, b}, 3);  // b keeps the page
  append(cache, {7, 8, 8, 8, 8}, std::vector<index_t>{a, b, b, b, b});
  CHECK(cache.free_pages() == 0);
  CHECK(holds(cache, a, {1, 2, 3, 4, 5, 7}));
  CHECK(holds(cache, b, {1, 2, 3, 4, 5, 8, 8, 8, 8}));
  append(cache, {9, 9}, a);
  const index_t d = cache.fork(a);
  cache.truncate(d, 5);
  try {
    append(cache, {9}, d);
    FAIL("nothing was thrown");
  } catch (const std::runtime_error& error) {
    CHECK(std::string_view(error.what()).ends_with("k needs pages 1, free pages are 0"));
  }
  cache.remove(a);
  append(cache, {9}, d);
  CHECK(holds(cache, d, {1, 2, 3, 4, 5, 9}));
}

TEST_CASE("keep copies a shared page only if a key moves to the page", "[paged_kv_cache]") {
  PagedKvCache<float> cache = empty_cache<float>(options_of(4, 5));
  const index_t a = cache.add();
  append(cache, {1, 2, 3, 4, 5, 6, 7, 8, 9}, a);
  const index_t b = cache.fork(a);
  cache.keep(b, 2, std::array<index_t, 3>{2, 3, 4});
  CHECK(holds(cache, b, {1, 2, 3, 4, 5}));
  CHECK(cache.free_pages() == 2);
  cache.keep(b, 1, std::array<index_t, 3>{1, 2, 4});
  CHECK(holds(cache, b, {1, 2, 3, 5}));
  CHECK(cache.free_pages() == 1);
  const index_t c = cache.fork(a);
  cache.keep(c, 3, std::array<index_t, 1>{8});
  CHECK(holds(cache, c, {1, 2, 3, 9}));
  CHECK(cache.free_pages() == 0);
  const index_t d = cache.fork(a);
  try {
    cache.keep(d, 3, std::array<index_t, 3>{4, 6, 8});
    FAIL("nothing was thrown");
  } catch (const PagedKvCacheFull& error) {
    CHECK(error.what() == std::string("ssmax::PagedKvCache::keep: kept needs pages 2, free pages are 0"));
  }
  CHECK(holds(cache, d, {1, 2, 3, 4, 5, 6, 7, 8, 9}));
  CHECK(holds(cache, a, {1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST_CASE("keep moves the factors of rows", "[kv_cache][paged_kv_cache]") {
  KvCache<Int8> cache({.kv_heads = 2, .width = 8, .capacity = 9});
  PagedKvCache<Int8> pages({.kv_heads = 2, .width = 8, .page = 4, .pages = 3});
  const index_t id = pages.add();
  std::vector<float> rows = reference::normals<float>(2 * 9 * 8, 1);
  const View<const float, 4> all(rows.data(), {1, 2, 9, 8}, {0, 8, 16, 1});
  cache.append(all, all);
  pages.append({rows.data(), {9, 2, 8}}, {rows.data(), {9, 2, 8}}, std::vector<index_t>(9, id));
  const KvCache<Int8> before = cache;
  const std::vector<index_t> kept{3, 6, 7};
  cache.keep(0, 2, kept);
  pages.keep(id, 2, kept);
  CHECK(cache.length(0) == 5);
  for (index_t i = 0; i < 3; ++i) {
    for (index_t h = 0; h < 2; ++h) {
      const auto expected = before.run(0, h, kept[static_cast<std::size_t>(i)]);
      const std::array ids_of_pages{id};
      for (const auto& run : {cache.run(0, h, 2 + i), pages.source(ids_of_pages).run(0, h, 2 + i)}) {
        CHECK(run.k_scales[0] == expected.k_scales[0]);
        CHECK(run.v_scales[0] == expected.v_scales[0]);
        const auto same = [](const Int8& x, const Int8& y) { return x.value == y.value; };
        CHECK(std::equal(run.k, run.k + 8, expected.k, same));
        CHECK(std::equal(run.v, run.v + 8, expected.v, same));
      }
    }
  }
}

// ---- Errors -----------------------------------------------------------------------------------------------

TEST_CASE("a paged cache refuses options that make no sense", "[paged_kv_cache][errors]") {
  const auto check = [](const PagedKvCacheOptions& options, std::initializer_list<std::string_view> parts) {
    check_refused(parts, [&] { PagedKvCache<half> cache(options); });
  };
  const index_t huge = index_t{1} << 62;
  check({.kv_heads = 0, .width = 2, .pages = 2}, {"PagedKvCache: kv_heads is 0", "at least 1"});
  check({.width = 0, .pages = 2}, {"width is 0"});
  check({.width = 2, .value_width = -1, .pages = 2}, {"value_width is -1"});
  check({.width = 2, .page = 0, .pages = 2}, {"page is 0"});
  check({.width = 2}, {"pages is 0"});
  check({.width = 2, .pages = huge}, {"pages is 4611686018427387904", "too many bytes"});
  check({.width = huge, .pages = 2}, {"too many bytes"});
  check({.width = 2, .value_width = huge, .pages = 2}, {"too many bytes"});
  check({.width = 2, .page = huge, .pages = 2}, {"too many bytes"});
  const PagedKvCache<half> cache({.width = 3, .pages = 2});
  CHECK(cache.options().value_width == 3);
  CHECK(cache.options().page == 64);
  CHECK(cache.free_pages() == 2);
}

TEST_CASE("a paged cache refuses ids without a sequence", "[paged_kv_cache][errors]") {
  PagedKvCache<float> cache(options_of(4, 4));
  const index_t a = cache.add(), b = cache.add();
  append(cache, {1, 2}, a);
  cache.remove(b);
  const auto check = [](const std::string& function, const std::string& name, const auto& call) {
    const std::string start = "ssmax::PagedKvCache::" + function + ": " + name;
    check_refused({start + " names sequence 7, must be at least 0 and below 2"}, [&] { call(7); });
    check_refused({start + " names removed sequence 1, sequences are 1"}, [&] { call(1); });
  };
  const auto check_negative = [&](const std::string& function, const std::string& name, const auto& call) {
    check(function, name, call);
    check_refused({name + " names sequence -1"}, [&] { call(-1); });
  };
  check_negative("fork", "id", [&](index_t id) { static_cast<void>(cache.fork(id)); });
  check_negative("truncate", "id", [&](index_t id) { cache.truncate(id, 0); });
  check_negative("remove", "id", [&](index_t id) { cache.remove(id); });
  check_negative("length", "id", [&](index_t id) { static_cast<void>(cache.length(id)); });
  check_negative("pages_of", "id", [&](index_t id) { static_cast<void>(cache.pages_of(id)); });
  check_negative("source", "ids", [&](index_t id) {
    const std::array two{a, id};
    static_cast<void>(cache.source(two));
  });
  check("append", "sequences", [&](index_t id) { append(cache, {3, 4}, std::vector<index_t>{a, id}); });
  check_refused({"PagedKvCache::truncate: length is 3", "2"}, [&] { cache.truncate(a, 3); });
  check_refused({"length is -1"}, [&] { cache.truncate(a, -1); });
  CHECK(holds(cache, a, {1, 2}));
  CHECK(cache.sequences() == 1);
  CHECK(cache.free_pages() == 3);
}

TEST_CASE("append to a paged cache throws for views that do not fit, before it changes the cache",
          "[paged_kv_cache][errors]") {
  const std::vector<float> data(200);
  const float* const at = data.data();
  PagedKvCache<float> cache(options_of(4, 4));
  const std::vector<index_t> ids(5, cache.add());
  append(cache, {1, 2, 3}, ids[0]);
  const View<const float, 3> k(at, {5, kv_heads, width}), v(at, {5, kv_heads, value_width});
  const Rope<float> short_rope({.width = 2}, 7), late({.width = 2, .first_position = 4}, 40),
      wide({.width = 4}, 40);
  const auto check = [&](const View<const float, 3>& new_k, const View<const float, 3>& new_v,
                         const Rope<float>* rope, std::initializer_list<std::string_view> parts) {
    check_refused({"ssmax::PagedKvCache::append: "}, [&] { cache.append(new_k, new_v, ids, rope); });
    check_refused(parts, [&] { cache.append(new_k, new_v, ids, rope); });
    CHECK(holds(cache, ids[0], {1, 2, 3}));
    CHECK(cache.free_pages() == 3);
  };
  check({at, {4, kv_heads, width}}, v, nullptr, {"k has tokens 4, sequences has 5"});
  check(k, {at, {6, kv_heads, value_width}}, nullptr, {"v has tokens 6, sequences has 5"});
  check({at, {5, 3, width}}, v, nullptr, {"k has heads 3", "2"});
  check(k, {at, {5, 1, value_width}}, nullptr, {"v has heads 1", "2"});
  check({at, {5, kv_heads, 4}}, v, nullptr, {"k has channels 4", "3"});
  check(k, {at, {5, kv_heads, 3}}, nullptr, {"v has channels 3", "2"});
  check({nullptr, {5, kv_heads, width}}, v, nullptr, {"k is null", "30"});
  check(k, {nullptr, {5, kv_heads, value_width}}, nullptr, {"v is null", "20"});
  check({at, {-5, kv_heads, width}}, v, nullptr, {"k has extent -5"});
  check({at, {5, kv_heads, width}, {12, 6, 2}}, v, nullptr, {"k has last stride 2", "1"});
  check(k, v, &short_rope, {"k has position 7", "6"});
  check(k, v, &late, {"k has position 3", "4"});
  check(k, v, &wide, {"k has channels 3", "4"});
  CHECK_NOTHROW(cache.append(k, v, ids));
}

TEST_CASE("results that overlap the pool of a paged cache are refused", "[paged_kv_cache][errors]") {
  PagedKvCache<float> cache({.width = 8, .pages = 2});
  const std::array<index_t, 1> ids{cache.add()};
  const std::vector<float> rows(8);
  const View<const float, 3> row(rows.data(), {1, 1, 8});
  cache.append(row, row, ids);
  auto* const pool = const_cast<float*>(cache.source(ids).memory().first.data());
  check_refused({"ssmax::attention: out", "overlaps"}, [&] {
    ssmax::attention(
        {.q = {rows.data(), {1, 1, 1, 8}}, .keys = cache.source(ids), .out = {pool + 100, {1, 1, 1, 8}}},
        ssmax::Causal{});
  });
}

TEST_CASE("append to a paged cache allocates only for longer page tables", "[paged_kv_cache]") {
  PagedKvCache<half> cache({.width = 4, .page = 5, .pages = 1000});
  const std::vector<index_t> ids(5, cache.add());
  const std::vector<float> rows(20);
  const View<const float, 3> view(rows.data(), {5, 1, 4});
  const long before = allocation_count();
  for (int i = 0; i < 1000; ++i) cache.append(view, view, ids);
  const long during = allocation_count() - before;
  CHECK(during > 0);  // or they were not counted
  CHECK(during <= 11);
  cache.truncate(ids[0], 0);
  for (int i = 0; i < 1000; ++i) cache.append(view, view, ids);
  CHECK(allocation_count() - before == during);
}

// ---- Many random steps ------------------------------------------------------------------------------------

/// Compares a cache with a model after each of `steps` random steps.
void check_random_steps(int steps) {
  for (const index_t page : {1, 3, 16}) {
    CAPTURE(page);
    const index_t pages = 300 / page;
    PagedKvCache<float> cache = empty_cache<float>(options_of(page, pages));
    std::map<index_t, Tokens> model;
    std::mt19937 random(static_cast<unsigned>(page));
    const auto below = [&](index_t end) {
      return static_cast<index_t>(random() % static_cast<unsigned>(end));
    };
    const auto any = [&] { return std::next(model.begin(), below(std::ssize(model))); };
    float token = 0;
    int full = 0, full_keep = 0, wrong = 0, step = 0;
    for (; step < steps && wrong == 0; ++step) {
      const index_t action = model.empty() ? 0 : below(10);
      if (action == 0 && model.size() < 12) {
        wrong += !model.emplace(cache.add(), Tokens{}).second;
      } else if (action == 1 && model.size() < 12) {
        const auto from = any();
        wrong += !model.emplace(cache.fork(from->first), from->second).second;
      } else if (action == 2) {
        const auto chosen = any();
        const index_t length = below(std::ssize(chosen->second) + 1);
        cache.truncate(chosen->first, length);
        chosen->second.resize(static_cast<std::size_t>(length));
      } else if (action == 3 && below(3) == 0) {
        const auto chosen = any();
        cache.remove(chosen->first);
        model.erase(chosen);
      } else if (action == 4 && below(4) == 0) {
        const auto chosen = any();
        Tokens& tokens = chosen->second;
        const index_t length = below(std::ssize(tokens) + 1);
        std::vector<index_t> kept;
        Tokens after(tokens.begin(), tokens.begin() + length);
        for (index_t key = length; key < std::ssize(tokens); ++key) {
          if (below(3) == 0) continue;
          kept.push_back(key);
          after.push_back(tokens[static_cast<std::size_t>(key)]);
        }
        try {
          cache.keep(chosen->first, length, kept);
          tokens = std::move(after);
        } catch (const PagedKvCacheFull& error) {
          wrong += error.needed <= error.free || error.free != cache.free_pages();
          ++full_keep;
        }
      } else if (action > 3) {
        Tokens tokens(static_cast<std::size_t>(below(2 * page + 6)));
        std::vector<index_t> sequences;
        std::map<index_t, Tokens> after = model;
        for (float& x : tokens) {
          x = token = token < 500 ? token + 1 : 0;
          sequences.push_back(below(6) == 0 ? -1 : any()->first);
          if (sequences.back() >= 0) after[sequences.back()].push_back(x);
        }
        try {
          append(cache, tokens, sequences);
          model = std::move(after);
        } catch (const PagedKvCacheFull& error) {
          wrong += error.needed <= error.free || error.free != cache.free_pages();
          ++full;
        }
      }
      std::vector<index_t> ids;
      std::set<index_t> used;
      for (const auto& [id, tokens] : model) {
        ids.push_back(id);
        used.insert(cache.pages_of(id).begin(), cache.pages_of(id).end());
      }
      forget_free_pages(cache, ids);
      for (const auto& [id, tokens] : model) wrong += !holds(cache, id, tokens);
      wrong += cache.free_pages() + std::ssize(used) != pages;
      wrong += cache.sequences() != std::ssize(model);
    }
    CAPTURE(step);
    CHECK(wrong == 0);
    CHECK(full > steps / 340);
    CHECK((page == 1 || full_keep > 0));
  }
}

TEST_CASE(
    "random appends, forks, kept branches, truncations and removals of a paged cache agree with a model",
    "[decode][paged_kv_cache]") {
  check_random_steps(1'000);
}

TEST_CASE("many random steps of a paged cache agree with a model", "[decode][paged_kv_cache][exhaustive]") {
  check_random_steps(34'000);
}

}  // namespace decode_problem::paged_kv_cache_test
