// Rows that are quantized already, with their factors, appended to caches: attention is that over the cache from which the
// rows come.

#include "decode_sources.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace decode_problem::quantized_append_test {

/// The rows of one sequence of a cache and their factors, contiguous: [kv_heads, keys, elements].
template <class X>
struct HeldRows {
  index_t heads, keys;
  std::vector<X> numbers;
  std::vector<float> factors;  // empty for a type without factors

  HeldRows(const KvCache<X>& cache, index_t b, bool are_values)
      : heads(cache.shape().kv_heads), keys(cache.length(b)) {
    for (index_t row = 0; row < heads * keys; ++row) {
      const KeyRun<X> run = cache.run(b, row / keys, row % keys);
      const X* first = are_values ? run.v : run.k;
      const float* factor = are_values ? run.v_scales : run.k_scales;
      numbers.insert(numbers.end(), first, first + (are_values ? run.v_stride : run.k_stride));
      if (factor != nullptr) factors.push_back(*factor);
    }
  }
  index_t elements() const { return std::ssize(numbers) / (heads * keys); }
  View<const X, 4> rows() const { return rows(0, keys, 1); }
  /// Rows [first, first + count) for each of `batch` sequences.
  View<const X, 4> rows(index_t first, index_t count, index_t batch) const {
    const index_t n = elements();
    return {numbers.data() + first * n, {batch, heads, count, n}, {0, keys * n, n, 1}};
  }
  View<const float, 3> scales() const { return scales(0, keys, 1); }
  View<const float, 3> scales(index_t first, index_t count, index_t batch) const {
    if (factors.empty()) return {};
    return {factors.data() + first, {batch, heads, count}, {0, keys, 1}};
  }
  View<const X, 3> tokens() const {
    return {numbers.data(), {keys, heads, elements()}, {elements(), keys * elements(), 1}};
  }
  View<const float, 2> token_scales() const {
    return factors.empty() ? View<const float, 2>{}
                           : View<const float, 2>(factors.data(), {keys, heads}, {1, keys});
  }
};

TEMPLATE_TEST_CASE("append copies quantized rows", "[decode][eight_bit][q8_0]", Int8, Fp8E4M3, Fp8E5M2,
                   Q8_0) {
  using X = TestType;
  const Data<float> data({4, 2, 3, 64, 32, {37}});
  const KvCache<X> cache = filled<X>(data);
  const HeldRows<X> k(cache, 0, false), v(cache, 0, true);

  KvCache<X> copy({.kv_heads = 2, .width = 64, .value_width = 32, .capacity = 40});
  copy.append(k.rows(), v.rows(), k.scales(), v.scales());
  check_source(data, cache, copy);

  ssmax::PagedKvCache<X> paged({.kv_heads = 2, .width = 64, .value_width = 32, .page = 16, .pages = 9});
  const std::vector<index_t> ids{paged.add()};
  paged.append(k.tokens(), v.tokens(), std::vector<index_t>(37, ids[0]), k.token_scales(), v.token_scales());
  check_source(data, cache, paged.source(ids));
}

TEMPLATE_TEST_CASE("append copies quantized rows by counts, and over the oldest rows of a ring",
                   "[decode][eight_bit][q8_0]", Int8, Fp8E4M3, Fp8E5M2, Q8_0) {
  using X = TestType;
  const Data<float> data({4, 2, 3, 64, 32, {37, 20}});
  const KvCache<X> cache = filled<X>(data);
  KvCache<X> copy(options_of(data.shape));
  for (const index_t b : {0, 1}) {
    const HeldRows<X> k(cache, b, false), v(cache, b, true);
    const std::vector<int> counts{b == 0 ? 37 : 0, b == 0 ? 0 : 20};
    copy.append(k.rows(0, k.keys, 2), v.rows(0, k.keys, 2), k.scales(0, k.keys, 2), v.scales(0, k.keys, 2),
                counts);
  }
  check_source(data, cache, copy);

  const Data<float> one({4, 2, 3, 64, 32, {37}});
  const KvCache<X> whole = filled<X>(one), ring = filled<X>(one, nullptr, 24, true);
  const HeldRows<X> k(whole, 0, false), v(whole, 0, true);
  KvCache<X> ring_copy(options_of(one.shape, 24, true));
  for (const auto& [first, count] : {std::pair<index_t, index_t>{0, 17}, {17, 20}}) {
    ring_copy.append(k.rows(first, count, 1), v.rows(first, count, 1), k.scales(first, count, 1),
                     v.scales(first, count, 1));
  }
  CHECK(ring_copy.stored(0).begin == 13);
  check_source(one, ring, ring_copy, ssmax::SlidingWindow{21});
}

TEST_CASE("keys of 8 bits with factors and values of float", "[decode][eight_bit]") {
  const std::vector<Int8> codes{Int8{127}, Int8{-3}};
  const std::vector<float> factors{0.5F, 2}, values{7, 8};
  KvCache<Int8, float> cache({.kv_heads = 2, .width = 1, .capacity = 3});
  cache.append({codes.data(), {1, 2, 1, 1}}, View<const float, 4>(values.data(), {1, 2, 1, 1}),
               View<const float, 3>(factors.data(), {1, 2, 1}), {});
  CHECK(cache.run(0, 1, 0).k->value == -3);
  CHECK(*cache.run(0, 1, 0).k_scales == 2);
  CHECK(*cache.run(0, 1, 0).v == 8);
}

TEST_CASE("wrong factors of quantized rows are refused, and the cache is unchanged", "[eight_bit][errors]") {
  const std::vector<Int8> codes(64);
  const std::vector<float> factors(64, 1);
  const View<const Int8, 4> rows(codes.data(), {1, 2, 4, 8});
  const View<const float, 3> good(factors.data(), {1, 2, 4}), wide(factors.data(), {1, 2, 5});
  KvCache<Int8> cache({.kv_heads = 2, .width = 8, .capacity = 5});
  check_refused({"ssmax::KvCache::append: k_scales has size 0, the storage type needs a factor per row: 8"},
                [&] { cache.append(rows, rows, {}, good); });
  check_refused({"ssmax::KvCache::append: v_scales has extent 5 in dimension 2, v has 4"},
                [&] { cache.append(rows, rows, good, wide); });
  CHECK(cache.length(0) == 0);

  ssmax::PagedKvCache<Int8> paged({.kv_heads = 2, .width = 8, .page = 4, .pages = 2});
  const std::vector<index_t> ids(4, paged.add());
  const View<const Int8, 3> tokens(codes.data(), {4, 2, 8});
  check_refused({"ssmax::PagedKvCache::append: k_scales has extent 3 in dimension 1, k has 2"}, [&] {
    paged.append(tokens, tokens, ids, {factors.data(), {4, 3}}, {factors.data(), {4, 2}});
  });
  CHECK(paged.length(ids[0]) == 0);

  KvCache<ssmax::Q8_0> groups({.kv_heads = 2, .width = 64, .capacity = 5});
  const std::vector<ssmax::Q8_0> blocks(16);
  const View<const ssmax::Q8_0, 4> two(blocks.data(), {1, 2, 4, 2}), one(blocks.data(), {1, 2, 4, 1});
  check_refused({"ssmax::KvCache::append: k_scales has size 8, the storage type has no factors: must be 0"},
                [&] { groups.append(two, two, good); });
  check_refused({"ssmax::KvCache::append: k has channels 1, the cache's is 2"},
                [&] { groups.append(one, two); });
}

}  // namespace decode_problem::quantized_append_test
