// Sources of keys of the user's: decode over pages is decode over a cache that holds the same keys.

#include <random>

#include "reference.hpp"
#include "refusal.hpp"
#include "target_scope.hpp"
#include "test.hpp"
#include "test_executors.hpp"
#include "wrapped_source.hpp"

namespace key_source_test {

using namespace ssmax;
using reference::largest_difference;

/// Pages of `page` keys, in any order in memory, with NaN where no sequence has a key. Those that lie before
/// first_key are not there.
template <class X>
struct Pages {
  using Element = X;

  KeySourceShape extents;
  index_t page;
  std::vector<index_t> lengths;             // [batch]
  std::vector<std::vector<index_t>> table;  // [batch][page of the sequence]: page in memory, -1: none
  std::vector<X> k, v;                      // [page][kv_heads][key][channel]

  Pages(const KvCache<X>& cache, index_t a_page, index_t first_key, unsigned seed)
      : extents(cache.shape()), page(a_page) {
    std::vector<index_t> free;
    for (index_t b = 0; b < extents.batch; ++b) {
      lengths.push_back(cache.length(b));
      table.emplace_back();
      for (index_t i = 0; i < (lengths.back() + page - 1) / page; ++i) {
        table.back().push_back(i * page < first_key / page * page ? -1 : static_cast<index_t>(free.size()));
        if (table.back().back() >= 0) free.push_back(table.back().back());
      }
    }
    std::mt19937 generator(seed);
    for (std::size_t i = free.size(); i > 1; --i) std::swap(free[i - 1], free[generator() % i]);
    const std::size_t rows = free.size() * static_cast<std::size_t>(extents.kv_heads * page);
    const X nothing(std::numeric_limits<float>::quiet_NaN());
    k.assign(rows * static_cast<std::size_t>(extents.width), nothing);
    v.assign(rows * static_cast<std::size_t>(extents.value_width), nothing);
    for (index_t b = 0; b < extents.batch; ++b) {
      for (index_t& at : table[static_cast<std::size_t>(b)]) {
        if (at >= 0) at = free[static_cast<std::size_t>(at)];
      }
      for (index_t h = 0; h < extents.kv_heads; ++h) {
        for (index_t key = stored(b).begin; key < lengths[static_cast<std::size_t>(b)]; ++key) {
          const KeyRun<X> from = cache.run(b, h, key), to = run(b, h, key);
          std::copy_n(from.k, extents.width, const_cast<X*>(to.k));
          std::copy_n(from.v, extents.value_width, const_cast<X*>(to.v));
        }
      }
    }
  }

  KeySourceShape shape() const { return extents; }
  index_t length(index_t b) const { return lengths[static_cast<std::size_t>(b)]; }
  KeyRange stored(index_t b) const {
    const auto& pages = table[static_cast<std::size_t>(b)];
    index_t first = 0;
    while (first < static_cast<index_t>(pages.size()) && pages[static_cast<std::size_t>(first)] < 0) ++first;
    return {std::min(first * page, length(b)), length(b)};
  }
  KeyRun<X> run(index_t b, index_t h, index_t key) const {
    const index_t at = table[static_cast<std::size_t>(b)][static_cast<std::size_t>(key / page)];
    const index_t row = (at * extents.kv_heads + h) * page + key % page;
    return {.k = k.data() + row * extents.width,
            .k_stride = extents.width,
            .v = v.data() + row * extents.value_width,
            .v_stride = extents.value_width,
            .count = std::min(page - key % page, length(b) - key)};
  }
};
static_assert(ssmax::KeySource<Pages<float>> && ssmax::KeySource<KvCache<bfloat16>>);

/// A cache that says too little: one key less is stored than the sequences have.
struct WithoutLast : WrappedSource<KvCache<float>> {
  KeyRange stored(index_t b) const { return {0, length(b) - 1}; }
};

constexpr index_t batch = 3, heads = 4, kv_heads = 2, width = 12, value_width = 9, longest = 1300;

/// Sequences of different lengths, one of them empty.
template <class X>
KvCache<X> filled_cache(index_t shortest) {
  KvCache<X> cache({.batch = batch,
                    .kv_heads = kv_heads,
                    .width = width,
                    .value_width = value_width,
                    .capacity = longest});
  const auto rows = static_cast<std::size_t>(batch * kv_heads * longest);
  const auto k = reference::normals<float>(rows * width, 1),
             v = reference::normals<float>(rows * value_width, 2);
  const std::array<index_t, 3> counts{longest, shortest, 517};
  cache.append(View<const float, 4>(k.data(), {batch, kv_heads, longest, width}),
               View<const float, 4>(v.data(), {batch, kv_heads, longest, value_width}), nullptr, counts);
  return cache;
}

struct Results {
  std::vector<float> out, lse;
};

template <class K, class M, class E>
Results decoded(const K& keys, index_t queries, const M& mask, E&& executor) {
  const auto rows = static_cast<std::size_t>(batch * heads * queries);
  const auto q = reference::normals<float>(rows * width, 3);
  Results results{std::vector<float>(rows * value_width, 7.0f), std::vector<float>(rows, 7.0f)};
  ssmax::attention({.q = View<const float, 4>(q.data(), {batch, heads, queries, width}),
                    .keys = keys,
                    .out = View<float, 4>(results.out.data(), {batch, heads, queries, value_width}),
                    .lse = View<float, 3>(results.lse.data(), {batch, heads, queries})},
                   SSMax<float>{0.4f, 0.1f}, mask, executor);
  return results;
}

/// Where keys are read as they lie, for up to 16 queries of a kv head, sums are cut where stretches end.
double tolerance(index_t queries) { return queries * (heads / kv_heads) <= 16 ? 4e-6 : 0; }

TEMPLATE_TEST_CASE("keys in pages give what a cache gives", "[decode][key_source]", float, bfloat16) {
  using X = TestType;
  for_each_target_of<X>([](const std::string& target) {
    // 16 queries of a kv head still read keys where they lie, 18 bring them into blocks.
    for (const index_t queries : {1, 8, 9, 40}) {
      const KvCache<X> cache = filled_cache<X>(queries);
      for (const index_t page : {1, 48, 128, 4096}) {
        CAPTURE(target, queries, page);
        const Pages<X> pages(cache, page, 0, 4);
        const Results expected = decoded(cache, queries, Causal{}, ssmax::Serial{});
        const Results serial = decoded(pages, queries, Causal{}, ssmax::Serial{});
        const Results shared = decoded(pages, queries, Causal{}, test_executors::Threads{3});
        CHECK(largest_difference(serial.out, expected.out) <= tolerance(queries));
        CHECK(largest_difference(serial.lse, expected.lse) <= tolerance(queries));
        CHECK(largest_difference(shared.out, serial.out) == 0);
      }
    }
  });
}

TEST_CASE("pages that a window has left are not asked for", "[decode][key_source]") {
  const KvCache<float> cache = filled_cache<float>(600);
  const ssmax::SlidingWindow window{100};
  for (const index_t queries : {1, 30}) {
    CAPTURE(queries);
    const Pages<float> pages(cache, 32, 380, 5);
    REQUIRE(pages.stored(0).begin == 352);
    const Results expected = decoded(cache, queries, window, ssmax::Serial{});
    const Results some = decoded(pages, queries, window, ssmax::Serial{});
    CHECK(largest_difference(some.out, expected.out) <= tolerance(queries));
    CHECK(largest_difference(some.lse, expected.lse) <= tolerance(queries));
  }
}

/// Runs of one key, whose strides are as large as index_t: UndefinedBehaviorSanitizer reports an overflow.
template <class X>
struct SingleKeys {
  using Element = X;
  static constexpr index_t keys = 300, d = 64;
  std::vector<X> rows = reference::normals<X>(keys * d, 5);
  std::vector<float> factors = std::vector<float>(keys, 0.5F);

