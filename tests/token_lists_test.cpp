// Pages of one key: attention over lists of tokens, one list per sequence or per kv head, is attention over a cache of the
// same keys. Tokens of the pool that no list names hold NaN.

#include <numeric>
#include <random>

#include "decode_sources.hpp"
#include "refusal.hpp"
#include "test.hpp"

namespace decode_problem::token_lists_test {

using ssmax::PagedKeys, ssmax::PageTable;

/// The keys of a cache at random tokens of a pool, `run` neighbours at a time.
template <class X, class Index>
struct Pool {
  index_t lists, heads, d, dv, most = 0, tokens;
  std::vector<X> k, v;
  std::vector<Index> indices;
  std::vector<std::int64_t> lengths;

  Pool(const KvCache<X>& cache, index_t a_lists, index_t run, unsigned seed)
      : lists(a_lists), heads(cache.shape().kv_heads), d(cache.shape().width), dv(cache.shape().value_width) {
    const index_t batch = cache.shape().batch;
    for (index_t b = 0; b < batch; ++b) {
      lengths.push_back(cache.length(b));
      most = std::max(most, cache.length(b));
    }
    most = (most + run - 1) / run * run;
    tokens = 2 * batch * most;
    const X nan(std::numeric_limits<float>::quiet_NaN());
    k.assign(static_cast<std::size_t>(tokens * heads * d), nan);
    v.assign(static_cast<std::size_t>(tokens * heads * dv), nan);
    // Entries beyond the length would be out of the pool.
    indices.assign(static_cast<std::size_t>(batch * lists * most), std::numeric_limits<Index>::max());
    std::mt19937 random(seed);
    for (index_t list = 0; list < lists; ++list) {
      std::vector<Index> free(static_cast<std::size_t>(tokens / run));
      std::iota(free.begin(), free.end(), Index{0});
      std::shuffle(free.begin(), free.end(), random);
      for (index_t b = 0; b < batch; ++b) {
        for (index_t i = 0; i < cache.length(b); ++i) {
          const index_t token = static_cast<index_t>(free.back()) * run + i % run;
          if (i % run == run - 1 || i + 1 == cache.length(b)) free.pop_back();
          indices[static_cast<std::size_t>((b * lists + list) * most + i)] = static_cast<Index>(token);
          for (index_t h = lists == 1 ? 0 : list; h < (lists == 1 ? heads : list + 1); ++h) {
            const KeyRun<X> from = cache.run(b, h, i);
            std::copy_n(from.k, d, k.data() + (token * heads + h) * d);
            std::copy_n(from.v, dv, v.data() + (token * heads + h) * dv);
          }
        }
      }
    }
  }

  auto keys() const {
    const View<const Index, 3> table(indices.data(), {std::ssize(lengths), lists, most});
    return PagedKeys(View<const X, 4>(k.data(), {tokens, 1, heads, d}),
                     View<const X, 4>(v.data(), {tokens, 1, heads, dv}), PageTable(table, lengths));
  }
};

template <class T, class Index>
void compare(index_t lists, index_t run, index_t queries, index_t width = 24) {
  const Data<T> data({4, 2, queries, width, width - 7, {1300, queries, 517}});
  const KvCache<T> cache = filled<T>(data);
  const Pool<T, Index> pool(cache, lists, run, 3);
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target << ", lists " << lists << ", runs of " << run << ", queries " << queries);
    const auto check = [&](const auto& mask) { check_source(data, cache, pool.keys(), mask); };
    check(ssmax::Causal{});
    check(ssmax::SlidingWindow{299, 0, 8});
  });
}

TEST_CASE("attention over keys of token lists is attention over a cache", "[decode][token_lists][bfloat16]") {
  SECTION("float, int32") {
    for (const index_t run : {1, 5, 64}) compare<float, std::int32_t>(1, run, 1);
    compare<float, std::int32_t>(2, 1, 1, 80);
    for (const index_t queries : {2, 3, 5})  // several read keys again
      compare<float, std::int32_t>(1, 1, queries);
    compare<float, std::int32_t>(2, 1, 9);
  }
  SECTION("bfloat16, int64") {
    compare<bfloat16, std::int64_t>(2, 1, 1);
    compare<bfloat16, std::int64_t>(1, 1, 3, 64);
    compare<bfloat16, std::int64_t>(2, 3, 40);
    for (const index_t run : {1, 7, 16}) {
      compare<bfloat16, std::int64_t>(1, run, 3);
      compare<bfloat16, std::int64_t>(2, run, 3, 80);
    }
  }
  SECTION("half, uint16") { compare<half, std::uint16_t>(1, 2, 2); }
  SECTION("double") { compare<double, int>(2, 1, 2); }
}

