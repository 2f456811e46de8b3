// What KvCache refuses, and that it has then changed nothing.

#include "kv_cache_rows.hpp"
#include "refusal.hpp"
#include "test.hpp"
#include "untouched_memory.hpp"

namespace kv_cache_rows::kv_cache_errors_test {

TEST_CASE("a cache refuses options that make no sense", "[kv_cache]") {
  const auto check = [](const KvCacheOptions& options, std::initializer_list<std::string_view> parts) {
    check_refused(parts, [&] { KvCache<half> cache(options); });
  };
  check({.batch = -1, .width = 2, .capacity = 2}, {"KvCache: batch is -1"});
  check({.kv_heads = 0, .width = 2, .capacity = 2}, {"kv_heads is 0"});
  check({.width = 0, .capacity = 2}, {"width is 0"});
  check({.width = -3, .capacity = 2}, {"width is -3"});
  check({.width = 2, .value_width = -1, .capacity = 2}, {"value_width is -1"});
  check({.width = 2, .capacity = 0}, {"capacity is 0"});
  check({.width = index_t{1} << 62, .capacity = 2}, {"too many bytes"});
  check({.width = 2, .value_width = index_t{1} << 62, .capacity = 2}, {"too many bytes"});
  check({.width = 2, .capacity = -5}, {"capacity is -5"});
  check({.batch = index_t{1} << 30, .kv_heads = 1 << 20, .width = 128, .capacity = index_t{1} << 30},
        {"capacity is 1073741824", "too many"});
  check({.batch = 1, .kv_heads = 1, .width = 1, .capacity = std::numeric_limits<index_t>::max()},
        {"capacity is 9223372036854775807"});
  check({.width = 2, .capacity = 5, .ring = true, .first = -1}, {"first is -1", "at least 0"});
  check({.width = 2, .capacity = 5, .first = 4}, {"first is 4", "without ring"});
  check({.width = 2, .capacity = 5, .ring = true, .first = 5}, {"first is 5", "less than the capacity, 5"});
  CHECK_NOTHROW(KvCache<half>({.width = 2, .capacity = 5, .ring = true, .first = 4}));
  KvCache<half> cache({.width = 3, .capacity = 2});
  CHECK(cache.options().value_width == 3);
  CHECK(cache.options().batch == 1);
  CHECK_FALSE(cache.options().ring);
}

/// A cache with something in it, and an append that fits.
struct Append {
  std::vector<float> data = reference::normals<float>(1000, 7);
  float* const at = data.data();
  KvCache<float> cache{
      KvCacheOptions{.batch = 2, .kv_heads = 3, .width = 4, .value_width = 5, .capacity = 6}};
  View<const float, 4> k{at, {2, 3, 2, 4}}, v{at + 100, {2, 3, 2, 5}};
  const Rope<float>* rope = nullptr;
  std::vector<index_t> counts;

  Append() { cache.append(k, v, nullptr, std::vector<index_t>{2, 1}); }

