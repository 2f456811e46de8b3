// Small inputs of public reports about masks, sinks, ALiBi and numbers of 8 and 16 bits, with the values that float64
// gives. Each test names its reports.

#include <bit>
#include <numeric>

#include "target_scope.hpp"
#include "test.hpp"

namespace reported_masks_test {

using namespace ssmax;

constexpr float infinity = std::numeric_limits<float>::infinity();

/// Checks attention of queries and keys of 0 with values v, over views and over a cache of X.
template <class X = float, class M, class C = Identity>
void check_means(const std::vector<float>& v, const M& mask, const std::vector<double>& out,
                 const C& score = {}, const std::vector<float>& sinks = {},
                 const std::vector<double>& lse = {}) {
  const index_t queries = std::ssize(out), keys = std::ssize(v);
  const std::vector<float> zeros(static_cast<std::size_t>(std::max(queries, keys)));
  const View<const float, 4> q(zeros.data(), {1, 1, queries, 1}), k(zeros.data(), {1, 1, keys, 1}),
      values(v.data(), {1, 1, keys, 1});
  KvCache<X> cache({.batch = 1, .kv_heads = 1, .width = 1, .value_width = 1, .capacity = keys});
  cache.append(k, values);
  for_each_target([&](const std::string&) {
    for (const bool is_cached : {false, true}) {
      std::vector<float> actual(out.size()), sums(out.size());
      AttentionArguments<float> arguments{.q = q,
                                          .out = {actual.data(), {1, 1, queries, 1}},
                                          .lse = {sums.data(), {1, 1, queries}},
                                          .sinks = sinks};
      if (is_cached) {
        arguments.keys = cache;
      } else {
        arguments.k = k, arguments.v = values;
      }
      attention(arguments, mask, score);
      for (std::size_t i = 0; i < out.size(); ++i) {
        INFO("cached " << is_cached << ", query " << i);
        CHECK(static_cast<double>(actual[i]) == Approx(out[i]).margin(1e-6));
        if (!lse.empty()) CHECK(static_cast<double>(sums[i]) == Approx(lse[i]).margin(1e-6));
      }
    }
  });
}

std::vector<float> numbers_from_0(index_t count) {
  std::vector<float> result(static_cast<std::size_t>(count));
  std::iota(result.begin(), result.end(), 0.0F);
  return result;
}

TEST_CASE("windows with fewer queries than keys: jax-ml/jax#32300, jax-ml/jax#39576",
          "[attention][reports]") {
  check_means(numbers_from_0(6), SlidingWindow(0, 0), {2, 3, 4, 5});
  check_means(numbers_from_0(6), SlidingWindow(0, 31), {3.5, 4, 4.5, 5});
  check_means(numbers_from_0(6), SlidingWindow(2, 0), {1, 2, 3, 4});
  check_means(numbers_from_0(6), CausalTopLeft{} & SlidingWindow(2, 0), {0, 0.5, 1, 2});  // JAX's alignment
}

TEST_CASE("Llama 4's chunks over a cache: huggingface/transformers, attention_chunk_size",
          "[attention][reports]") {
  check_means(numbers_from_0(10), Chunks(4), {5.5, 8, 8.5});
  check_means(numbers_from_0(8194), Chunks(8192), {4095.5, 8192, 8192.5});
}

TEST_CASE("a softcap keeps masked keys: microsoft/onnxruntime#28379", "[attention][reports]") {
  const std::vector<float> additive{0, -infinity};
  const Bias bias(View<const float, 4>(additive.data(), {1, 1, 1, 2}));
  check_means({1, 0}, Full{}, {1}, Softcap(1) | bias);
  check_means({1, 0}, Full{}, {1}, bias | Softcap(1));
}

TEST_CASE(
    "slopes of 12 and 48 heads: ml-explore/mlx#343, flashinfer-ai/flashinfer#200, ggml-org/llama.cpp#20031",
    "[attention][reports]") {
  const std::vector<double> few = Alibi::slopes(12), many = Alibi::slopes(48);
  const std::vector<double> of_12{0.70711, 0.35355, 0.17678, 0.08839},
      of_48{0.917004, 0.771105, 0.648420, 0.545254};
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(few[8 + i] == Approx(of_12[i]).epsilon(1e-4));
    CHECK(many[32 + i] == Approx(of_48[i]).epsilon(1e-5));
  }
}

