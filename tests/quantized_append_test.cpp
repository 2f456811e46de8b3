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
  View<const X, 4> rows() const { return {numbers.data(), {1, heads, keys, elements()}}; }
  View<const float, 3> scales() const {
    return factors.empty() ? View<const float, 3>{} : View<const float, 3>(factors.data(), {1, heads, keys});
  }
  View<const X, 3> tokens() const {
    return {numbers.data(), {keys, heads, elements()}, {elements(), keys * elements(), 1}};
  }
  View<const float, 2> token_scales() const {
    return factors.empty() ? View<const float, 2>{}
                           : View<const float, 2>(factors.data(), {keys, heads}, {1, keys});
  }
};

TEMPLATE_TEST_CASE("append copies quantized rows", "[decode][eight_bit][q8_0]", Int8, Fp8E4M3, Q8_0) {
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
