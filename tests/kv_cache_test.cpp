// KvCache: sequences with lengths of their own, what a ring forgets, and truncation.

#include <random>

#include "kv_cache_rows.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace kv_cache_rows::kv_cache_test {

// ---- Sequences of their own lengths -----------------------------------------------------------------------

TEST_CASE("counts say how many positions of each sequence are real", "[kv_cache]") {
  const Rows<float> k(3, 2, 4, 5, 1), v(3, 2, 4, 5, 2);
  KvCache<float> cache({.batch = 3, .kv_heads = 2, .width = 5, .capacity = 6});
  const auto holds_at = [&](index_t b, index_t position, index_t i) {
    bool same = true;
    for (index_t h = 0; h < 2; ++h) {
      for (index_t c = 0; c < 5; ++c) {
        same = same && key(cache, b, h, position, c) == k.view()(b, h, i, c) &&
               value(cache, b, h, position, c) == v.view()(b, h, i, c);
      }
    }
    return same;
  };
  cache.append(k.view(), v.view(), nullptr, std::vector<index_t>{2, 0, 4});
  CHECK(cache.length(0) == 2);
  CHECK(cache.length(1) == 0);
  CHECK(cache.length(2) == 4);
  cache.append(k.view(), v.view(), nullptr, std::vector<index_t>{4, 3, 0});
  CHECK(cache.length(0) == 6);
  CHECK(cache.length(1) == 3);
  CHECK(cache.length(2) == 4);
  for (index_t i = 0; i < 2; ++i) CHECK(holds_at(0, i, i));
  for (index_t i = 0; i < 4; ++i) CHECK(holds_at(0, 2 + i, i));
  for (index_t i = 0; i < 3; ++i) CHECK(holds_at(1, i, i));
  for (index_t i = 0; i < 4; ++i) CHECK(holds_at(2, i, i));
}

/// What a cache should hold: every row that a sequence has had, [position][head][channel].
struct Model {
  std::vector<std::vector<float>> k, v;
};

/// Whether each sequence has its model's length and, where they are held, its rows.
bool is_as(const KvCache<float>& cache, const Model& model) {
  const KvCacheOptions& options = cache.options();
  bool same = true;
  for (index_t b = 0; b < options.batch; ++b) {
    const auto& k = model.k[static_cast<std::size_t>(b)];
    const auto& v = model.v[static_cast<std::size_t>(b)];
    const index_t size = options.kv_heads * options.width, length = static_cast<index_t>(k.size()) / size;
    const KeyRange stored = cache.stored(b), forgotten = cache.forgotten(b);
    const index_t lost = options.ring ? std::max<index_t>(0, length - options.capacity) : 0;
    same = same && cache.length(b) == length && stored.begin == (options.first > 0 ? 0 : lost) &&
           stored.end == length && forgotten.begin == options.first && forgotten.size() == lost;
    if (!same) return false;
    for_each_index(
        {1, options.kv_heads, length, options.width}, [&](index_t, index_t h, index_t i, index_t c) {
          if (i >= forgotten.begin && i < forgotten.end) return;
          const auto at = static_cast<std::size_t>((i * options.kv_heads + h) * options.width + c);
          same = same && key(cache, b, h, i, c) == k[at] && value(cache, b, h, i, c) == v[at];
          const auto run = cache.run(b, h, i);
          same = same && run.count >= 1 && i + run.count <= length;
          for (index_t next = 1; next < run.count; ++next) {  // the keys that follow
            if (i + next >= forgotten.begin && i + next < forgotten.end) continue;
            const auto there = at + static_cast<std::size_t>(next * options.kv_heads * options.width);
            same = same && run.k[next * run.k_stride + c] == k[there];
          }
        });
  }
  return same;
}