TEST_CASE("a sink and holes of masked keys: ROCm/rocm-libraries#12227, imp#1345",
          "[attention][sinks][reports]") {
  const Where outside_hole([](const Query&, index_t key) { return key < 1 || key >= 2049; });
  const Where nowhere([](const Query&, index_t) { return false; });
  const std::vector<float> sink{static_cast<float>(std::log(2.0))};
  const auto check = [&](index_t keys, const auto& mask, double n) {
    const std::vector<float> ones(static_cast<std::size_t>(keys), 1.0F);
    check_means(ones, mask, {n / (n + 2)}, Identity{}, sink, {std::log(n + 2)});
    check_means<Int8>(ones, mask, {n / (n + 2)}, Softcap(5), sink, {std::log(n + 2)});
  };
  check(2048, nowhere, 0);
  check(2049, outside_hole, 1);
  check(5121, outside_hole, 3073);
}

TEST_CASE("rows with one finite logit: torch-mojo-backend#319, deepmodeling/deepmd-kit#5715", "[reports]") {
  for (const std::size_t size : {1U, 2U, 3U, 16U, 17U, 63U, 257U, 1024U, 2049U}) {
    std::vector<float> z(size, -infinity), p(size), log_p(size);
    bool is_right = true;
    for (std::size_t i = 0; i < size; ++i) {
      z[i] = -3;
      softmax(View<const float, 1>(z), View<float, 1>(p));
      log_softmax(View<const float, 1>(z), View<float, 1>(log_p));
      is_right = is_right && p[i] == 1 && log_p[i] == 0 && std::ranges::count(p, 0.0F) == std::ssize(p) - 1;
      z[i] = -infinity;
    }
    INFO(size);
    CHECK(is_right);
  }
  const std::vector<float> z{0.5F, 1e38F};
  std::vector<float> p(2), log_p(2);
  const std::vector<index_t> lengths{1};
  softmax(View<const float, 1>(z), View<float, 1>(p), Softmax{}, KeyLengths{lengths});
  log_softmax(View<const float, 1>(z), View<float, 1>(log_p), Softmax{}, KeyLengths{lengths});
  CHECK((p[0] == 1 && p[1] == 0 && log_p[0] == 0 && log_p[1] == -infinity));
}

TEST_CASE("roundings to e4m3: sgl-project/sglang#40581, jax-ml/ml_dtypes#400", "[eight_bit][reports]") {
  const std::vector<float> in{272, 300, 304, 464, 465, 1000, 0x1p-10F, 0x1.8p-9F, -304, -1000},
      expected{256, 288, 320, 448, 448, 448, 0, 0x1p-8F, -320, -448};
  std::vector<Fp8E4M3> codes(in.size() + 2);
  for_each_target([&](const std::string&) {
    StorageTraits<Fp8E4M3>::store(in.data(), std::ssize(in), codes.data());
    for (std::size_t i = 0; i < in.size(); ++i) {
      INFO(in[i]);
      CHECK(static_cast<float>(codes[i]) == expected[i]);
      CHECK(static_cast<float>(Fp8E4M3(in[i])) == expected[i]);
    }
    const std::vector<float> infinite{infinity, -infinity};
    StorageTraits<Fp8E4M3>::store(infinite.data(), 2, codes.data());
    for (const Fp8E4M3 code : {codes[0], codes[1], Fp8E4M3(infinity), Fp8E4M3(-infinity)})
      CHECK(std::isnan(static_cast<float>(code)));
    for (const auto nan : {std::uint8_t{0x7F}, std::uint8_t{0xFF}})
      CHECK(std::isnan(static_cast<float>(std::bit_cast<Fp8E4M3>(nan))));
  });
}

TEST_CASE("a multiplier of a large half query does not overflow: PriorLabs/TabPFN#1275",
          "[attention][reports]") {
  const std::vector<half> q{half(1e4F)}, k{half(1.0F), half(0.5F)}, v{half(3.0F), half(5.0F)};
  std::vector<half> out(1);
  std::vector<float> lse(1);
  for_each_target([&](const std::string&) {
    attention({.q = View<const half, 4>(q.data(), {1, 1, 1, 1}),
               .k = View<const half, 4>(k.data(), {1, 1, 2, 1}),
               .v = View<const half, 4>(v.data(), {1, 1, 2, 1}),
               .out = View<half, 4>(out.data(), {1, 1, 1, 1}),
               .lse = {lse.data(), {1, 1, 1}}},
              Constant{8});
    CHECK(static_cast<float>(out[0]) == 3);
    CHECK(lse[0] == 80'000);
  });
}

}  // namespace reported_masks_test
