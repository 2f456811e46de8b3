// Measures the limits of the machine: rates of multiply-add and of memory.
#include "limit.hpp"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <ssmax/target.hpp>
#include <string>
#include <vector>

#include "copy.hpp"
#include "data.hpp"
#include "team.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ssmax_bench {
namespace {

// The kernels of one instruction set. Each returns a number that depends on all of its work, so that the compiler keeps
// the work.
struct LimitKernel {
  const char* name;
  double flops_per_round;
  float (*fma)(index_t rounds);
  float (*read)(const float* data, index_t size);  // four streams, each a quarter of the array
};

// Defines fma_<suffix> and read_<suffix> for one vector type and its operations.
//
// fma uses twelve chains. Eight chains hide the latency of an FMA (4 cycles on two ports); twelve chains and the constants
// fit into sixteen registers. The chains start at different values: the compiler would merge equal chains. The multiplier
// is below 1, so that the chains converge.
#define SSMAX_BENCH_LIMIT_KERNELS(suffix, attribute, Vector, lanes, set1, loadu, add, fmadd)      \
  attribute float fma_##suffix(index_t rounds) {                                                  \
    const Vector m = set1(0.999F);                                                                \
    const Vector a = set1(0.001F);                                                                \
    Vector c0 = set1(1.0F), c1 = set1(2.0F), c2 = set1(3.0F), c3 = set1(4.0F), c4 = set1(5.0F),   \
           c5 = set1(6.0F), c6 = set1(7.0F), c7 = set1(8.0F), c8 = set1(9.0F), c9 = set1(10.0F),  \
           c10 = set1(11.0F), c11 = set1(12.0F);                                                  \
    for (index_t i = 0; i < rounds; ++i) {                                                        \
      c0 = fmadd(c0, m, a), c1 = fmadd(c1, m, a), c2 = fmadd(c2, m, a), c3 = fmadd(c3, m, a);     \
      c4 = fmadd(c4, m, a), c5 = fmadd(c5, m, a), c6 = fmadd(c6, m, a), c7 = fmadd(c7, m, a);     \
      c8 = fmadd(c8, m, a), c9 = fmadd(c9, m, a), c10 = fmadd(c10, m, a), c11 = fmadd(c11, m, a); \
    }                                                                                             \
    c0 = add(add(add(c0, c1), add(c2, c3)), add(add(c4, c5), add(c6, c7)));                       \
    float out[lanes];                                                                             \
    const Vector total = add(c0, add(add(c8, c9), add(c10, c11)));                                \
    __builtin_memcpy(out, &total, sizeof(out));                                                   \
    float sum = 0.0F;                                                                             \
    for (float value : out) sum += value;                                                         \
    return sum;                                                                                   \
  }                                                                                               \
  attribute float read_##suffix(const float* data, index_t size) {                                \
    const index_t quarter = size / 4;                                                             \
    Vector c0 = set1(0.0F), c1 = c0, c2 = c0, c3 = c0, d0 = c0, d1 = c0, d2 = c0, d3 = c0;        \
    for (index_t i = 0; i < quarter; i += 2 * lanes) {                                            \
      const float* p = data + i;                                                                  \
      c0 = add(c0, loadu(p)), d0 = add(d0, loadu(p + lanes));                                     \
      c1 = add(c1, loadu(p + quarter)), d1 = add(d1, loadu(p + quarter + lanes));                 \
      c2 = add(c2, loadu(p + 2 * quarter)), d2 = add(d2, loadu(p + 2 * quarter + lanes));         \
      c3 = add(c3, loadu(p + 3 * quarter)), d3 = add(d3, loadu(p + 3 * quarter + lanes));         \
    }                                                                                             \
    float out[lanes];                                                                             \
    const Vector total = add(add(add(c0, c1), add(c2, c3)), add(add(d0, d1), add(d2, d3)));       \
    __builtin_memcpy(out, &total, sizeof(out));                                                   \
    float sum = 0.0F;                                                                             \
    for (float value : out) sum += value;                                                         \
    return sum;                                                                                   \
  }

#if defined(__x86_64__)

SSMAX_BENCH_LIMIT_KERNELS(avx2, __attribute__((target("avx2,fma"))), __m256, 8, _mm256_set1_ps,
                          _mm256_loadu_ps, _mm256_add_ps, _mm256_fmadd_ps)
SSMAX_BENCH_LIMIT_KERNELS(avx512, __attribute__((target("avx512f"))), __m512, 16, _mm512_set1_ps,
                          _mm512_loadu_ps, _mm512_add_ps, _mm512_fmadd_ps)

#endif