/// Random calls on a cache and on its model. A call that would not fit must be refused.
void check_against_model(bool ring, index_t first, unsigned seed) {
  const KvCacheOptions options{
      .batch = 3, .kv_heads = 2, .width = 3, .capacity = 11, .ring = ring, .first = first};
  KvCache<float> cache(options);
  Model model{std::vector<std::vector<float>>(3), std::vector<std::vector<float>>(3)};
  std::mt19937 generator(seed);
  const auto below = [&](index_t bound) { return static_cast<index_t>(generator()) % bound; };
  const index_t size = options.kv_heads * options.width;
  int appended = 0, refused = 0;
  for (int step = 0; step < 200; ++step) {
    const index_t added = ring ? below(30) : below(6);
    const Rows<float> k(3, 2, added, 3, static_cast<unsigned>(step)), v(3, 2, added, 3, seed + 1);
    std::vector<index_t> counts;
    if (below(2) == 0) counts = {below(added + 1), below(added + 1), below(added + 1)};
    const auto real = [&](index_t b) { return counts.empty() ? added : counts[static_cast<std::size_t>(b)]; };
    bool fits = true;
    for (index_t b = 0; b < 3; ++b) fits = fits && (ring || cache.length(b) + real(b) <= options.capacity);
    if (fits) {
      cache.append(k.view(), v.view(), nullptr, counts);
      ++appended;
      for (index_t b = 0; b < 3; ++b) {
        for_each_index({real(b), 2, 3, 1}, [&](index_t i, index_t h, index_t c, index_t) {
          model.k[static_cast<std::size_t>(b)].push_back(k.view()(b, h, i, c));
          model.v[static_cast<std::size_t>(b)].push_back(v.view()(b, h, i, c));
        });
      }
    } else {
      REQUIRE_THROWS_AS(cache.append(k.view(), v.view(), nullptr, counts), std::invalid_argument);
      ++refused;
    }
    const index_t b = below(3), length = below(cache.length(b) + 1);
    const bool forgotten = cache.forgotten(b).size() > 0;
    if (below(ring ? 8 : 2) == 0 && !forgotten) {
      cache.truncate(b, length);
      model.k[static_cast<std::size_t>(b)].resize(static_cast<std::size_t>(length * size));
      model.v[static_cast<std::size_t>(b)].resize(static_cast<std::size_t>(length * size));
    }
    if (below(20) == 0) {
      cache.clear();
      for (std::size_t i = 0; i < 3; ++i) {
        model.k[i].clear();
        model.v[i].clear();
      }
    }
    CAPTURE(ring, first, seed, step);
    REQUIRE(is_as(cache, model));
  }
  CHECK(appended > 50);
  CHECK((refused > 10) == !ring);
}

TEST_CASE("any calls leave what a list of rows would hold", "[kv_cache]") {
  for (const unsigned seed : {1U, 2U, 3U}) {
    check_against_model(false, 0, seed);
    for (const index_t first : {0, 1, 4, 10}) check_against_model(true, first, seed);
  }
}

TEST_CASE("a copy is a cache of its own", "[kv_cache]") {
  const Rows<float> k(1, 1, 2, 3, 1), v(1, 1, 2, 3, 2);
  KvCache<float> cache({.width = 3, .capacity = 4});
  cache.append(k.view(), v.view());
  const Contents before(cache);
  KvCache<float> copy = cache;
  CHECK(Contents(copy) == before);
  copy.append(v.view(), k.view());
  CHECK(Contents(cache) == before);
  CHECK(copy.length(0) == 4);
  CHECK(holds(copy, 2, v.view(), k.view()));
}

TEST_CASE("a cache without sequences, and appending 0 positions", "[kv_cache]") {
  KvCache<float> none({.batch = 0, .width = 3, .capacity = 4});
  none.append({nullptr, {0, 1, 2, 3}}, {nullptr, {0, 1, 2, 3}});
  none.clear();
  KvCache<float> cache({.batch = 2, .width = 3, .capacity = 4});
  cache.append({nullptr, {2, 1, 0, 3}}, {nullptr, {2, 1, 0, 3}}, nullptr, std::vector<index_t>{0, 0});
  CHECK(cache.length(0) == 0);
  CHECK(cache.stored(1).size() == 0);
}

// ---- Rings ------------------------------------------------------------------------------------------------

TEST_CASE("a ring keeps the last positions", "[kv_cache]") {
  KvCache<float> cache({.width = 1, .capacity = 5, .ring = true});
  const auto append = [&](index_t first, index_t count) {
    std::vector<float> rows;
    for (index_t i = 0; i < count; ++i) rows.push_back(static_cast<float>(first + i));
    const View<const float, 4> view(rows.data(), {1, 1, count, 1});
    cache.append(view, view);
  };
  const auto check = [&](index_t begin, index_t end) {
    CAPTURE(begin, end);
    CHECK(cache.length(0) == end);
    CHECK(cache.stored(0).begin == begin);
    CHECK(cache.stored(0).end == end);
    for (index_t i = begin; i < end; ++i) {
      CHECK(key(cache, 0, 0, i, 0) == static_cast<float>(i));
      CHECK(value(cache, 0, 0, i, 0) == static_cast<float>(i));
    }
  };
  check(0, 0);
  append(0, 4);
  check(0, 4);
  append(4, 1);
  check(0, 5);
  append(5, 1);
  check(1, 6);
  append(6, 3);
  check(4, 9);
  append(9, 5);  // all of it at once
  check(9, 14);
  append(14, 23);  // more than it holds
  check(32, 37);
  append(37, 0);
  check(32, 37);
  cache.clear();
  check(0, 0);
  append(0, 11);
  check(6, 11);
}

TEST_CASE("sequences of a ring wrap each at their own time", "[kv_cache]") {
  KvCache<float> cache({.batch = 2, .width = 2, .capacity = 4, .ring = true});
  const Rows<float> k(2, 1, 7, 2, 1), v(2, 1, 7, 2, 2);
  cache.append(k.view(), v.view(), nullptr, std::vector<index_t>{7, 3});
  CHECK(cache.stored(0).begin == 3);
  CHECK(cache.stored(0).end == 7);
  CHECK(cache.stored(1).begin == 0);
  CHECK(cache.stored(1).end == 3);
  for (index_t i = 3; i < 7; ++i) CHECK(key(cache, 0, 0, i, 1) == k.view()(0, 0, i, 1));
  for (index_t i = 0; i < 3; ++i) CHECK(value(cache, 1, 0, i, 1) == v.view()(1, 0, i, 1));
}

