// AVX-512 for a CPU without it: SIMDe under the intrinsics' own names, and what SIMDe 0.7.4 leaves out or
// gets wrong, in plain loops over lanes. Only the intrinsics of detail/simd/avx512.inl, and only for tests:
// CMake names this file in SSMAX_AVX512_EMULATION. AMX comes with it.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "emulated_amx.hpp"

using __mmask8 = simde__mmask8;
using __mmask16 = simde__mmask16;

namespace simde_avx512 {

using Floats = std::array<float, 16>;
using Doubles = std::array<double, 8>;
using Words = std::array<std::uint32_t, 16>;
using Shorts = std::array<std::uint16_t, 16>;

// Not std::bit_cast: as template arguments, vector types lose their attributes, and GCC warns.
inline Floats lanes(__m512 v) { return __builtin_bit_cast(Floats, v); }
inline Doubles lanes(__m512d v) { return __builtin_bit_cast(Doubles, v); }
inline __m512 vector(const Floats& a) { return __builtin_bit_cast(__m512, a); }
inline __m512d vector(const Doubles& a) { return __builtin_bit_cast(__m512d, a); }

// Hidden lanes are not touched in memory, as a vector at the end of a page needs it.
template <class Lanes, class Value>
Lanes mask_load(Lanes a, unsigned mask, const Value* p) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (mask >> i & 1u) a[i] = p[i];
  }
  return a;
}
template <class Lanes, class Value>
void mask_store(Value* p, unsigned mask, const Lanes& a) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (mask >> i & 1u) p[i] = a[i];
  }
}

// Vectorized where the CPU has FMA ("arch=haswell" would be that CPU alone). The functions are static: Clang 14 defines
// the resolver of an inline function in each unit.
#define SIMDE_AVX512_FMA(Lanes)                                                                           \
  [[gnu::target_clones("fma", "default")]] static void fused_multiply_add(const Lanes& a, const Lanes& b, \
                                                                          Lanes& c) {                     \
    Lanes r;                                                                                              \
    for (std::size_t i = 0; i < r.size(); ++i) r[i] = std::fma(a[i], b[i], c[i]);                         \
    c = r;                                                                                                \
  }
SIMDE_AVX512_FMA(Floats)
SIMDE_AVX512_FMA(Doubles)
#undef SIMDE_AVX512_FMA

// Quarters of 128 bits: two of a, then two of b.
template <class Lanes>
Lanes shuffle_quarters(const Lanes& a, const Lanes& b, unsigned control) {
  constexpr std::size_t quarter = std::tuple_size_v<Lanes> / 4;
  Lanes r;
  for (std::size_t i = 0; i < r.size(); ++i) {
    const std::size_t place = i / quarter;
    const std::size_t from = (control >> (2 * place) & 3u) * quarter + i % quarter;
    r[i] = place < 2 ? a[from] : b[from];
  }
  return r;
}

// The CPU faults here, too.
inline void require_alignment(const void* p) {
  if (reinterpret_cast<std::uintptr_t>(p) % 64 != 0) {
    std::fprintf(stderr, "simde_avx512: streamed to %p, which is not a multiple of 64\n", p);
    std::abort();
  }
}

inline float widen(std::uint16_t bits) {
  const int exponent = bits >> 10 & 0x1F, mantissa = bits & 0x3FF;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 0x1F) {
    const std::uint32_t payload = static_cast<std::uint32_t>(mantissa) << 13;
    const std::uint32_t magnitude = mantissa == 0 ? 0x7F800000u : 0x7FC00000u | payload;
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits & 0x8000) << 16 | magnitude);
  }
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                               : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25));
}

/// bfloat16's bits, to nearest even; subnormal numbers as 0.
inline std::uint16_t rounded(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t top = bits >> 16;
  if (std::isnan(value)) return static_cast<std::uint16_t>(top | 0x40u);
  if (std::fpclassify(value) == FP_SUBNORMAL) return static_cast<std::uint16_t>(top & 0x8000u);
  return static_cast<std::uint16_t>((bits + 0x7FFFu + (top & 1u)) >> 16);
}

