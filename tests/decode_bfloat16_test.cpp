// Decoding from a bfloat16 cache for several queries of a kv head, on targets that have pair dots or matrix units.
// Nothing happens here on others. Errors against the loops in long double on what the cache holds.

#include "attention_problem.hpp"
#include "decode_problem.hpp"
#include "test.hpp"

namespace decode_problem::decode_bfloat16_test {

using attention_problem::for_each_target_of_products;
using attention_problem::rounded_sum;
using attention_problem::rounded_weights;

template <class R>
void check_path(const R& result, const Shape& shape) {
  const ssmax::Explanation& e = result.explanation;
  INFO(to_string(e));
  CHECK(e.path == attention_problem::bfloat16_path(shape.queries * shape.heads / shape.kv_heads));
}

/// Whether the target takes a query of a few in 16 bits as well.
bool is_matrix(const std::string& target) { return target == "amx"; }

const std::vector<Shape> shapes{
    // heads, kv_heads, queries, d, dv, lengths: 5 to 16 queries of a kv head
    {5, 1, 1, 64, 64, {300}},        {8, 1, 1, 128, 128, {1025, 7}}, {10, 2, 1, 40, 33, {131}},
    {3, 1, 2, 7, 5, {50, 2}},        {7, 1, 1, 32, 96, {1, 2, 3}},   {16, 1, 1, 33, 31, {200}},
    {4, 2, 7, 48, 70, {160, 7, 90}},
};

TEST_CASE("decode in products of bfloat16 costs what rounding the weights costs", "[decode][bfloat16]") {
  for (const Shape& shape : shapes) {
    const Data<bfloat16> data(shape);
    const KvCache<bfloat16> cache = filled<bfloat16>(data);
    const Plan plan{.multiplier = [](index_t, index_t, index_t) { return Real(-2.5); }};
    check(data, cache, Expected<bfloat16>(data, Plan{}), ssmax::Softmax{});
    check(data, cache, Expected<bfloat16>(data, plan), ssmax::Constant{-2.5});
    for_each_target_of_products([&](const std::string&) { check_path(run(data, cache), shape); });
    const Plan capped{.score = [](Real z, index_t, index_t) { return 2 * std::tanh(z / 2); }};
    check(data, cache, Expected<bfloat16>(data, capped), ssmax::Softmax{}, Causal{}, ssmax::Softcap{2});
  }
}

TEST_CASE("decode has float's results up to four queries, and the bf16 path's bounds from five on",
          "[decode][bfloat16][products]") {
  for (const index_t heads : {4, 5, 8}) {
    const Data<bfloat16> data({heads, 1, 1, 64, 32, {700}});
    const KvCache<bfloat16> cache = filled<bfloat16>(data);
    const Expected<bfloat16> expected(data, Plan{});
    for_each_target_of_products([&](const std::string& target) {
      INFO(target << ' ' << heads);
      const AttentionOptions<bfloat16> in_float{.float_products = true};
      const Output<bfloat16> rounded = run(data, cache),
                             floats = run(data, cache, ssmax::Softmax{}, Causal{}, Identity{}, in_float);
      CHECK((rounded == floats) == (heads < 5));
      check_path(rounded, data.shape);
      CHECK(floats.explanation.path == ssmax::Path::decode);
      Real worst = 0, worst_lse = 0;
      for (std::size_t i = 0; i < rounded.out.size(); ++i) {
        const Real stored = std::ldexp(Real(1), std::ilogb(expected.exact.out[i]) - 8);
        worst = std::max(
            worst, (std::abs(Real(static_cast<float>(rounded.out[i])) - expected.exact.out[i]) - stored) /
                       expected.exact.value_sums[i]);
      }
      for (std::size_t i = 0; i < rounded.lse.size(); ++i) {
        worst_lse = std::max(worst_lse, std::abs(Real(rounded.lse[i]) - expected.exact.lse[i]));
      }
      INFO(static_cast<double>(worst) << ' ' << static_cast<double>(worst_lse));
      CHECK(worst <= rounded_weights);
      CHECK(worst_lse <= (heads >= 5 ? rounded_sum : 4e-6L));
    });
  }
}

TEST_CASE("a rotated query is not rounded against rotated keys of a bfloat16 cache",
          "[decode][bfloat16][products]") {
  const index_t d = GENERATE(48, 47, 7);
  const Data<bfloat16> data({8, 1, 1, d, 32, {400}});
  const ssmax::Rope<float> rope({.width = d / 2 * 2}, 400);
  const KvCache<bfloat16> cache = filled<bfloat16>(data, &rope);
  for_each_target_of_products([&](const std::string& target) {
    INFO(target << ' ' << d);
    const auto lse_of = [&](bool float_products) {
      const Output<bfloat16> output = run(data, cache, ssmax::Constant{10}, Causal{}, Identity{},
                                          {.rope = &rope, .float_products = float_products});
      if (!float_products) check_path(output, data.shape);
      return output.lse;
    };
    const std::vector<float> ours = lse_of(false), in_float = lse_of(true);
    Real worst = 0;
    for (std::size_t i = 0; i < ours.size(); ++i)
      worst = std::max(worst, std::abs(Real(ours[i]) - Real(in_float[i])));
    CHECK(worst <= (is_matrix(target) ? rounded_sum : 2e-3L));  // 16 bits of q, times 10
  });
}

struct EveryThirdKeyIsHidden {
  ssmax::KeyRange keys(const ssmax::Query& query) const { return {0, query.shape.keys}; }
  bool sees(const ssmax::Query&, index_t key) const { return key % 3 != 0; }
};

TEST_CASE("what a query of a few does not see never enters its result", "[decode][bfloat16][products]") {
  for (const Shape& shape : {Shape{8, 1, 1, 64, 40, {301}}, Shape{3, 1, 4, 32, 64, {150}}}) {
    const Data<bfloat16> data(shape);
    for (const float poison :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      Data<bfloat16> bad = data;
      for (index_t key = 0; key < shape.longest(); key += 3) {
        std::fill_n(bad.k_row(0, 0, key), shape.d, bfloat16(poison));
        std::fill_n(bad.v_row(0, 0, key), shape.dv, bfloat16(poison));
      }
      for_each_target_of_products([&](const std::string& target) {
        INFO(target << ' ' << poison);
        const Output<bfloat16> result =
            run(bad, filled<bfloat16>(bad), ssmax::Softmax{}, EveryThirdKeyIsHidden{});
        check_path(result, shape);
        CHECK(result == run(data, filled<bfloat16>(data), ssmax::Softmax{}, EveryThirdKeyIsHidden{}));
      });
    }
  }
}

TEST_CASE("decode in products of bfloat16 has the same bits on any number of threads",
          "[decode][bfloat16][products]") {
  const Data<bfloat16> data({8, 1, 1, 64, 64, {3000}});
  const KvCache<bfloat16> cache = filled<bfloat16>(data);
  for_each_target_of_products([&](const std::string&) {
    ssmax::ThreadPool pool(3);
    const Output<bfloat16> result = run(data, cache, ssmax::Softmax{}, Causal{}, Identity{}, {}, pool);
    check_path(result, data.shape);
    CHECK(result == run(data, cache));
  });
}

TEST_CASE("decode is bit-identical to prefill on the bf16 path", "[decode][bfloat16][products]") {
  struct Case {
    index_t d, dv, keys;
    bool rotates;
  };
  for (const Case& c :
       {Case{64, 64, 1300, false}, Case{128, 128, 700, true}, Case{40, 33, 131, false},
        Case{80, 17, 2100, true}, Case{6, 5, 90, false}, Case{33, 17, 700, true}, Case{7, 23, 60, true}}) {
    const index_t queries = 24;
    const Data<bfloat16> data({2, 1, queries, c.d, c.dv, {c.keys}});
    const ssmax::Rope<float> rope({.width = c.d / 2 * 2}, c.keys);
    const ssmax::Rope<float>* used = c.rotates ? &rope : nullptr;
    const KvCache<bfloat16> cache = filled<bfloat16>(data, used);
    for_each_target_of_products([&](const std::string& target) {
      const auto compare = [&](const auto& mask, const auto& score) {
        const Output<bfloat16> all = run(data, cache, ssmax::Constant{2.5}, mask, score, {.rope = used});
        CHECK(all.explanation.path == ssmax::Path::prefill_bf16);
        for (const index_t few : {index_t{3}, index_t{4}, index_t{6}, index_t{8}}) {
          INFO(target << ' ' << c.d << ' ' << few);
          // The last queries of all: they see the same keys.
          Data<bfloat16> part({2, 1, few, c.d, c.dv, {c.keys}});
          part.k = data.k;
          part.v = data.v;
          for (index_t head = 0; head < 2; ++head) {
            for (index_t i = 0; i < few; ++i)
              std::copy_n(data.q.data() + (head * queries + queries - few + i) * c.d, c.d,
                          part.q.data() + (head * few + i) * c.d);
          }
          const Output<bfloat16> last = run(part, cache, ssmax::Constant{2.5}, mask, score, {.rope = used});
          check_path(last, part.shape);
          for (index_t head = 0; head < 2; ++head) {
            for (index_t i = 0; i < few; ++i) {
              const index_t row = head * few + i, of_all = head * queries + queries - few + i;
              CHECK(last.lse[static_cast<std::size_t>(row)] == all.lse[static_cast<std::size_t>(of_all)]);
              CHECK(std::equal(last.out.data() + row * c.dv, last.out.data() + (row + 1) * c.dv,
                               all.out.data() + of_all * c.dv,
                               [](bfloat16 a, bfloat16 b) { return a.bits == b.bits; }));
            }
          }
        }
      };
      compare(Causal{}, Identity{});
      compare(ssmax::SlidingWindow{200}, Identity{});
      compare(EveryThirdKeyIsHidden{}, ssmax::Softcap{3});
      compare(ssmax::SlidingWindow{99, 0, 4}, Identity{});
    });
  }
}

}  // namespace decode_problem::decode_bfloat16_test
