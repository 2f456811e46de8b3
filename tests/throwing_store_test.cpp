// A storage type of a user whose `store` throws: append leaves the cache as it was.

#include "refusal.hpp"
#include "test.hpp"

namespace throwing_store_test {

struct Fragile {
  float value;
};
int stores_left = 1 << 30;

}  // namespace throwing_store_test

template <>
struct ssmax::StorageTraits<throwing_store_test::Fragile> {
  using Compute = float;
  using Fragile = throwing_store_test::Fragile;
  static void load(const Fragile* in, index_t n, float* out) {
    for (index_t i = 0; i < n; ++i) out[i] = in[i].value;
  }
  static void store(const float* in, index_t n, Fragile* out) {
    if (throwing_store_test::stores_left-- <= 0) throw std::runtime_error("store");
    for (index_t i = 0; i < n; ++i) out[i].value = in[i];
  }
};

namespace throwing_store_test {

using namespace ssmax;

constexpr index_t d = 2, most = 20;

/// Keys and values of token t are t + 1.
std::vector<float> tokens(index_t first, index_t count) {
  std::vector<float> rows;
  for (index_t i = 0; i < count * d; ++i) rows.push_back(static_cast<float>(first + i / d + 1));
  return rows;
}

template <class Source>
std::vector<float> keys_of(const Source& source, index_t b) {
  std::vector<float> result;
  for (index_t key = 0; key < source.length(b); ++key) result.push_back(source.run(b, 0, key).k[0].value);
  return result;
}

TEST_CASE("append to a paged cache keeps its keys and pages if a store throws", "[kv_cache][paged]") {
  for (int fails_at = 0; fails_at < 12; ++fails_at) {
    INFO("store " << fails_at);
    PagedKvCache<Fragile> cache({.kv_heads = 1, .width = d, .page = 2, .pages = 8});
    const std::vector<index_t> ids{cache.add(), cache.add()};
    const auto append = [&](index_t first, index_t count, const std::vector<index_t>& sequences) {
      const std::vector<float> rows = tokens(first, count);
      const View<const float, 3> view{rows.data(), {count, 1, d}};
      cache.append(view, view, sequences);
    };
    append(0, 3, {ids[0], ids[0], ids[0]});
    const index_t fork = cache.fork(ids[0]);
    const index_t free = cache.free_pages();
    stores_left = fails_at;
    CHECK_THROWS_AS(append(3, 6, {ids[0], ids[1], ids[0], fork, ids[1], ids[0]}), std::runtime_error);
    stores_left = 1 << 30;
    CHECK(cache.length(ids[0]) == 3);
    CHECK(cache.length(ids[1]) == 0);
    CHECK(cache.length(fork) == 3);
    CHECK(cache.pages_of(ids[1]).empty());
    CHECK(std::ssize(cache.pages_of(ids[0])) == 2);
    CHECK(cache.free_pages() <= free);
    append(10, 4, {ids[1], ids[0], ids[1], fork});
    const std::vector<index_t> all{ids[0], ids[1], fork};
    const auto source = cache.source(all);
    CHECK(keys_of(source, 0) == std::vector<float>{1, 2, 3, 12});
    CHECK(keys_of(source, 1) == std::vector<float>{11, 13});
    CHECK(keys_of(source, 2) == std::vector<float>{1, 2, 3, 14});
    for (const index_t id : all) cache.remove(id);
    CHECK(cache.free_pages() == 8);
  }
}

TEST_CASE("append to a cache keeps its lengths if a store throws", "[kv_cache]") {
  for (int fails_at = 0; fails_at < 8; ++fails_at) {
    INFO("store " << fails_at);
    KvCache<Fragile> cache({.batch = 2, .kv_heads = 1, .width = d, .capacity = most});
    const auto append = [&](index_t first, index_t count) {
      std::vector<float> rows = tokens(first, count), both = rows;
      both.insert(both.end(), rows.begin(), rows.end());
      const View<const float, 4> view{both.data(), {2, 1, count, d}};
      cache.append(view, view);
    };
    append(0, 3);
    stores_left = fails_at;
    CHECK_THROWS_AS(append(3, 2), std::runtime_error);
    stores_left = 1 << 30;
    append(10, 1);
    for (const index_t b : {0, 1}) CHECK(keys_of(cache, b) == std::vector<float>{1, 2, 3, 11});
  }
}

TEST_CASE("out in the memory of q is refused if it has another type of the user", "[attention][errors]") {
  std::vector<Fragile> memory(16);
  auto* const q = reinterpret_cast<half*>(memory.data());
  const std::vector<half> keys(16);
  const View<const half, 4> k(keys.data(), {1, 1, 2, 8});
  check_refused({"ssmax::attention: out", "overlaps q"}, [&] {
    attention({.q = View<const half, 4>(q, {1, 1, 2, 8}),
               .k = k,
               .v = k,
               .out = View<Fragile, 4>(memory.data(), {1, 1, 2, 8})});
  });
}

}  // namespace throwing_store_test