struct LastKeys {
  KeyRange keys(const Query& query) const {
    return {std::max<index_t>(query.shape.keys - 9, 0), query.shape.keys};
  }
};

/// One query per kv head. The cache's keys are one run, so that the steps of its softmax are calls of their own.
template <class X>
void compare_short_lists(index_t d, index_t dv, bool is_special) {
  std::vector<index_t> lengths(21);
  std::iota(lengths.begin(), lengths.end(), index_t{0});
  for (const index_t length : {31, 32, 33, 47, 48, 63, 64, 65}) lengths.push_back(length);
  Data<X> data({2, 2, 1, d, dv, lengths});
  for (index_t b = 2; is_special && b < data.shape.batch(); ++b) {
    const float infinity = std::numeric_limits<float>::infinity(), nan = infinity - infinity;
    const index_t key = b % data.shape.length(b);
    const X number(std::array{nan, infinity, -infinity, 60000.F, -60000.F}[static_cast<std::size_t>(b % 5)]);
    (b % 3 == 0 ? data.v_row(b, 0, key) : data.k_row(b, 0, key))[d / 2 % dv] = number;
  }
  const KvCache<X> cache = filled<X>(data);
  const Pool<X, int> pool(cache, 1, 1, 3);
  for_each_target_of<X>([&](const std::string& target) {
    INFO(target << ", width " << d << ", value width " << dv << ", special numbers " << is_special);
    const AttentionOptions<X> options{.more_queries_than_keys = true};  // sequences without keys
    check_source(data, cache, pool.keys(), ssmax::Full{}, options);
    check_source(data, cache, pool.keys(), LastKeys{}, options);
    for (const float c : {0.F, -1.F, 1e-30F, 1e30F}) {
      const auto call = [&](const auto& keys) {
        return run(data, keys, ssmax::Constant{c}, ssmax::Full{}, Identity{}, options);
      };
      CHECK(call(pool.keys()) == call(cache));
    }
  });
}

TEST_CASE("one query over a short list of keys", "[decode][token_lists]") {
  for (const bool is_special : {false, true}) {
    for (const index_t width : {1, 7, 16, 32, 64}) compare_short_lists<float>(width, width, is_special);
    compare_short_lists<float>(16, 24, is_special);
    compare_short_lists<half>(16, 32, is_special);
    compare_short_lists<double>(16, 8, is_special);
  }
}

TEST_CASE("the kernel of the weights of a short list refuses what it cannot weigh", "[decode][token_lists]") {
  using Kernels = ssmax::shared::ListedDecodeKernels<float, float>;
  for_each_target_of<float>([&](const std::string& target) {
    INFO(target);
    for (const float number :
         {1.F, -std::numeric_limits<float>::infinity(), 1e30F, std::numeric_limits<float>::infinity(),
          std::numeric_limits<float>::quiet_NaN()}) {
      const std::vector<float> q(16, 1), key(16, 0.25F), other(16, number);
      const std::array rows{reinterpret_cast<const std::byte*>(key.data()),
                            reinterpret_cast<const std::byte*>(other.data())};
      std::vector<float> s(16), shift(1), sum(1);
      const bool is_weighed = ssmax::detail::kernels<Kernels>().weights(
          q.data(), {rows.data(), 0, 2, 16}, {1, ssmax::detail::Multiplier<float>(1).scale}, s.data(),
          shift.front(), sum.front());
      CHECK(is_weighed == (number < 1e30F));
    }
  });
}

index_t weighed = 0;

bool weigh_and_count(const float* q, const ssmax::shared::ListedRows<void>& k,
                     const ssmax::shared::QueryScale<float>& scale, float* s, float& shift, float& sum) {
  ++weighed;
  return ssmax::detail::listed_weights<float, float>(q, k, scale, s, shift, sum);
}

TEST_CASE("one kernel weighs each list of at most 64 keys", "[decode][token_lists]") {
  const Data<float> data({2, 2, 1, 16, 16, {12, 64, 65}});
  const KvCache<float> cache = filled<float>(data);
  const Pool<float, int> pool(cache, 1, 1, 3);
  const auto keys = pool.keys();
  auto type = ssmax::detail::stored_type<float, float, true>;
  type.listed_weights = weigh_and_count;
  const ssmax::Softmax scaling;
  const ssmax::Full mask;
  const Identity score;
  const ssmax::detail::UserVariant<float, ssmax::Softmax, ssmax::Full, Identity> variant(scaling, mask,
                                                                                         score);
  for_each_target_of<float>([&](const std::string& target) {
    INFO(target);
    std::vector<float> out(data.q.size());
    ssmax::shared::ForwardCall<float> call{};
    ssmax::detail::build_call<float>("attention", {.q = data.q_view(), .out = {out.data(), {3, 2, 1, 16}}},
                                     ssmax::Keys<float>(keys), call);
    call.problem.keys = ssmax::shared::AnyKeys<float>(keys, &type, &type);
    ssmax::compiled::open_call<float>(call, variant);
    ssmax::Serial serial;
    weighed = 0;
    ssmax::compiled::run_attention<float>(call.problem, variant, call.result, nullptr,
                                          ssmax::shared::AnyExecutor(serial));
    CHECK(weighed == 2 * 2);
    CHECK(out == run(data, keys, scaling, mask, score).out);
  });
}