// To nearest even.
inline std::uint16_t narrow(float value) {
  const unsigned sign = std::signbit(value) ? 0x8000u : 0u;
  const double magnitude = std::fabs(static_cast<double>(value));
  unsigned bits;
  if (std::isnan(value)) {
    bits = 0x7E00u | (std::bit_cast<std::uint32_t>(value) >> 13 & 0x1FFu);
  } else if (magnitude >= 65520.0) {
    bits = 0x7C00u;
  } else {
    // A half is n units, 1024 <= n < 2048, of the last place of its binade. Below the least binade n is less;
    // rounded up to 2048 it is the first of the next one.
    const int binade = magnitude < 0x1p-14 ? -14 : std::ilogb(magnitude);
    const auto n = static_cast<unsigned>(std::nearbyint(std::ldexp(magnitude, 10 - binade)));
    bits = static_cast<unsigned>(binade + 14) * 1024u + n;
  }
  return static_cast<std::uint16_t>(sign | bits);
}

}  // namespace simde_avx512

// ---- What SIMDe leaves out. -------------------------------------------------------------------------------

inline __m512 _mm512_mask_loadu_ps(__m512 rest, __mmask16 k, const float* p) {
  return simde_avx512::vector(simde_avx512::mask_load(simde_avx512::lanes(rest), k, p));
}
inline __m512d _mm512_mask_loadu_pd(__m512d rest, __mmask8 k, const double* p) {
  return simde_avx512::vector(simde_avx512::mask_load(simde_avx512::lanes(rest), k, p));
}
inline void _mm512_mask_storeu_ps(float* p, __mmask16 k, __m512 v) {
  simde_avx512::mask_store(p, k, simde_avx512::lanes(v));
}
inline void _mm512_mask_storeu_pd(double* p, __mmask8 k, __m512d v) {
  simde_avx512::mask_store(p, k, simde_avx512::lanes(v));
}

inline void _mm512_stream_ps(float* p, __m512 v) {
  simde_avx512::require_alignment(p);
  std::memcpy(p, &v, sizeof v);
}
inline void _mm512_stream_pd(double* p, __m512d v) {
  simde_avx512::require_alignment(p);
  std::memcpy(p, &v, sizeof v);
}

inline __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, unsigned control) {
  using namespace simde_avx512;
  return vector(shuffle_quarters(lanes(a), lanes(b), control));
}
inline __m512d _mm512_shuffle_f64x2(__m512d a, __m512d b, unsigned control) {
  using namespace simde_avx512;
  return vector(shuffle_quarters(lanes(a), lanes(b), control));
}

// Within each quarter, the same way in all.
inline __m512 _mm512_permute_ps(__m512 v, unsigned control) {
  const auto a = simde_avx512::lanes(v);
  simde_avx512::Floats r;
  for (std::size_t i = 0; i < r.size(); ++i) r[i] = a[i / 4 * 4 + (control >> (2 * (i % 4)) & 3u)];
  return simde_avx512::vector(r);
}
// Within each quarter, a bit of its own for each lane.
inline __m512d _mm512_permute_pd(__m512d v, unsigned control) {
  const auto a = simde_avx512::lanes(v);
  simde_avx512::Doubles r;
  for (std::size_t i = 0; i < r.size(); ++i) r[i] = a[i / 2 * 2 + (control >> i & 1u)];
  return simde_avx512::vector(r);
}

// Within each quarter, the same way in all; lanes that k hides are those of rest.
enum _MM_PERM_ENUM : unsigned { _MM_PERM_CCAA = 0xA0, _MM_PERM_DDBB = 0xF5 };
inline __m512i _mm512_mask_shuffle_epi32(__m512i rest, __mmask16 k, __m512i v, _MM_PERM_ENUM control) {
  const auto a = __builtin_bit_cast(simde_avx512::Words, v);
  auto r = __builtin_bit_cast(simde_avx512::Words, rest);
  for (std::size_t i = 0; i < r.size(); ++i) {
    if (k >> i & 1u) r[i] = a[i / 4 * 4 + (control >> (2 * (i % 4)) & 3u)];
  }
  return __builtin_bit_cast(__m512i, r);
}

