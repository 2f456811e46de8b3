// bfloat16 queries over caches of 8 bits: the bf16 path gives the bits of a bfloat16 cache of the dequantized rows.

#include "attention_problem.hpp"
#include "decode_problem.hpp"
#include "dequantized_codes.hpp"
#include "test.hpp"
#include "test_executors.hpp"

namespace decode_problem::eight_bit_bfloat16_test {

using attention_problem::for_each_target_of_products;
using ssmax::Path;
using ssmax::SlidingWindow;
using ssmax::Softcap;
using ssmax::Softmax;

constexpr float nan = std::numeric_limits<float>::quiet_NaN();

/// Writes bf16(element · factor) of a stored row.
template <class X>
void dequantize(const X* row, const float* factor, index_t n, bfloat16* out) {
  for (index_t i = 0; i < n; ++i) {
    const auto x = static_cast<float>(row[i]);
    out[i] = bfloat16(ssmax::detail::ScaledStorage<X> ? x * *factor : x);
  }
}

void dequantize(const ssmax::Q8_0* row, const float*, index_t n, bfloat16* out) {
  for (index_t i = 0; i < n; ++i) {
    const ssmax::Q8_0& group = row[i / 32];
    out[i] = bfloat16(static_cast<float>(group.values[i % 32].value) * static_cast<float>(group.scale));
  }
}

/// Returns a bfloat16 cache of the dequantized rows of a cache.
template <class K, class V>
KvCache<bfloat16> dequantized(const KvCache<K, V>& cache, const Shape& shape) {
  Data<bfloat16> held(shape);
  for (index_t b = 0; b < shape.batch(); ++b) {
    reference::for_each_index({shape.kv_heads, shape.length(b)}, [&](index_t head, index_t key) {
      const auto run = cache.run(b, head, key);
      dequantize(run.k, run.k_scales, shape.d, held.k_row(b, head, key));
      dequantize(run.v, run.v_scales, shape.dv, held.v_row(b, head, key));
    });
  }
  return filled<bfloat16>(held);
}

template <class K, class V>
KvCache<K, V> filled_with(const Data<float>& rows) {
  KvCache<K, V> cache(options_of(rows.shape));
  const index_t all = rows.shape.longest();
  cache.append(rows.k_view(0, all), rows.v_view(0, all), nullptr, rows.shape.lengths);
  return cache;
}

struct EveryThirdKeyIsHidden {
  ssmax::KeyRange keys(const ssmax::Query& query) const { return {0, query.shape.keys}; }
  bool sees(const ssmax::Query&, index_t key) const { return key % 3 != 0; }
};

const std::vector<Shape> shapes{
    // heads, kv_heads, queries, d, dv, lengths: decode_bf16, or prefill_bf16 on AMX
    {16, 2, 1, 64, 64, {1025, 130, 17, 2, 1}},
    {8, 1, 1, 40, 65, {17, 2, 1}},
    {8, 1, 1, 65, 40, {130, 1025}},
    {5, 1, 1, 128, 128, {1025}},
    {16, 1, 1, 31, 33, {200}},
    {10, 2, 1, 7, 5, {50}},
    // prefill_bf16
    {4, 2, 40, 64, 64, {1025, 130, 40}},
    {2, 2, 70, 40, 65, {130, 70}},
    {3, 1, 9, 65, 40, {1025, 17}},
    {1, 1, 300, 128, 128, {300}},
    {2, 1, 33, 7, 5, {50}},
};

/// Checks that two calls give the same bits, and that both take the same path of bfloat16 products.
template <class A, class B, class... Policies>
void check_same(const Data<bfloat16>& data, const A& cache, const B& expected_cache,
                const Policies&... policies) {
  const Output<bfloat16> got = run(data, cache, policies...),
                         expected = run(data, expected_cache, policies...);
  INFO(name_of(data.shape) << to_string(got.explanation));
  CHECK(got.explanation.path == expected.explanation.path);
  CHECK((got.explanation.path == Path::decode_bf16 || got.explanation.path == Path::prefill_bf16));
  CHECK(got == expected);
}

template <class K, class V>
void check_shapes(const std::vector<Shape>& of_shapes = shapes) {
  for (const Shape& shape : of_shapes) {
    const Data<bfloat16> data(shape);
    const KvCache<K, V> cache = filled_with<K, V>(uneven(shape));
    const KvCache<bfloat16> expected = dequantized(cache, shape);
    for_each_target_of_products([&](const std::string&) {
      const index_t rows = shape.heads / shape.kv_heads * shape.queries;
      CHECK(run(data, cache).explanation.path == attention_problem::bfloat16_path(rows));
      check_same(data, cache, expected);
      check_same(data, cache, expected, ssmax::Constant{-2.5}, SlidingWindow{100});
      check_same(data, cache, expected, Softmax{}, EveryThirdKeyIsHidden{}, Softcap{3});
      check_same(data, cache, expected, Softmax{}, ssmax::SlidingWindow{99, 0, 4});
    });
  }
}

TEMPLATE_TEST_CASE(
    "bfloat16 queries over 8 bits are bit-identical to a bfloat16 cache of the dequantized rows",
    "[eight_bit][bfloat16][products]", Int8, Fp8E4M3, Fp8E5M2) {
  check_shapes<TestType, TestType>();
}

TEST_CASE("keys and values of different types, one of 8 bits, take the bf16 path",
          "[eight_bit][bfloat16][products]") {
  check_shapes<Int8, bfloat16>();
  check_shapes<bfloat16, Fp8E4M3>();
  check_shapes<Fp8E5M2, Int8>();
}

TEST_CASE("bfloat16 queries over Q8_0 are bit-identical to a bfloat16 cache of the dequantized rows",
          "[q8_0][bfloat16][products]") {
  using ssmax::Q8_0;
  const std::vector<Shape> whole_groups{{16, 2, 1, 64, 64, {1025, 130, 17, 2, 1}},
                                        {5, 1, 1, 128, 32, {300}},
                                        {8, 1, 1, 32, 160, {1300}},
                                        {2, 2, 70, 32, 96, {130, 70}},
                                        {4, 2, 40, 64, 64, {1025, 40}}};
  check_shapes<Q8_0, Q8_0>(whole_groups);
  check_shapes<Q8_0, Int8>(whole_groups);
  check_shapes<bfloat16, Q8_0>(whole_groups);
}

TEMPLATE_TEST_CASE("every code and factor is dequantized to the nearest bfloat16", "[eight_bit][products]",
                   Int8, Fp8E4M3, Fp8E5M2) {
  for_each_target_of_products([&](const std::string&) {
    for (const float factor : {1.0f, 0.7f, 1.1e-3f, 3e-20f, 7e35f, 1.5e38f, nan}) {
      for (const index_t n : {1, 15, 31, 32, 33, 40, 64, 65, 256})
        check_dequantized_codes<TestType>(factor, n);
    }
  });
}

TEMPLATE_TEST_CASE("rows with NaN in 8 bits reach the bfloat16 queries that see them, and only those",
                   "[eight_bit][bfloat16][products]", Int8, Fp8E4M3, Fp8E5M2) {
  using X = TestType;
  for (const Shape& shape : {Shape{5, 1, 3, 40, 20, {300}}, Shape{2, 1, 40, 64, 65, {300}}}) {
    const Data<bfloat16> data(shape);
    const Data<float> rows = uneven(shape);
    const KvCache<X> clean_cache = filled<X>(rows);
    for (const bool in_key : {true, false}) {
      for (const float special : {nan, std::numeric_limits<float>::infinity()}) {
        Data<float> bad = rows;
        (in_key ? bad.k_row(0, 0, 298) : bad.v_row(0, 0, 298))[5] = special;  // the last two queries see it
        const KvCache<X> cache = filled<X>(bad);
        for_each_target_of_products([&](const std::string& target) {
          CAPTURE(target, special, in_key, name_of(shape));
          const Output<bfloat16> clean = run(data, clean_cache), output = run(data, cache);
          int wrong = 0;
          for (index_t row = 0; row < shape.rows(); ++row) {
            const bool sees = row % shape.queries >= shape.queries - 2;
            for (index_t c = 0; c < shape.dv; ++c) {
              const auto i = static_cast<std::size_t>(row * shape.dv + c);
              wrong += sees ? !std::isnan(static_cast<float>(output.out[i]))
                            : output.out[i].bits != clean.out[i].bits;
            }
          }
          CHECK(wrong == 0);
        });
      }
    }
    Data<float> hidden = rows;
    for (index_t key = 0; key < 300; key += 3) {
      hidden.k_row(0, 0, key)[0] = nan;
      hidden.v_row(0, 0, key)[0] = nan;
    }
    const KvCache<X> cache = filled<X>(hidden);
    for_each_target_of_products([&](const std::string&) {
      check_same(data, cache, clean_cache, Softmax{}, EveryThirdKeyIsHidden{});
    });
  }
}

TEMPLATE_TEST_CASE("decode over 8 bits is bit-identical to prefill, and for any number of threads",
                   "[eight_bit][bfloat16][products]", Int8, Fp8E4M3, Fp8E5M2) {
  using X = TestType;
  const Shape shape{2, 1, 24, 40, 65, {1300}};
  const Data<bfloat16> data(shape);
  const KvCache<X> cache = filled<X>(uneven(shape));
  for_each_target_of_products([&](const std::string& target) {
    const Output<bfloat16> all = run(data, cache);
    CHECK(all.explanation.path == Path::prefill_bf16);
    CHECK(all == run(data, cache, Softmax{}, Causal{}, Identity{}, {}, test_executors::Threads{3}));
    for (const index_t few : {1, 3, 8}) {
      INFO(target << ' ' << few);
      // The last queries of all: the queries see the same keys.
      Data<bfloat16> part({2, 1, few, shape.d, shape.dv, shape.lengths});
      for (index_t head = 0; head < 2; ++head)
        std::copy_n(data.q.data() + ((head + 1) * shape.queries - few) * shape.d, few * shape.d,
                    part.q.data() + head * few * shape.d);
      const Output<bfloat16> last =
          run(part, cache, Softmax{}, Causal{}, Identity{}, {.batch_invariant = true});
      CHECK((last.explanation.path == Path::decode_bf16 || last.explanation.path == Path::prefill_bf16));
      for (index_t head = 0; head < 2; ++head) {
        for (index_t i = 0; i < few * shape.dv; ++i) {
          const index_t of_all = ((head + 1) * shape.queries - few) * shape.dv + i;
          CHECK(last.out[static_cast<std::size_t>(head * few * shape.dv + i)].bits ==
                all.out[static_cast<std::size_t>(of_all)].bits);
        }
      }
    }
  });
}

/// A paged cache has short runs of keys, a ring has two runs. 2500 keys are more than the number without prefetching.
TEMPLATE_TEST_CASE("rows of 8 bits in pages and rings", "[eight_bit][bfloat16][products]", Int8, Fp8E4M3,
                   Fp8E5M2) {
  using X = TestType;
  for (const index_t queries : {1, 6}) {
    const Shape shape{8, 1, queries, 64, 80, {2500}};
    const Data<bfloat16> data(shape);
    const Data<float> rows = uneven(shape);
    const KvCache<X> cache = filled<X>(rows), ring = filled<X>(rows, nullptr, 2300, true);
    const KvCache<bfloat16> expected = dequantized(cache, shape);
    PagedKvCache<X> paged({.kv_heads = 1, .width = 64, .value_width = 80, .page = 16, .pages = 200});
    const std::array<index_t, 1> ids{paged.add()};
    const std::vector<index_t> sequences(2500, ids[0]);
    const View<const float, 3> k(rows.k.data(), {2500, 1, 64}), v(rows.v.data(), {2500, 1, 80});
    paged.append(k, v, sequences);
    for_each_target_of_products([&](const std::string&) {
      check_same(data, paged.source(ids), expected);
      check_same(data, ring, expected, Softmax{}, SlidingWindow{2000});
    });
  }
}

TEMPLATE_TEST_CASE("8 bits with a rope: rotated when stored, or in the call",
                   "[eight_bit][bfloat16][products]", Int8, Fp8E4M3, Fp8E5M2) {
  using X = TestType;
  for (const Shape& shape : {Shape{8, 1, 1, 48, 40, {400}}, Shape{2, 1, 40, 47, 64, {400}}}) {
    const Data<bfloat16> data(shape);
    const Data<float> rows = uneven(shape);
    const ssmax::Rope<float> rope({.width = 46}, 400);
    const KvCache<X> rotated = filled<X>(rows, &rope), plain = filled<X>(rows);
    const KvCache<bfloat16> expected = dequantized(rotated, shape);
    for_each_target_of_products([&](const std::string&) {
      for (const bool rounded : {false, true}) {
        const AttentionOptions<bfloat16> options{.rope = &rope, .rounded_rotation = rounded};
        check_same(data, rotated, expected, Softmax{}, Causal{}, Identity{}, options);
      }
      const auto in_call = [&](bool float_products) {
        return run(data, plain, Softmax{}, Causal{}, Identity{},
                   {.rope = &rope, .float_products = float_products, .rotate_source_keys = true});
      };
      const Output<bfloat16> got = in_call(false), floats = in_call(true);
      const index_t rows_per_kv_head = shape.heads * shape.queries;
      const bool is_prefill = attention_problem::bfloat16_path(rows_per_kv_head) == Path::prefill_bf16;
      CHECK((got.explanation.path == Path::prefill_bf16) == is_prefill);
      Real worst = 0;
      for (std::size_t i = 0; i < got.lse.size(); ++i)
        worst = std::max(worst, std::abs(Real(got.lse[i]) - Real(floats.lse[i])));
      CHECK(worst <= attention_problem::rounded_sum);
    });
  }
}

TEST_CASE("8 bits take float products with few queries, float queries and float_products", "[eight_bit]") {
  const auto path_of = [&]<class T>(T, index_t heads, bool float_products) {
    const Data<T> data({heads, 1, 1, 64, 64, {300}});
    const KvCache<Int8> cache = filled<Int8>(uneven(data.shape));
    AttentionOptions<T> options;
    options.float_products = float_products;
    return run(data, cache, Softmax{}, Causal{}, Identity{}, options).explanation;
  };
  for_each_target_of_products([&](const std::string&) {
    CHECK(path_of(bfloat16{}, 4, false).path == Path::decode);
    CHECK(path_of(bfloat16{}, 8, true).path == Path::decode);
    CHECK(path_of(bfloat16{}, 20, true).path == Path::prefill);
    CHECK(path_of(float{}, 8, false).path == Path::decode);
    CHECK(path_of(float{}, 20, false).path == Path::prefill);
    CHECK(std::string(path_of(float{}, 8, false).reason) == "bfloat16: queries are stored in another type");
  });
  for_each_target_of<bfloat16>([&](const std::string&) {
    if (attention_problem::has_bfloat16_products()) return;
    CHECK(path_of(bfloat16{}, 8, false).path == Path::decode);
    CHECK(path_of(bfloat16{}, 20, false).path == Path::prefill);
  });
}

}  // namespace decode_problem::eight_bit_bfloat16_test