  void run() { cache.append(k, v, rope, counts); }
  void refuses(std::initializer_list<std::string_view> parts) {
    const Contents before(cache);
    check_refused({"ssmax::KvCache::append: "}, [&] { run(); });
    check_refused(parts, [&] { run(); });
    CHECK(Contents(cache) == before);
  }
};

constexpr auto refuses = untouched_memory::refuses<Append>;

TEST_CASE("a cache throws for a sequence index out of range", "[kv_cache]") {
  const KvCache<float> cache({.batch = 2, .kv_heads = 1, .width = 4, .capacity = 8});
  for (const index_t b : {index_t{-1}, index_t{2}, std::numeric_limits<index_t>::max()}) {
    check_refused({"ssmax::KvCache::length: b is", "sequences are 2"}, [&] { (void)cache.length(b); });
    check_refused({"b is"}, [&] { (void)cache.stored(b); });
    check_refused({"b is"}, [&] { (void)cache.forgotten(b); });
    check_refused({"b is"}, [&] { (void)cache.run(b, 0, 0); });
  }
}

TEST_CASE("append throws for views that do not fit, before it changes the cache", "[kv_cache]") {
  refuses({"k has batch 1", "2"}, [](Append& c) { c.k = {c.at, {1, 3, 2, 4}}; });
  refuses({"v has batch 3", "2"}, [](Append& c) { c.v = {c.at, {3, 3, 2, 5}}; });
  refuses({"k has heads 2", "3"}, [](Append& c) { c.k = {c.at, {2, 2, 2, 4}}; });
  refuses({"v has heads 6", "3"}, [](Append& c) { c.v = {c.at, {2, 6, 2, 5}}; });
  refuses({"k has channels 5", "4"}, [](Append& c) { c.k = {c.at, {2, 3, 2, 5}}; });
  refuses({"v has channels 4", "5"}, [](Append& c) { c.v = {c.at, {2, 3, 2, 4}}; });
  refuses({"v has extent 1 in dimension 2", "k has 2"}, [](Append& c) { c.v = {c.at, {2, 3, 1, 5}}; });
  refuses({"k", "-2"}, [](Append& c) { c.k = {c.at, {2, 3, -2, 4}}; });
  refuses({"k is null", "48"}, [](Append& c) { c.k = {nullptr, {2, 3, 2, 4}}; });
  refuses({"v is null", "60"}, [](Append& c) { c.v = {nullptr, {2, 3, 2, 5}}; });
  refuses({"k has last stride 2", "1"}, [](Append& c) { c.k = {c.at, {2, 3, 2, 4}, {48, 16, 8, 2}}; });
  refuses({"v has last stride 0", "1"}, [](Append& c) { c.v = {c.at, {2, 3, 2, 5}, {0, 0, 0, 0}}; });
}

TEST_CASE("append throws for counts out of range, before it changes the cache", "[kv_cache]") {
  refuses({"counts has 3", "new positions are 2"}, [](Append& c) { c.counts = {2, 3}; });
  refuses({"counts has -1"}, [](Append& c) { c.counts = {-1, 0}; });
  refuses({"counts has extent 1", "sequences are 2"}, [](Append& c) { c.counts = {1}; });
  refuses({"counts has extent 3", "sequences are 2"}, [](Append& c) { c.counts = {1, 1, 1}; });
}

TEST_CASE("append throws if the cache is full, before it changes the cache", "[kv_cache]") {
  refuses({"k would bring a sequence to length 8", "the capacity is 6"}, [](Append& c) {
    c.k = {c.at, {2, 3, 6, 4}};
    c.v = {c.at + 200, {2, 3, 6, 5}};
  });
  refuses({"length 7", "the capacity is 6"}, [](Append& c) {
    c.k = {c.at, {2, 3, 6, 4}};
    c.v = {c.at + 200, {2, 3, 6, 5}};
    c.counts = {4, 6};
  });
  // The first sequence alone: lengths are 2 and 1 of 6.
  Append call;
  call.k = {call.at, {2, 3, 5, 4}};
  call.v = {call.at + 200, {2, 3, 5, 5}};
  call.refuses({"length 7", "the capacity is 6"});
  call.counts = {4, 5};
  CHECK_NOTHROW(call.run());
  CHECK(call.cache.length(0) == 6);
  CHECK(call.cache.length(1) == 6);
  call.counts = {0, 1};
  call.refuses({"length 7"});
  call.counts = {0, 0};
  CHECK_NOTHROW(call.run());
}

TEST_CASE("append throws for positions outside the rope's tables, before it changes the cache",
          "[kv_cache]") {
  const Rope<float> brief({.width = 4}, 3), enough({.width = 4}, 4), wide({.width = 6}, 20),
      late({.width = 2, .first_position = 2}, 9);
  refuses({"k has position 3", "last is 2"}, [&](Append& c) { c.rope = &brief; });
  refuses({"k has channels 4", "width is 6"}, [&](Append& c) { c.rope = &wide; });
  Append fits, starts_late;  // lengths 2 and 1
  fits.rope = &enough;
  CHECK_NOTHROW(fits.run());
  starts_late.rope = &late;
  starts_late.refuses({"k has position 1", "first is 2"});
  starts_late.counts = {2, 0};
  CHECK_NOTHROW(starts_late.run());
}

}  // namespace kv_cache_rows::kv_cache_errors_test
