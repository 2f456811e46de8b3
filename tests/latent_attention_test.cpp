// Latent attention: keys of 576 channels whose first 512 channels are the values, many heads on one kv head. The values
// are a view of the memory of the keys.

#include "decode_sources.hpp"
#include "test.hpp"

namespace decode_problem::latent_attention_test {

using ssmax::PagedKeys, ssmax::PageTable;

constexpr index_t width = 576, value_width = 512, page = 16;

/// A problem whose values are the first channels of the keys.
template <class T>
Data<T> latent(index_t heads, index_t queries, index_t keys) {
  Data<T> data({heads, 1, queries, width, value_width, {keys}}, 0.2);
  for (index_t key = 0; key < keys; ++key)
    std::copy_n(data.k.data() + key * width, value_width, data.v.data() + key * value_width);
  return data;
}

template <class T>
void compare(index_t heads, index_t queries, index_t keys) {
  const Data<T> data = latent<T>(heads, queries, keys);
  const KvCache<T> cache = filled<T>(data);
  // Page i of the sequence is page order[i] of the pool.
  const index_t pages = (keys + page - 1) / page;
  std::vector<std::int32_t> order;
  for (index_t i = 0; i < pages; ++i) order.push_back(static_cast<std::int32_t>(pages - 1 - i));
  std::vector<T> pool(static_cast<std::size_t>(pages * page * width));
  for (index_t key = 0; key < keys; ++key) {
    const index_t place = order[static_cast<std::size_t>(key / page)] * page + key % page;
    std::copy_n(data.k_row(0, 0, key), width, pool.data() + place * width);
  }
  const std::vector<std::int32_t> lengths{static_cast<std::int32_t>(keys)};
  const PagedKeys stored_once(
      View<const T, 4>(pool.data(), {pages, page, 1, width}),
      View<const T, 4>(pool.data(), {pages, page, 1, value_width}, {page * width, width, width, 1}),
      PageTable<std::int32_t>(View<const std::int32_t, 2>(order.data(), {1, pages}), lengths));
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target << ", heads " << heads << ", queries " << queries << ", keys " << keys);
    check_source(data, cache, stored_once);
  });
}

TEST_CASE("values may be a view of the keys: latent attention", "[decode][latent][bfloat16]") {
  compare<float>(16, 1, 300);
  compare<float>(40, 3, 130);
  compare<bfloat16>(16, 1, 300);
  compare<bfloat16>(128, 2, 70);
  compare<double>(3, 1, 40);
}

TEST_CASE("the scale of latent attention is that of the model: ollama/ollama#13893",
          "[decode][latent][reports]") {
  const auto check_queries = [](index_t queries) {
    const Data<float> data = latent<float>(16, queries, 40);
    const KvCache<float> cache = filled<float>(data);
    for (const double channels : {192.0, 256.0}) {  // DeepSeek, GLM
      INFO(channels);
      const double scale = 1 / std::sqrt(channels);
      const Expected<float> expected(data, {.scale = static_cast<Real>(scale)});
      check(data, cache, expected, Softmax{}, Causal{}, Identity{}, {.scale = scale});
      // The default is 1 / √576: another model.
      CHECK(largest_error(run(data, cache).lse, expected.exact.lse) > 1e-3L);
    }
  };
  check_queries(1);
  check_queries(3);
}

}  // namespace decode_problem::latent_attention_test
