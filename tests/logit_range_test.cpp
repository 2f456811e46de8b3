// Logits beyond the range of the compute type have the same result for any number of queries: NaN above the range, the
// weight 0 below it.

#include "call.hpp"
#include "reference.hpp"
#include "target_scope.hpp"
#include "test.hpp"

namespace logit_range_test {

using namespace ssmax;

enum class Keys { large, small, both_signs, small_and_0 };

/// Keys with logits of ±1e38 (double: ±1e308) and c = 10. Even and odd keys have different values.
template <class T>
struct Problem {
  using Compute = ComputeType<T>;
  static constexpr index_t d = 16;
  index_t queries, keys;
  std::vector<T> q, k, v, out;
  std::vector<Compute> lse;

  Problem(index_t a_queries, index_t a_keys, Keys kind) : queries(a_queries), keys(a_keys) {
    const double large = std::is_same_v<T, double> ? 1e308 : 1e38;
    const auto number = [](double x) { return reference::narrow<T>(x); };
    const auto size = [](index_t rows) { return static_cast<std::size_t>(rows * d); };
    q.resize(size(queries), number(0));
    k.resize(size(keys), number(0));
    v.resize(size(keys));
    out.resize(size(queries), number(-7));
    lse.resize(static_cast<std::size_t>(queries), Compute(-7));
    for (index_t i = 0; i < queries; ++i) q[size(i)] = number(1);
    for (index_t j = 0; j < keys; ++j) {
      const bool is_odd = j % 2 == 1;
      const double even = kind == Keys::large ? large : -large;
      const double odd = kind == Keys::both_signs ? large : kind == Keys::small_and_0 ? 0 : even;
      k[size(j)] = number(is_odd ? odd : even);
      for (index_t c = 0; c < d; ++c) v[size(j) + static_cast<std::size_t>(c)] = number(is_odd ? 3 : 1);
    }
  }

  View<const T, 4> view(const std::vector<T>& x, index_t rows) const { return {x.data(), {1, 1, rows, d}}; }
  void over_views(bool has_score) {
    const AttentionArguments<Compute> a{.q = view(q, queries),
                                        .k = view(k, keys),
                                        .v = view(v, keys),
                                        .out = {out.data(), {1, 1, queries, d}},
                                        .lse = {lse.data(), {1, 1, queries}},
                                        .scale = 1.0};
    if (has_score) return attention<Compute>(a, Constant(10), Softcap(3e38));
    attention<Compute>(a, Constant(10));
  }
  void over_cache() {
    KvCache<T> cache({.batch = 1, .kv_heads = 1, .width = d, .capacity = keys});
    cache.append(view(k, keys), view(v, keys));
    attention<Compute>({.q = view(q, queries),
                        .keys = cache,
                        .out = {out.data(), {1, 1, queries, d}},
                        .lse = {lse.data(), {1, 1, queries}},
                        .scale = 1.0,
                        .more_queries_than_keys = true},
                       Constant(10), Full{});
  }
  void check(Keys kind) const {
    const auto is = [&](float value, Compute expected_lse) {
      for (const T x : out) {
        const auto result = static_cast<float>(x);
        if (std::isnan(value) ? !std::isnan(result) : result != value) return false;
      }
      for (const Compute x : lse) {
        if (std::isnan(expected_lse) ? !std::isnan(x)
                                     : !(x == expected_lse || std::abs(x - expected_lse) < 1e-2))
          return false;
      }
      return true;
    };
    constexpr auto inf = std::numeric_limits<Compute>::infinity(),
                   nan = std::numeric_limits<Compute>::quiet_NaN();
    if (kind == Keys::large || kind == Keys::both_signs)
      CHECK(is(std::numeric_limits<float>::quiet_NaN(), nan));
    if (kind == Keys::small) CHECK(is(0, -inf));
    if (kind == Keys::small_and_0) CHECK(is(3, std::log(static_cast<Compute>(keys / 2))));
  }
};

TEMPLATE_TEST_CASE("logits beyond the range have the same result on every path",
                   "[attention][decode][bfloat16]", float, double, bfloat16) {
  for_each_target_of<TestType>([](const std::string& target) {
    for (const Keys kind : {Keys::large, Keys::small, Keys::both_signs, Keys::small_and_0}) {
      for (const index_t queries : {1, 2, 8, 16, 40, 200}) {
        for (const index_t keys : {8, 300, 2050}) {
          INFO(target << ", kind " << static_cast<int>(kind) << ", queries " << queries << ", keys " << keys);
          Problem<TestType> problem(queries, keys, kind);
          problem.over_views(false);
          problem.check(kind);
          problem.over_cache();
          problem.check(kind);
          if constexpr (!std::is_same_v<TestType, double>) {
            problem.over_views(true);
            problem.check(kind);
          }
        }
      }
    }
  });
}

}  // namespace logit_range_test
