// Wraps AVX512_BF16: 16 pairs of bfloat16, with a pair in the place of a float. Included once, inside its
// target's namespace and region (dispatch/for_each_extension.inl).
#pragma once

struct Pairs {
  using V = __m512i;

  static V load(const bfloat16* p) { return _mm512_loadu_si512(p); }
  /// Loads the first `count` numbers, fewer than 32. The other numbers are 0.
  static V load_part(const bfloat16* p, index_t count) {
    return _mm512_maskz_loadu_epi16((1u << count) - 1u, p);
  }
  static void store(bfloat16* p, V v) { _mm512_storeu_si512(p, v); }
  /// Returns the pair at p in every place.
  static V set(const bfloat16* p) {
    int pair;
    __builtin_memcpy(&pair, p, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  static V ones() { return _mm512_set1_epi32(0x3F803F80); }
  /// Returns the first, or the second, number of each pair.
  static __m512 low(V v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
  static __m512 high(V v) {
    return _mm512_castsi512_ps(_mm512_and_epi32(v, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
  }
  /// Returns sum + a.low·b.low + a.high·b.high. Subnormal numbers count as 0.
  static __m512 dot(V a, V b, __m512 sum) {
    return _mm512_dpbf16_ps(sum, __builtin_bit_cast(__m512bh, a), __builtin_bit_cast(__m512bh, b));
  }
  /// Writes the pairs (low, high) of 2^x, rounded to nearest. x is at most about 0 and may be -inf. Before
  /// rounding, the relative error of 2^x is at most 7.5e-5.
  template <int pairs>
  SSMAX_INLINE static void exp2(const __m512* x, V* out) {
    __m512 p[2 * pairs];
    SSMAX_UNROLL
    for (int i = 0; i < 2 * pairs; ++i) p[i] = x[i];
    scaled_polynomial(rounded_polynomial, p);
    SSMAX_UNROLL
    for (int i = 0; i < pairs; ++i)
      out[i] = join(_mm512_castps_si512(p[2 * i]), _mm512_castps_si512(p[2 * i + 1]));
  }
  /// Returns pairs of neighbours (2^x[i], 2^x[i + 1]) for 32 numbers, as exp2 does. The order is that of
  /// transpose_neighbours.
  SSMAX_INLINE static V exp2_neighbours(__m512 (&x)[2]) {
    scaled_polynomial(rounded_polynomial, x);
    const __m512i order =
        _mm512_set_epi32(0x3F003D, 0x370035, 0x2F002D, 0x270025, 0x3B0039, 0x330031, 0x2B0029, 0x230021,
                         0x1F001D, 0x170015, 0xF000D, 0x70005, 0x1B0019, 0x130011, 0xB0009, 0x30001);
    return _mm512_permutex2var_epi16(_mm512_castps_si512(x[0]), order, _mm512_castps_si512(x[1]));
  }
  /// Transposes 8 rows of 16 pairs. v[i] becomes pairs 2i of all rows, then pairs 2i + 1. In a row, the pairs are
  /// 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15.
  SSMAX_INLINE static void transpose_neighbours(V (&v)[8]) {
    V quad[2][4];  // four rows: quad[i][c] holds places c, 4 + c, 8 + c, 12 + c
    SSMAX_UNROLL
    for (int i = 0; i < 2; ++i) {
      const V *row = v + 4 * i, low01 = _mm512_unpacklo_epi32(row[0], row[1]),
              low23 = _mm512_unpacklo_epi32(row[2], row[3]), high01 = _mm512_unpackhi_epi32(row[0], row[1]),
              high23 = _mm512_unpackhi_epi32(row[2], row[3]);
      quad[i][0] = _mm512_unpacklo_epi64(low01, low23);
      quad[i][1] = _mm512_unpackhi_epi64(low01, low23);
      quad[i][2] = _mm512_unpacklo_epi64(high01, high23);
      quad[i][3] = _mm512_unpackhi_epi64(high01, high23);
    }
    const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0),
                  last = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    SSMAX_UNROLL
    for (int c = 0; c < 4; ++c) {
      v[c] = _mm512_permutex2var_epi64(quad[0][c], first, quad[1][c]);
      v[4 + c] = _mm512_permutex2var_epi64(quad[0][c], last, quad[1][c]);
    }
  }
  /// Returns the largest number of each of 8 rows, twice.
  SSMAX_INLINE static __m512 row_maxima(const __m512 (&v)[8]) {
    __m512 two[4], four[2];
    SSMAX_UNROLL
    for (int i = 0; i < 4; ++i)
      two[i] = _mm512_max_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                             _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    SSMAX_UNROLL
    for (int i = 0; i < 2; ++i) {
      const __m512d a = _mm512_castps_pd(two[2 * i]), b = _mm512_castps_pd(two[2 * i + 1]);
      four[i] = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                              _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 eight = _mm512_max_ps(_mm512_shuffle_f32x4(four[0], four[1], 0x44),
                                       _mm512_shuffle_f32x4(four[0], four[1], 0xEE));
    return _mm512_max_ps(_mm512_shuffle_f32x4(eight, eight, 0x88), _mm512_shuffle_f32x4(eight, eight, 0xDD));
  }
  /// Returns the sum of the halves of `first`, then the sum of the halves of `last`.
  static __m512 add_halves(__m512 first, __m512 last) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(first, last, 0x44), _mm512_shuffle_f32x4(first, last, 0xEE));
  }
  /// Returns the first half of `first`, then the first half of `last`.
  static __m512 first_halves(__m512 first, __m512 last) { return _mm512_shuffle_f32x4(first, last, 0x44); }
  /// Replaces x by 2^x with a relative error of at most 2.1e-7. x may be -inf.
  template <int count>
  SSMAX_INLINE static void exp2_float(__m512 (&x)[count]) {
    constexpr float polynomial[] = {0x1.ec320ap-10f, 0x1.26900cp-7f, 0x1.c95446p-5f,
                                    0x1.ebd5a8p-3f,  0x1.62e4f6p-1f, 1};
    scaled_polynomial(polynomial, x);
  }
  /// Rounds two vectors to nearest and stores each to a row of 16 numbers. Returns their pairs (low, high).
  static V round_rows(__m512 low, __m512 high, bfloat16* low_row, bfloat16* high_row) {
    const __m512i rows = __builtin_bit_cast(__m512i, _mm512_cvtne2ps_pbh(high, low));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low_row), _mm512_castsi512_si256(rows));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high_row), _mm512_extracti64x4_epi64(rows, 1));
    const __m512i order =
        _mm512_set_epi32(0x1F000F, 0x1E000E, 0x1D000D, 0x1C000C, 0x1B000B, 0x1A000A, 0x190009, 0x180008,
                         0x170007, 0x160006, 0x150005, 0x140004, 0x130003, 0x120002, 0x110001, 0x100000);
    return _mm512_permutexvar_epi16(order, rows);
  }
  /// The power of two that `dequantize` expects in the factor.
  template <class X>
  static constexpr float dequantize_unit = std::is_same_v<X, Fp8E4M3> ? 256 : 1;
  /// Rounds 32 numbers to nearest and stores them. With channels, multiplies them by the factors of the channels first.
  template <bool has_channels>
  static void store_dequantized(__m512 low, __m512 high, [[maybe_unused]] const float* channels,
                                bfloat16* out) {
    if constexpr (has_channels) {
      low *= _mm512_loadu_ps(channels);
      high *= _mm512_loadu_ps(channels + 16);
    }
    store_rounded(out, low, high);
  }
  /// Multiplies 32 numbers by a factor and, with channels, by the factors of the channels. Rounds the products to
  /// nearest and stores them. Subnormal results become 0.
  template <bool has_channels, class X>
  static void dequantize(const X* p, __m512 factor, const float* channels, bfloat16* out) {
    store_dequantized<has_channels>(F32::load_widened(p) * factor, F32::load_widened(p + 16) * factor,
                                    channels, out);
  }
  /// Converts to half as load_widened does, 32 numbers at once. The factor contains the 256.
  template <bool has_channels>
  static void dequantize(const Fp8E4M3* p, __m512 factor, const float* channels, bfloat16* out) {
    const __m512i code = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i carried = _mm512_add_epi16(code, _mm512_set1_epi16(1));
    const __m512i bits =
        _mm512_slli_epi16(_mm512_ternarylogic_epi32(code, carried, _mm512_set1_epi16(0x80), 0x78),
                          7);  // code ^ (carried & 0x80)
    store_dequantized<has_channels>(_mm512_cvtph_ps(_mm512_castsi512_si256(bits)) * factor,
                                    _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1)) * factor, channels,
                                    out);
  }
  /// Returns the lanes that hold NaN or a number other than 0.
  static __mmask16 not_zero(__m512 v) { return _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_NEQ_UQ); }
  /// Returns (low[i], high[i]) for 16 numbers of two rows.
  static V interleave(const bfloat16* low, const bfloat16* high) {
    const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low)));
    const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(high)));
    return _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
  }
  /// Returns (low[i], high[i]) for the first or the last 16 of 32 numbers of two rows.
  static V interleave_low(V low, V high) { return _mm512_permutex2var_epi16(low, interleaved<0>(), high); }
  static V interleave_high(V low, V high) { return _mm512_permutex2var_epi16(low, interleaved<16>(), high); }
  static __m512 as_floats(V v) { return _mm512_castsi512_ps(v); }
  static V as_pairs(__m512 v) { return _mm512_castps_si512(v); }
  static V zero() { return _mm512_setzero_si512(); }
  /// Returns the larger magnitudes. NaN is the largest magnitude. The signs of a must be 0.
  static V max_magnitude(V a, V b) {
    return _mm512_max_epu16(a, _mm512_and_si512(b, _mm512_set1_epi32(0x7FFF7FFF)));
  }
  /// Returns true if a number is NaN or infinite.
  static bool any_not_finite(V v) {
    const __m512i low = _mm512_set1_epi32(0x7F80), high = _mm512_set1_epi32(0x7F800000);
    return (_mm512_cmpeq_epi32_mask(_mm512_and_si512(v, low), low) |
            _mm512_cmpeq_epi32_mask(_mm512_and_si512(v, high), high)) != 0;
  }

 private:
  static void store_rounded(bfloat16* p, __m512 low, __m512 high) {
    store(p, __builtin_bit_cast(__m512i, _mm512_cvtne2ps_pbh(high, low)));
  }
  /// 2^f for f in [0, 1), plus 2^-8. 2^f is in [1, 2), where the spacing of bfloat16 is 2^-7. The polynomial includes
  /// half of the spacing. So cutting off the lower 16 bits rounds to nearest.
  static constexpr float rounded_polynomial[] = {0x1.3f96a4p-4f, 0x1.cefc4cp-3f, 0x1.64444cp-1f,
                                                 0x1.fff632p-1f + 0x1p-8f};

  /// Returns the indices (first + i, 32 + first + i).
  template <int first>
  static __m512i interleaved() {
    const __m512i pairs = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_add_epi32(_mm512_mullo_epi32(pairs, _mm512_set1_epi32(0x10001)),
                            _mm512_set1_epi32(((32 + first) << 16) + first));
  }
  /// Replaces x = n + f, where n is the integer below, by polynomial(f) · 2^n. The coefficient of the highest
  /// power is first.
  template <int size, int count>
  SSMAX_INLINE static void scaled_polynomial(const float (&polynomial)[size], __m512 (&x)[count]) {
    constexpr int toward_minus_infinity = 1, no_exceptions = 8;
    __m512 f[count], p[count];
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) {
      f[i] = _mm512_reduce_ps(x[i], toward_minus_infinity | no_exceptions);
      p[i] = _mm512_set1_ps(polynomial[0]);
    }
    SSMAX_UNROLL
    for (int c = 1; c < size; ++c) {
      SSMAX_UNROLL
      for (int i = 0; i < count; ++i) p[i] = _mm512_fmadd_ps(p[i], f[i], _mm512_set1_ps(polynomial[c]));
    }
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) x[i] = _mm512_scalef_ps(p[i], x[i]);
  }
  /// Returns the upper halves of floats as pairs (low, high).
  static V join(__m512i low, __m512i high) {
    const __m512i top = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(low, 16), high, top, 0xF8);  // low | (high & top)
  }
};