inline __m512i _mm512_cvtepu16_epi32(__m256i v) {
  const auto a = __builtin_bit_cast(simde_avx512::Shorts, v);
  simde_avx512::Words r;
  for (std::size_t i = 0; i < r.size(); ++i) r[i] = a[i];
  return __builtin_bit_cast(__m512i, r);
}
inline __m512i _mm512_cvtepi8_epi32(__m128i v) {
  const auto a = __builtin_bit_cast(std::array<std::int8_t, 16>, v);
  simde_avx512::Words r;
  for (std::size_t i = 0; i < r.size(); ++i) r[i] = static_cast<std::uint32_t>(std::int32_t{a[i]});
  return __builtin_bit_cast(__m512i, r);
}
inline __m512 _mm512_cvtepi32_ps(__m512i v) {
  const auto a = __builtin_bit_cast(std::array<std::int32_t, 16>, v);
  simde_avx512::Floats r;
  for (std::size_t i = 0; i < r.size(); ++i) r[i] = static_cast<float>(a[i]);
  return simde_avx512::vector(r);
}
inline __m256i _mm512_cvtepi32_epi16(__m512i v) {
  const auto a = __builtin_bit_cast(simde_avx512::Words, v);
  simde_avx512::Shorts r;
  for (std::size_t i = 0; i < r.size(); ++i) r[i] = static_cast<std::uint16_t>(a[i] & 0xFFFFu);
  return __builtin_bit_cast(__m256i, r);
}

inline __m512 _mm512_cvtph_ps(__m256i v) {
  const auto a = __builtin_bit_cast(simde_avx512::Shorts, v);
  simde_avx512::Floats r;
  for (std::size_t i = 0; i < r.size(); ++i) r[i] = simde_avx512::widen(a[i]);
  return simde_avx512::vector(r);
}
inline __m256i _mm512_cvtps_ph(__m512 v, [[maybe_unused]] int to_nearest) {
  const auto a = simde_avx512::lanes(v);
  simde_avx512::Shorts r;
  for (std::size_t i = 0; i < r.size(); ++i) r[i] = simde_avx512::narrow(a[i]);
  return __builtin_bit_cast(__m256i, r);
}

inline __m512i _mm512_maskz_loadu_epi16(std::uint32_t k, const void* p) {
  std::array<std::uint16_t, 32> r{};
  for (std::size_t i = 0; i < r.size(); ++i) {
    if (k >> i & 1u) std::memcpy(&r[i], static_cast<const std::uint16_t*>(p) + i, sizeof r[i]);
  }
  return __builtin_bit_cast(__m512i, r);
}

/// Towards minus infinity alone: x - floor(x), and 0 for an infinite x.
inline __m512 _mm512_reduce_ps(__m512 a, int) {
  auto x = simde_avx512::lanes(a);
  for (float& value : x) value = std::isinf(value) ? 0 : value - std::floor(value);
  return simde_avx512::vector(x);
}

/// To nearest, ties to even, subnormal numbers as 0: low in the lower half.
inline __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  const auto a = simde_avx512::lanes(low), b = simde_avx512::lanes(high);
  std::array<std::uint16_t, 32> r;
  for (std::size_t i = 0; i < 16; ++i) {
    r[i] = simde_avx512::rounded(a[i]);
    r[i + 16] = simde_avx512::rounded(b[i]);
  }
  return __builtin_bit_cast(__m512bh, r);
}

// ---- What SIMDe gets wrong. -------------------------------------------------------------------------------

/// SIMDe takes a subnormal b as 0. The floor of a subnormal number below 0 is -1.
#undef _mm512_scalef_ps
inline __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
  return simde_mm512_mul_ps(a, simde_mm512_exp2_ps(simde_mm512_floor_ps(b)));
}

/// Without the CPU's own instruction, SIMDe multiplies, rounds and adds.
#undef _mm512_fmadd_ps
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  using namespace simde_avx512;
  auto r = lanes(c);
  fused_multiply_add(lanes(a), lanes(b), r);
  return vector(r);
}
#undef _mm512_fmadd_pd
inline __m512d _mm512_fmadd_pd(__m512d a, __m512d b, __m512d c) {
  using namespace simde_avx512;
  auto r = lanes(c);
  fused_multiply_add(lanes(a), lanes(b), r);
  return vector(r);
}

/// Two steps, the odd place first; subnormal numbers as 0.
#undef _mm512_dpbf16_ps
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  using emulated_amx::flushed, emulated_amx::widened;
  emulation::meet(emulation::pair_dot, ssmax::Target::avx512_bf16);
  simde_avx512::Floats r = simde_avx512::lanes(sum);
  const auto x = __builtin_bit_cast(simde_avx512::Words, a), y = __builtin_bit_cast(simde_avx512::Words, b);
  for (std::size_t i = 0; i < r.size(); ++i) {
    r[i] = flushed(flushed(r[i]) + widened(x[i] >> 16) * widened(y[i] >> 16));
    r[i] = flushed(r[i] + widened(x[i] & 0xFFFFu) * widened(y[i] & 0xFFFFu));
  }
  return simde_avx512::vector(r);
}
