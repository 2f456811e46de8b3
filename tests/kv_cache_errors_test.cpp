// What KvCache refuses, and that it has then changed nothing.

#include <initializer_list>
#include <limits>
#include <ssmax/kv_cache.hpp>
#include <string_view>
#include <vector>

#include "catch.hpp"
#include "kv_cache_rows.hpp"
#include "reference.hpp"
#include "refusal.hpp"

namespace kv_cache_rows::kv_cache_errors_test {

TEST_CASE("a cache refuses options that make no sense", "[kv_cache]") {
  const auto check = [](const KvCacheOptions& options, std::initializer_list<std::string_view> parts) {
    check_refused([&] { KvCache<half> cache(options); }, parts);
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
  KvCache<float> cache{
      KvCacheOptions{.batch = 2, .kv_heads = 3, .width = 4, .value_width = 5, .capacity = 6}};
  View<const float, 4> k{data.data(), {2, 3, 2, 4}}, v{data.data() + 100, {2, 3, 2, 5}};
  const Rope<float>* rope = nullptr;
  std::vector<index_t> counts;

  Append() { cache.append(k, v, nullptr, std::vector<index_t>{2, 1}); }

  void run() { cache.append(k, v, rope, counts); }
  void refused(std::initializer_list<std::string_view> parts) {
    const Contents before(cache);
    check_refused([&] { run(); }, {"ssmax::KvCache::append: "});
    check_refused([&] { run(); }, parts);
    CHECK(Contents(cache) == before);
  }
};

TEST_CASE("a cache throws for a sequence index out of range", "[kv_cache]") {
  const KvCache<float> cache({.batch = 2, .kv_heads = 1, .width = 4, .capacity = 8});
  for (const index_t b : {index_t{-1}, index_t{2}, std::numeric_limits<index_t>::max()}) {
    check_refused([&] { (void)cache.length(b); }, {"ssmax::KvCache::length: b is", "sequences are 2"});
    check_refused([&] { (void)cache.stored(b); }, {"b is"});
    check_refused([&] { (void)cache.forgotten(b); }, {"b is"});
    check_refused([&] { (void)cache.run(b, 0, 0); }, {"b is"});
  }
}

TEST_CASE("append throws for views that do not fit, before it changes the cache", "[kv_cache]") {
  Append call;
  float* const at = call.data.data();
  SECTION("batch of k") {
    call.k = {at, {1, 3, 2, 4}};
    call.refused({"k has batch 1", "2"});
  }
  SECTION("batch of v") {
    call.v = {at, {3, 3, 2, 5}};
    call.refused({"v has batch 3", "2"});
  }
  SECTION("heads of k") {
    call.k = {at, {2, 2, 2, 4}};
    call.refused({"k has heads 2", "3"});
  }
  SECTION("heads of v") {
    call.v = {at, {2, 6, 2, 5}};
    call.refused({"v has heads 6", "3"});
  }
  SECTION("width of k") {
    call.k = {at, {2, 3, 2, 5}};
    call.refused({"k has channels 5", "4"});
  }
  SECTION("width of v") {
    call.v = {at, {2, 3, 2, 4}};
    call.refused({"v has channels 4", "5"});
  }
  SECTION("positions of k and v") {
    call.v = {at, {2, 3, 1, 5}};
    call.refused({"v has extent 1 in dimension 2", "k has 2"});
  }
  SECTION("a negative extent") {
    call.k = {at, {2, 3, -2, 4}};
    call.refused({"k", "-2"});
  }
  SECTION("null k") {
    call.k = {nullptr, {2, 3, 2, 4}};
    call.refused({"k is null", "48"});
  }
  SECTION("null v") {
    call.v = {nullptr, {2, 3, 2, 5}};
    call.refused({"v is null", "60"});
  }
  SECTION("strides of channels") {
    call.k = {at, {2, 3, 2, 4}, {48, 16, 8, 2}};
    call.refused({"k has last stride 2", "1"});
  }
  SECTION("strides of channels of v") {
    call.v = {at, {2, 3, 2, 5}, {0, 0, 0, 0}};
    call.refused({"v has last stride 0", "1"});
  }
}

TEST_CASE("append throws for counts out of range, before it changes the cache", "[kv_cache]") {
  Append call;
  SECTION("too many") {
    call.counts = {2, 3};
    call.refused({"counts has 3", "new positions are 2"});
  }
  SECTION("negative") {
    call.counts = {-1, 0};
    call.refused({"counts has -1"});
  }
  SECTION("one too few") {
    call.counts = {1};
    call.refused({"counts has extent 1", "sequences are 2"});
  }
  SECTION("one too many") {
    call.counts = {1, 1, 1};
    call.refused({"counts has extent 3", "sequences are 2"});
  }
}

TEST_CASE("append throws if the cache is full, before it changes the cache", "[kv_cache]") {
  Append call;  // lengths 2 and 1 of 6
  SECTION("all sequences") {
    call.k = {call.data.data(), {2, 3, 6, 4}};
    call.v = {call.data.data() + 200, {2, 3, 6, 5}};
    call.refused({"k would bring a sequence to length 8", "the capacity is 6"});
  }
  SECTION("the first sequence alone") {
    call.k = {call.data.data(), {2, 3, 5, 4}};
    call.v = {call.data.data() + 200, {2, 3, 5, 5}};
    call.refused({"length 7", "the capacity is 6"});
    call.counts = {4, 5};
    CHECK_NOTHROW(call.run());
    CHECK(call.cache.length(0) == 6);
    CHECK(call.cache.length(1) == 6);
    call.counts = {0, 1};
    call.refused({"length 7"});
    call.counts = {0, 0};
    CHECK_NOTHROW(call.run());
  }
  SECTION("the last sequence alone") {
    call.k = {call.data.data(), {2, 3, 6, 4}};
    call.v = {call.data.data() + 200, {2, 3, 6, 5}};
    call.counts = {4, 6};
    call.refused({"length 7", "the capacity is 6"});
  }
}

TEST_CASE("append throws for positions outside the rope's tables, before it changes the cache",
          "[kv_cache]") {
  Append call;  // lengths 2 and 1
  const Rope<float> brief({.width = 4}, 3), enough({.width = 4}, 4), wide({.width = 6}, 20),
      late({.width = 2, .first_position = 2}, 9);
  SECTION("too few") {
    call.rope = &brief;
    call.refused({"k has position 3", "last is 2"});
    call.rope = &enough;
    CHECK_NOTHROW(call.run());
  }
  SECTION("too many channels") {
    call.rope = &wide;
    call.refused({"k has channels 4", "width is 6"});
  }
  SECTION("too late") {
    call.rope = &late;
    call.refused({"k has position 1", "first is 2"});
    call.counts = {2, 0};
    CHECK_NOTHROW(call.run());
  }
}

}  // namespace kv_cache_rows::kv_cache_errors_test