// Vectors of the baseline instruction set: SSE2 on x86-64, NEON on AArch64.
using Baseline = float __attribute__((vector_size(16)));
Baseline baseline_set1(float value) { return Baseline{value, value, value, value}; }
Baseline baseline_load(const float* data) {
  Baseline value;
  __builtin_memcpy(&value, data, sizeof(value));
  return value;
}
Baseline baseline_add(Baseline a, Baseline b) { return a + b; }
Baseline baseline_fma(Baseline a, Baseline b, Baseline c) { return a * b + c; }
SSMAX_BENCH_LIMIT_KERNELS(baseline, , Baseline, 4, baseline_set1, baseline_load, baseline_add, baseline_fma)

#undef SSMAX_BENCH_LIMIT_KERNELS

std::vector<LimitKernel> kernels() {
  constexpr double chains = 12;
  std::vector<LimitKernel> all{{"baseline", 2 * 4 * chains, fma_baseline, read_baseline}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    all.push_back({"avx2", 2 * 8 * chains, fma_avx2, read_avx2});
  }
  if (__builtin_cpu_supports("avx512f")) {
    all.push_back({"avx512", 2 * 16 * chains, fma_avx512, read_avx512});
  }
#endif
  return all;
}

// A kernel of bfloat16 products for one target of the library. A processor without the target has no row.
struct ProductKernel {
  const char* name;
  ssmax::Target target;
  double flops_per_round;
  float (*run)(index_t rounds);
};

#if defined(__x86_64__)