TEST_CASE("a ring keeps its first positions and the last ones", "[kv_cache]") {
  KvCache<float> cache({.width = 1, .capacity = 5, .ring = true, .first = 2});
  const auto append = [&](index_t count) {
    std::vector<float> rows;
    for (index_t i = 0; i < count; ++i) rows.push_back(static_cast<float>(cache.length(0) + i));
    const View<const float, 4> view(rows.data(), {1, 1, count, 1});
    cache.append(view, view);
  };
  const auto check = [&](index_t gap_end, index_t end) {
    CAPTURE(gap_end, end);
    CHECK(cache.length(0) == end);
    CHECK(cache.stored(0).begin == 0);
    CHECK(cache.stored(0).end == end);
    CHECK(cache.forgotten(0).begin == 2);
    CHECK(cache.forgotten(0).end == gap_end);
    for (index_t i = 0; i < end; ++i) {
      const bool lost = i >= 2 && i < gap_end;
      const float place = static_cast<float>(lost ? i + (end - 1 - i) / 3 * 3 : i);  // the key that took it
      CHECK(key(cache, 0, 0, i, 0) == place);
      CHECK(value(cache, 0, 0, i, 0) == place);
    }
  };
  append(1);
  check(2, 1);
  append(4);
  check(2, 5);
  append(1);
  check(3, 6);
  append(7);  // more than the ring keeps of the last ones
  check(10, 13);
  check_refused({"length is 1", "the ring has forgotten keys before 10"}, [&] { cache.truncate(0, 1); });
  cache.truncate(0, 13);
  cache.clear();
  check(2, 0);
  append(20);  // first keys and last ones in one call
  check(17, 20);
  cache.clear();
  append(4);
  cache.truncate(0, 1);
  append(5);
  check(3, 6);
}

// ---- Truncation -------------------------------------------------------------------------------------------

TEST_CASE("truncate forgets the last positions of one sequence", "[kv_cache]") {
  const Rows<float> k(2, 1, 4, 3, 1), v(2, 1, 4, 3, 2);
  for (const bool ring : {false, true}) {
    KvCache<float> cache({.batch = 2, .width = 3, .capacity = 4, .ring = ring});
    cache.append(k.view(), v.view());
    cache.truncate(1, 4);  // nothing
    CHECK(cache.length(1) == 4);
    cache.truncate(1, 1);
    CHECK(cache.length(0) == 4);
    CHECK(cache.length(1) == 1);
    CHECK(cache.stored(1).end == 1);
    cache.append(v.view(), k.view(), nullptr, std::vector<index_t>{0, 3});
    CHECK(key(cache, 1, 0, 0, 0) == k.view()(1, 0, 0, 0));
    CHECK(key(cache, 1, 0, 1, 0) == v.view()(1, 0, 0, 0));
    CHECK(value(cache, 1, 0, 3, 2) == k.view()(1, 0, 2, 2));
    cache.truncate(0, 0);
    CHECK(cache.length(0) == 0);
    CHECK(cache.stored(0).size() == 0);
  }
}

TEST_CASE("truncate refuses what is not there", "[kv_cache]") {
  const Rows<float> k(2, 1, 4, 3, 1), v(2, 1, 4, 3, 2);
  KvCache<float> cache({.batch = 2, .width = 3, .capacity = 5});
  cache.append(k.view(), v.view());
  const Contents before(cache);
  const auto check = [&](index_t b, index_t length, std::initializer_list<std::string_view> parts) {
    check_refused(parts, [&] { cache.truncate(b, length); });
    CHECK(Contents(cache) == before);
  };
  check(2, 0, {"KvCache::truncate: b is 2", "sequences are 2"});
  check(-1, 0, {"b is -1"});
  check(0, 5, {"length is 5", "4"});
  check(0, -1, {"length is -1"});
}

TEST_CASE("a ring that has forgotten keys cannot be truncated", "[kv_cache]") {
  KvCache<float> cache({.batch = 2, .width = 3, .capacity = 3, .ring = true});
  const Rows<float> k(2, 1, 5, 3, 1), v(2, 1, 5, 3, 2);
  cache.append(k.view(), v.view(), nullptr, std::vector<index_t>{5, 3});
  const Contents before(cache);
  for (const index_t length : {4, 2, 0}) {
    check_refused({"KvCache::truncate", "length is", "forgotten", "2"}, [&] { cache.truncate(0, length); });
  }
  CHECK(Contents(cache) == before);
  CHECK_NOTHROW(cache.truncate(0, 5));
  CHECK_NOTHROW(cache.truncate(1, 1));
  CHECK(cache.length(1) == 1);
}

}  // namespace kv_cache_rows::kv_cache_test