template <class T>
void compare_rotated(index_t queries, bool in_call) {
  const Data<T> data({4, 2, queries, 24, 17, {300, queries, 90}});
  const KvCache<T> cache = filled<T>(data);
  const Pool<T, int> pool(cache, 2, 1, 3);
  const ssmax::Rope<float> rope({.width = 24}, 300);
  for_each_target_of<T>([&](const std::string& target) {
    INFO(target << ", queries " << queries << ", rotated in the call " << in_call);
    check_source(data, cache, pool.keys(), Causal{}, {.rope = &rope, .rotate_source_keys = in_call});
  });
}

TEST_CASE("keys of token lists that are rotated while they are read", "[decode][token_lists][bfloat16]") {
  compare_rotated<float>(1, true);
  compare_rotated<float>(9, true);
  compare_rotated<bfloat16>(3, true);
}

TEST_CASE("keys of token lists that were rotated before", "[decode][token_lists][bfloat16]") {
  compare_rotated<float>(9, false);
  compare_rotated<bfloat16>(3, false);
}

TEST_CASE("indices that follow one another are one run, and indices may repeat", "[token_lists]") {
  const std::vector<float> memory(100 * 2 * 4);
  const std::vector<int> indices{5, 6, 7, 7, 8, 3}, lengths{6};
  const View<const float, 4> rows(memory.data(), {100, 1, 2, 4});
  const PagedKeys keys(rows, rows, PageTable(View<const int, 2>(indices.data(), {1, 6}), lengths));
  CHECK(keys.run(0, 1, 0).count == 3);
  CHECK(keys.run(0, 1, 3).count == 2);
  CHECK(keys.run(0, 1, 5).count == 1);
  CHECK(keys.run(0, 1, 3).k == memory.data() + (7 * 2 + 1) * 4);
  CHECK(keys.run(0, 1, 3).k_stride == 8);
}

TEST_CASE("indices with any strides", "[token_lists]") {
  const std::vector<float> memory(100 * 2 * 4);
  const std::vector<int> indices{5, 0, 6, 0, 7, 0, 9, 0}, lengths{4};
  const View<const float, 4> rows(memory.data(), {100, 1, 2, 4});
  const PagedKeys forward(rows, rows,
                          PageTable(View<const int, 3>(indices.data(), {1, 1, 4}, {8, 8, 2}), lengths));
  CHECK(forward.run(0, 1, 0).count == 3);
  CHECK(forward.run(0, 1, 3).k == memory.data() + (9 * 2 + 1) * 4);
  const PagedKeys backward(rows, rows,
                           PageTable(View<const int, 2>(indices.data() + 6, {1, 4}, {8, -2}), lengths));
  CHECK(backward.run(0, 0, 0).k == memory.data() + 9 * 2 * 4);
  CHECK(backward.run(0, 0, 3).k == memory.data() + 5 * 2 * 4);
}

TEST_CASE("wrong tables of kv heads are refused", "[token_lists][errors]") {
  const std::vector<float> memory(400);
  std::vector<int> indices{0, 1, 2, 3, 4, 5, 6, 7}, lengths{2, 2};
  const View<const float, 4> k(memory.data(), {10, 1, 2, 8});
  View<const int, 3> table(indices.data(), {2, 2, 2});
  const auto make = [&] { PagedKeys keys(k, k, PageTable(table, lengths)); };
  indices[7] = 10;
  check_refused({"ssmax::PagedKeys: table has entry 10, must be below the pages of k 10"}, make);
  indices[7] = -1;
  check_refused({"ssmax::PagedKeys: table has pages of each kv head and entry -1, must be at least 0"}, make);
  lengths = {2, 1};
  CHECK(refusal(make) == "(nothing was thrown)");
  lengths = {3, 0};
  check_refused({"ssmax::PagedKeys: lengths needs pages 3, the table has entries 2"}, make);
  lengths = {2, 1};
  table = {indices.data(), {2, 3, 1}};
  check_refused({"ssmax::PagedKeys: table has kv heads 3, must be 1 or the kv heads of k 2"}, make);
}

}  // namespace decode_problem::token_lists_test