  KeySourceShape shape() const { return {1, 1, d, d}; }
  index_t length(index_t) const { return keys; }
  KeyRange stored(index_t) const { return {0, keys}; }
  KeyRun<X> run(index_t, index_t, index_t key) const {
    constexpr index_t stride = std::numeric_limits<index_t>::max() / 2;
    const X* row = rows.data() + key * d;
    KeyRun<X> result{.k = row, .k_stride = stride, .v = row, .v_stride = stride, .count = 1};
    if constexpr (requires { result.k_scales; }) {
      if (sizeof(X) == 1) result.k_scales = result.v_scales = factors.data() + key;
    }
    return result;
  }
};

TEMPLATE_TEST_CASE("a run of one key may have any stride", "[decode][key_source]", float, bfloat16, Int8) {
  using T = std::conditional_t<std::is_same_v<TestType, float>, float, bfloat16>;
  const SingleKeys<TestType> source;
  for (const index_t queries : {1, 7, 40, 130}) {
    const std::vector<T> q = reference::normals<T>(static_cast<std::size_t>(queries * 64), 6);
    for_each_target_of<T>([&](const std::string& target) {
      INFO(target << ", queries " << queries);
      std::vector<T> out(q.size());
      attention<ssmax::ComputeType<T>>(
          {.q = {q.data(), {1, 1, queries, 64}}, .keys = source, .out = {out.data(), {1, 1, queries, 64}}},
          Full{});
      CHECK(std::ranges::all_of(out, [](T x) { return std::isfinite(static_cast<float>(x)); }));
    });
  }
}

TEST_CASE("a source that does not fit the queries is refused", "[decode][key_source][errors]") {
  const KvCache<float> cache = filled_cache<float>(60);
  Pages<float> pages(cache, 32, 0, 6);
  const auto message = [&] { return refusal([&] { decoded(pages, 1, Causal{}, ssmax::Serial{}); }); };
  pages.extents.batch = 4;
  CHECK(message() == "ssmax::attention: k has extent 4 in dimension 0, q has 3");
  pages.extents = cache.shape();
  pages.extents.width = 11;
  CHECK(message() == "ssmax::attention: k has extent 11 in dimension 3, q has 12");
  pages.extents = cache.shape();
  pages.extents.value_width = 8;
  CHECK(message() == "ssmax::attention: out has extent 9 in dimension 3, v has 8");
  pages.extents = cache.shape();
  pages.extents.kv_heads = 3;
  CHECK(message() == "ssmax::attention: q has heads 4, must be a multiple of the heads of k, 3");
  pages.extents = cache.shape();
  CHECK(message() == "(nothing was thrown)");
  CHECK(refusal([&] { decoded(WithoutLast{{cache}}, 1, Causal{}, ssmax::Serial{}); }) ==
        "ssmax::attention: k stores keys up to 1299, the length is 1300");
  CHECK(
      refusal([&] { decoded(pages, 61, Causal{}, ssmax::Serial{}); }) ==
      "ssmax::attention: q has 61 positions of sequence 1, which has 60 keys: append the keys first, or set "
      "more_queries_than_keys");
}

}  // namespace key_source_test