// Computes four sums of tiles. Four products load two tiles of each operand from the first-level cache. A tile has 16 rows
// of 64 bytes.
__attribute__((target("amx-tile,amx-bf16"))) float amx_products(index_t rounds) {
  struct alignas(64) Configuration {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static const Configuration configuration;
  alignas(64) static const std::array<float, 4 * 256> operands{};
  alignas(64) std::array<float, 256> sums;
  const float* data = operands.data();
  _tile_loadconfig(&configuration);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (index_t i = 0; i < rounds; ++i) {
    _tile_loadd(4, data, 64);
    _tile_loadd(6, data + 512, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, data + 768, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, data + 256, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums.data(), 64);
  _tile_release();
  return sums[0];
}

// Uses twelve chains, as the kernel of FMAs does.
__attribute__((target("avx512f,avx512bf16"))) float avx512_dots(index_t rounds) {
  const auto pairs = __builtin_bit_cast(__m512bh, _mm512_set1_epi32(0x3C003C00));
  __m512 sums[12];
  for (int i = 0; i < 12; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  for (index_t round = 0; round < rounds; ++round) {
    for (__m512& sum : sums) sum = _mm512_dpbf16_ps(sum, pairs, pairs);
  }
  for (int i = 1; i < 12; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  return _mm512_cvtss_f32(sums[0]);
}

constexpr ProductKernel tile_products{"amx_bf16", ssmax::Target::amx, 4 * 2.0 * 16 * 16 * 32, amx_products};
constexpr ProductKernel pair_dots{"dot_bf16", ssmax::Target::avx512_bf16, 12 * 2.0 * 32, avx512_dots};
constexpr std::array product_kernels{tile_products, pair_dots};

#elif defined(__aarch64__) && !defined(__clang__)

__attribute__((target("arch=armv8.2-a+bf16"))) float neon_dots(index_t rounds) {
  const bfloat16x8_t pairs = vreinterpretq_bf16_u32(vdupq_n_u32(0x3C003C00));
  float32x4_t sums[12];
  for (int i = 0; i < 12; ++i) sums[i] = vdupq_n_f32(static_cast<float>(i));
  for (index_t round = 0; round < rounds; ++round) {
    for (float32x4_t& sum : sums) sum = vbfdotq_f32(sum, pairs, pairs);
  }
  for (int i = 1; i < 12; ++i) sums[0] = vaddq_f32(sums[0], sums[i]);
  return vgetq_lane_f32(sums[0], 0);
}

constexpr ProductKernel pair_dots{"dot_bf16", ssmax::Target::neon_bf16, 12 * 2.0 * 8, neon_dots};
constexpr std::array product_kernels{pair_dots};

#else

constexpr std::array<ProductKernel, 0> product_kernels{};

#endif

void products(benchmark::State& state, const ProductKernel& kernel, int threads) {
  constexpr index_t rounds = 200'000;
  Team team(threads, [&kernel](int) { benchmark::DoNotOptimize(kernel.run(rounds)); });
  for (auto _ : state) team.run();
  state.SetLabel(ssmax::target_name(kernel.target));
  state.counters["GFLOPS"] =
      benchmark::Counter(kernel.flops_per_round * static_cast<double>(rounds) * threads * 1e-9,
                         benchmark::Counter::kIsIterationInvariantRate);
}

void register_products() {
  const std::vector<ssmax::Target> available = ssmax::available_targets();
  for (const char* name : {"amx_bf16", "dot_bf16"}) {
    const std::string benchmark = std::string("limit/") + name;
    const auto kernel =
        std::find_if(product_kernels.begin(), product_kernels.end(), [&](const ProductKernel& k) {
          return std::string(k.name) == name &&
                 std::find(available.begin(), available.end(), k.target) != available.end();
        });
    if (kernel == product_kernels.end()) {
      benchmark::AddCustomContext(benchmark, "missing: this processor, or its system, has no such unit");
      continue;
    }
    for (const int threads : {1, 2}) {
      benchmark::RegisterBenchmark((benchmark + "_t" + std::to_string(threads)).c_str(), products, *kernel,
                                   threads)
          ->UseRealTime();
    }
  }
}

// Returns the fastest kernel for the given work: the limit of the machine is the best rate over all instruction sets.
LimitKernel fastest(const std::function<void(const LimitKernel&)>& work,
                    const std::function<double(const LimitKernel&)>& amount) {
  using Clock = std::chrono::steady_clock;
  LimitKernel best{};
  double best_rate = 0;
  for (const LimitKernel& kernel : kernels()) {
    double seconds = std::numeric_limits<double>::infinity();
    for (int attempt = 0; attempt < 5; ++attempt) {
      const Clock::time_point start = Clock::now();
      work(kernel);
      seconds = std::min(seconds, std::chrono::duration<double>(Clock::now() - start).count());
    }
    const double rate = amount(kernel) / seconds;
    if (rate > best_rate) {
      best_rate = rate;
      best = kernel;
    }
  }
  return best;
}

void fma(benchmark::State& state, int threads) {
  constexpr index_t rounds = 200'000;
  const LimitKernel kernel = fastest([](const LimitKernel& k) { benchmark::DoNotOptimize(k.fma(rounds)); },
                                     [](const LimitKernel& k) { return k.flops_per_round; });
  Team team(threads, [&kernel](int) { benchmark::DoNotOptimize(kernel.fma(rounds)); });
  for (auto _ : state) team.run();
  state.SetLabel(kernel.name);
  state.counters["GFLOPS"] =
      benchmark::Counter(kernel.flops_per_round * static_cast<double>(rounds) * threads * 1e-9,
                         benchmark::Counter::kIsIterationInvariantRate);
}

// Measures reading. Each thread reads its own array. Small arrays are read several times, so that a round is long compared
// with its start.
void read(benchmark::State& state, int threads, index_t bytes) {
  const index_t size = bytes / static_cast<index_t>(sizeof(float)) / threads;
  std::vector<Buffer> arrays;
  for (int member = 0; member < threads; ++member) arrays.emplace_back(size, member);
  const LimitKernel kernel =
      fastest([&](const LimitKernel& k) { benchmark::DoNotOptimize(k.read(arrays[0].data(), size)); },
              [](const LimitKernel&) { return 1.0; });
  const index_t passes = std::max<index_t>(1, (index_t{128} << 20) / bytes);
  Team team(threads, [&](int member) {
    for (index_t pass = 0; pass < passes; ++pass) {
      benchmark::DoNotOptimize(kernel.read(arrays[static_cast<std::size_t>(member)].data(), size));
    }
  });
  for (auto _ : state) team.run();
  state.SetLabel(kernel.name);
  state.SetBytesProcessed(state.iterations() * passes * size * static_cast<index_t>(sizeof(float)) * threads);
}

// Measures copying. The rate counts bytes read and bytes written.
void copy_memory(benchmark::State& state, int threads, index_t bytes) {
  const index_t size = bytes / static_cast<index_t>(sizeof(float)) / threads;
  std::vector<Buffer> from;
  std::vector<Buffer> to;
  for (int member = 0; member < threads; ++member) {
    from.emplace_back(size, 2 * member);
    to.emplace_back(size, 2 * member + 1);
  }
  Team team(threads, [&](int member) {
    const auto i = static_cast<std::size_t>(member);
    streaming_copy(from[i].data(), to[i].data(), size);
  });
  for (auto _ : state) {
    team.run();
    benchmark::ClobberMemory();
  }
  state.SetLabel("streaming stores");
  state.SetBytesProcessed(2 * state.iterations() * size * static_cast<index_t>(sizeof(float)) * threads);
}

}  // namespace

void register_limits() {
  constexpr index_t l3_bytes = index_t{8} << 20;  // several times the L2 of a core, and less than the L3
  constexpr index_t memory_bytes = index_t{256}
                                   << 20;  // several times the largest L3 share of one core complex
  for (int threads : {1, 2}) {
    const std::string suffix = "_t" + std::to_string(threads);
    benchmark::RegisterBenchmark(("limit/fma" + suffix).c_str(), fma, threads)->UseRealTime();
    benchmark::RegisterBenchmark(("limit/read_l3" + suffix).c_str(), read, threads, l3_bytes)->UseRealTime();
    benchmark::RegisterBenchmark(("limit/read_mem" + suffix).c_str(), read, threads, memory_bytes)
        ->UseRealTime();
    benchmark::RegisterBenchmark(("limit/copy_mem" + suffix).c_str(), copy_memory, threads, memory_bytes)
        ->UseRealTime();
  }
  register_products();
}

}  // namespace ssmax_bench
