// Compiled twice, as FAST_MATH_RESULTS. The intrinsics come before the library, as in a program that has its own.
// GCC 12 warns of its own.
#if __has_include(<immintrin.h>)
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif

#include <array>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include <ssmax/ssmax.hpp>

#include "fast_math.hpp"

namespace {

using ssmax::index_t;
using ssmax::View;
using Bits = std::vector<std::uint64_t>;

// Numbers of few bits: flags change no result of what makes them.
template <class T>
std::vector<T> numbers(index_t count, std::uint32_t seed) {
  std::vector<T> result;
  for (index_t i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    result.push_back(T(static_cast<float>(static_cast<int>(seed >> 22) - 512) / 256.0f));
  }
  return result;
}

// Every NaN counts as the same one. Only the bits tell NaN under -Ofast.
template <class T>
void append(Bits& bits, const std::vector<T>& values) {
  for (const T x : values) {
    std::uint64_t word;
    if constexpr (sizeof(T) == 2) {
      word = __builtin_bit_cast(std::uint32_t, static_cast<float>(x));
    } else if constexpr (sizeof(T) == 4) {
      word = __builtin_bit_cast(std::uint32_t, x);
    } else {
      word = __builtin_bit_cast(std::uint64_t, x);
    }
    const std::uint64_t magnitude = word & (sizeof(T) == 8 ? 0x7FFFFFFFFFFFFFFFu : 0x7FFFFFFFu);
    const std::uint64_t infinity = sizeof(T) == 8 ? 0x7FF0000000000000u : 0x7F800000u;
    bits.push_back(magnitude > infinity ? infinity + 1 : word);
  }
}

/// SSMax attention and its gradients, causal, of 4 heads on 2, some keys or values being NaN or infinite.
template <class T>
void attend(Bits& bits, index_t n) {
  using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;
  constexpr index_t d = 24;
  auto q = numbers<T>(4 * n * d, 1), k = numbers<T>(2 * n * d, 2), v = numbers<T>(2 * n * d, 3);
  auto dout = numbers<T>(4 * n * d, 4);
  const float infinity = std::numeric_limits<float>::infinity();
  k[static_cast<std::size_t>(2 * n * d - 1)] = T(infinity);  // the last key of the second kv head
  v[static_cast<std::size_t>(n * d - 1)] = T(std::numeric_limits<float>::quiet_NaN());
  std::vector<T> out(q.size()), dq(q.size()), dk(k.size()), dv(v.size());
  std::vector<Compute> lse(static_cast<std::size_t>(4 * n)), ds(4);
  const auto view = [n](std::vector<T>& x, index_t heads) { return View<T, 4>(x.data(), {1, heads, n, d}); };
  const View<Compute, 3> rows(lse.data(), {1, 4, n});
  const std::vector<Compute> s(4, Compute(0.375));
  const ssmax::SSMax<Compute> scaling(s);
  ssmax::attention<ssmax::ComputeType<T>>(
      {.q = view(q, 4), .k = view(k, 2), .v = view(v, 2), .out = view(out, 4), .lse = rows}, scaling,
      ssmax::Causal{});
  ssmax::attention_backward<ssmax::ComputeType<T>>(
      {.q = view(q, 4), .k = view(k, 2), .v = view(v, 2), .out = view(out, 4), .lse = rows},
      {.dout = view(dout, 4), .dq = view(dq, 4), .dk = view(dk, 2), .dv = view(dv, 2)}, scaling.gradient(ds),
      ssmax::Causal{});
  append(bits, out), append(bits, lse), append(bits, dq), append(bits, dk), append(bits, dv),
      append(bits, ds);
}

template <class T>
void normalize(Bits& bits, T special) {
  auto logits = numbers<T>(1000, 5);
  logits[7] = special;
  append(bits, ssmax::SSMax<T>(T(0.375))(logits));
}

}  // namespace

Bits FAST_MATH_RESULTS(const char* target) {
  for (const ssmax::Target available : ssmax::available_targets()) {
    if (ssmax::target_name(available) == std::string_view(target)) ssmax::set_active_target(available);
  }
  Bits bits;
  for (const index_t n : {1, 5, 70, 300}) {
    attend<float>(bits, n), attend<double>(bits, n), attend<ssmax::half>(bits, n),
        attend<ssmax::bfloat16>(bits, n);
  }
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (const float special : {0.0f, -infinity, infinity, std::numeric_limits<float>::quiet_NaN()}) {
    normalize<float>(bits, special), normalize<double>(bits, special);
  }
  return bits;
}
