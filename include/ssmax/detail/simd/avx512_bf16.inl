// AVX512_BF16: 16 pairs of bfloat16, a pair in the place of a float.
// Included once, inside its target's namespace and region (dispatch/for_each_extension.inl).
#pragma once

struct Pairs {
  using V = __m512i;

  static V load(const bfloat16* p) { return _mm512_loadu_si512(p); }
  static void store(bfloat16* p, V v) { _mm512_storeu_si512(p, v); }
  /// The pair at p in every place.
  static V set(const bfloat16* p) {
    int pair;
    __builtin_memcpy(&pair, p, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  static V ones() { return _mm512_set1_epi32(0x3F803F80); }
  /// sum + a.low·b.low + a.high·b.high. Subnormal numbers count as 0.
  static __m512 dot(V a, V b, __m512 sum) {
    return _mm512_dpbf16_ps(sum, __builtin_bit_cast(__m512bh, a), __builtin_bit_cast(__m512bh, b));
  }
  /// (low, high) of floats, NaN with a clear bit below its first: to nearest, ties away from 0.
  static V round(__m512 low, __m512 high) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    return join(_mm512_add_epi32(_mm512_castps_si512(low), half),
                _mm512_add_epi32(_mm512_castps_si512(high), half));
  }
  /// (low, high) of 2^x for vectors x <= 0, -inf too: to nearest. 2^x is known within 7.5e-5 of itself.
  ///
  /// The fraction f of x is in [0, 1) and 2^f in [1, 2), where bfloat16's numbers lie 2^-7 apart: half of that is
  /// in the polynomial, so that rounding leaves bits out.
  template <int pairs>
  SSMAX_INLINE static void exp2(const __m512* x, V* out) {
    constexpr int toward_minus_infinity = 1, no_exceptions = 8;
    __m512 f[2 * pairs], p[2 * pairs];
    SSMAX_UNROLL
    for (int i = 0; i < 2 * pairs; ++i) f[i] = _mm512_reduce_ps(x[i], toward_minus_infinity | no_exceptions);
    SSMAX_UNROLL
    for (int i = 0; i < 2 * pairs; ++i)
      p[i] = _mm512_fmadd_ps(_mm512_set1_ps(0x1.3f96a4p-4f), f[i], _mm512_set1_ps(0x1.cefc4cp-3f));
    SSMAX_UNROLL
    for (int i = 0; i < 2 * pairs; ++i) p[i] = _mm512_fmadd_ps(p[i], f[i], _mm512_set1_ps(0x1.64444cp-1f));
    SSMAX_UNROLL
    for (int i = 0; i < 2 * pairs; ++i)
      p[i] = _mm512_fmadd_ps(p[i], f[i], _mm512_set1_ps(0x1.fff632p-1f + 0x1p-8f));
    SSMAX_UNROLL
    for (int i = 0; i < 2 * pairs; ++i) p[i] = _mm512_scalef_ps(p[i], x[i]);
    SSMAX_UNROLL
    for (int i = 0; i < pairs; ++i)
      out[i] = join(_mm512_castps_si512(p[2 * i]), _mm512_castps_si512(p[2 * i + 1]));
  }
  /// (low[i], high[i]) for 16 numbers of two rows.
  static V interleave(const bfloat16* low, const bfloat16* high) {
    const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low)));
    const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(high)));
    return _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
  }
  /// The low halves and the high ones, apart.
  static void split(V v, bfloat16* low, bfloat16* high) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm512_cvtepi32_epi16(v));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16)));
  }
  /// Numbers in even places of two rows, in pairs, and those in odd ones.
  static V even(V low, V high) {
    return _mm512_ternarylogic_epi32(_mm512_slli_epi32(high, 16), low, _mm512_set1_epi32(0xFFFF), 0xF8);
  }
  static V odd(V low, V high) {
    const __m512i top = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(low, 16), high, top, 0xF8);
  }
  static __m512 as_floats(V v) { return _mm512_castsi512_ps(v); }
  /// Whether some number is NaN or infinite.
  static bool any_not_finite(V v) {
    const __m512i low = _mm512_set1_epi32(0x7F80), high = _mm512_set1_epi32(0x7F800000);
    return (_mm512_cmpeq_epi32_mask(_mm512_and_si512(v, low), low) |
            _mm512_cmpeq_epi32_mask(_mm512_and_si512(v, high), high)) != 0;
  }

 private:
  /// The upper halves of floats: (low, high).
  static V join(__m512i low, __m512i high) {
    const __m512i top = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(low, 16), high, top, 0xF8);  // low | (high & top)
  }
};
