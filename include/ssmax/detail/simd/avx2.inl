// Wraps AVX2 + FMA + F16C: 8 floats or 4 doubles. Included once, inside its target's namespace and region
// (dispatch/for_each_target.inl).
#pragma once

struct F32 {
  using Value = float;
  using V = __m256;
  using M = __m256;
  static constexpr index_t width = 8;
  static constexpr int chains = 4;                       // exponentials in step, within one row
  static constexpr int group_chains = 2;                 // exponentials in step, across short rows
  static constexpr int tile_rows = 4, tile_vectors = 3;  // sums in registers, in attention's products

  static V set(Value v) { return _mm256_set1_ps(v); }
  static V load(const Value* p) { return _mm256_loadu_ps(p); }
  static __m256i lanes_below(index_t count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane);
  }
  static V load_part(const Value* p, index_t count, Value fill) {
    const __m256i m = lanes_below(count);
    return _mm256_blendv_ps(set(fill), _mm256_maskload_ps(p, m), _mm256_castsi256_ps(m));
  }
  static void store(Value* p, V v) { _mm256_storeu_ps(p, v); }
  static void store_part(Value* p, V v, index_t count) { _mm256_maskstore_ps(p, lanes_below(count), v); }

  static V add(V a, V b) { return a + b; }
  static V sub(V a, V b) { return a - b; }
  static V mul(V a, V b) { return a * b; }
  static V div(V a, V b) { return a / b; }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V fused(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }
  static V min(V a, V b) { return _mm256_min_ps(a, b); }
  static V abs(V a) { return _mm256_andnot_ps(set(-0.0f), a); }
  static V sqrt(V a) { return _mm256_sqrt_ps(a); }

  static M less(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  static M not_less(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_NLT_UQ); }
  static M unordered(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_UNORD_Q); }
  static M either(M a, M b) { return _mm256_or_ps(a, b); }
  static M none() { return _mm256_setzero_ps(); }
  static bool any(M m) { return _mm256_movemask_ps(m) != 0; }
  static bool all(M m) { return _mm256_movemask_ps(m) == 0xFF; }
  static V keep(M m, V v) { return _mm256_and_ps(m, v); }
  static V select(M m, V a, V b) { return _mm256_blendv_ps(b, a, m); }

  static V shift_exponent(V p, V t) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
  }

  static Value reduce_sum(V v) {
    __m128 r = _mm256_castps256_ps128(v) + _mm256_extractf128_ps(v, 1);
    r = r + _mm_movehl_ps(r, r);
    return _mm_cvtss_f32(r + _mm_movehdup_ps(r));
  }
  static Value reduce_max(V v) {
    __m128 r = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    r = _mm_max_ps(r, _mm_movehl_ps(r, r));
    return _mm_cvtss_f32(_mm_max_ss(r, _mm_movehdup_ps(r)));
  }
  // Distance, per stage, from the elements of low to the elements of high.
  static constexpr int fold_step[] = {2, 1, 4};
  template <int stage>
  static void fold_inputs(V a, V b, V& low, V& high) {
    if constexpr (stage == 0) {
      low = _mm256_unpacklo_ps(a, b);
      high = _mm256_unpackhi_ps(a, b);
    } else if constexpr (stage == 1) {
      low = _mm256_shuffle_ps(a, b, 0x44);
      high = _mm256_shuffle_ps(a, b, 0xEE);
    } else {
      low = _mm256_permute2f128_ps(a, b, 0x20);
      high = _mm256_permute2f128_ps(a, b, 0x31);
    }
  }
  template <int distance>
  static V swap(V v) {
    if constexpr (distance == 1) return _mm256_permute_ps(v, 0xB1);
    if constexpr (distance == 2) return _mm256_permute_ps(v, 0x4E);
    if constexpr (distance == 4) return _mm256_permute2f128_ps(v, v, 0x01);
  }

  static V load_widened(const half* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static V set_widened(half x) { return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(x.bits))); }
  static V load_widened(const bfloat16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static V load_widened(const Int8* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  // Moves the bits to a half, whose bias of the exponent is larger by 8. `carried` has bit 7, the top bit of half's
  // exponent, changed for NaN only.
  static V load_over_256(const Fp8E4M3* p) {
    const __m128i code = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i carried = _mm_add_epi16(code, _mm_set1_epi16(1));
    const __m128i bits = _mm_xor_si128(code, _mm_and_si128(carried, _mm_set1_epi16(0x80)));
    return _mm256_cvtph_ps(_mm_slli_epi16(bits, 7));
  }
  static V load_widened(const Fp8E4M3* p) { return mul(load_over_256(p), set(256)); }
  static V load_widened(const Fp8E5M2* p) {
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), codes));
  }
  static void store_narrowed(half* p, V v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store_narrowed(bfloat16* p, V v) {
    const __m256i u = _mm256_castps_si256(v);
    const __m256i top = _mm256_srli_epi32(u, 16);
    const __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7FFF)), odd), 16);
    const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
    const __m256i result = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(unordered(v, v)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1)));
  }

  // Words of 32 bits, for random numbers.
  using U = __m256i;
  static U set_u(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static U load_u(const std::uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store_u(std::uint32_t* p, U v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  static U xor_u(U a, U b) { return _mm256_xor_si256(a, b); }
  static U xor_u(U a, U b, U c) { return xor_u(a, xor_u(b, c)); }
  static void multiply_u(U x, std::uint32_t factor, U& low, U& high) {
    const U even = _mm256_mul_epu32(x, set_u(factor)),
            odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), set_u(factor));
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  }
  static M below_u(U a, U b) {
    const U top = set_u(0x80000000);  // the comparison is of signed numbers
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(xor_u(b, top), xor_u(a, top)));
  }
  static U shift_left_16(U a) { return _mm256_slli_epi32(a, 16); }
  // Clears bits where `where` is set.
  static U clear_u(U x, M where, std::uint32_t bits) {
    return _mm256_andnot_si256(_mm256_and_si256(_mm256_castps_si256(where), set_u(bits)), x);
  }
};

struct F64 {
  using Value = double;
  using V = __m256d;
  using M = __m256d;
  static constexpr index_t width = 4;
  static constexpr int chains = 4;                       // exponentials in step, within one row
  static constexpr int group_chains = 2;                 // exponentials in step, across short rows
  static constexpr int tile_rows = 4, tile_vectors = 3;  // sums in registers, in attention's products

  static V set(Value v) { return _mm256_set1_pd(v); }
  static V load(const Value* p) { return _mm256_loadu_pd(p); }
  static __m256i lanes_below(index_t count) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3));
  }
  static V load_part(const Value* p, index_t count, Value fill) {
    const __m256i m = lanes_below(count);
    return _mm256_blendv_pd(set(fill), _mm256_maskload_pd(p, m), _mm256_castsi256_pd(m));
  }
  static void store(Value* p, V v) { _mm256_storeu_pd(p, v); }
  static void store_part(Value* p, V v, index_t count) { _mm256_maskstore_pd(p, lanes_below(count), v); }

  static V add(V a, V b) { return a + b; }
  static V sub(V a, V b) { return a - b; }
  static V mul(V a, V b) { return a * b; }
  static V div(V a, V b) { return a / b; }
  static V fma(V a, V b, V c) { return _mm256_fmadd_pd(a, b, c); }
  static V fused(V a, V b, V c) { return _mm256_fmadd_pd(a, b, c); }
  static V max(V a, V b) { return _mm256_max_pd(a, b); }
  static V min(V a, V b) { return _mm256_min_pd(a, b); }
  static V abs(V a) { return _mm256_andnot_pd(set(-0.0), a); }
  static V sqrt(V a) { return _mm256_sqrt_pd(a); }

  static M less(V a, V b) { return _mm256_cmp_pd(a, b, _CMP_LT_OQ); }
  static M not_less(V a, V b) { return _mm256_cmp_pd(a, b, _CMP_NLT_UQ); }
  static M unordered(V a, V b) { return _mm256_cmp_pd(a, b, _CMP_UNORD_Q); }
  static M either(M a, M b) { return _mm256_or_pd(a, b); }
  static M none() { return _mm256_setzero_pd(); }
  static bool any(M m) { return _mm256_movemask_pd(m) != 0; }
  static bool all(M m) { return _mm256_movemask_pd(m) == 0xF; }
  static V keep(M m, V v) { return _mm256_and_pd(m, v); }
  static V select(M m, V a, V b) { return _mm256_blendv_pd(b, a, m); }

  static V shift_exponent(V p, V t) {
    return _mm256_castsi256_pd(
        _mm256_add_epi64(_mm256_castpd_si256(p), _mm256_slli_epi64(_mm256_castpd_si256(t), 52)));
  }

  static Value reduce_sum(V v) {
    const __m128d r = _mm256_castpd256_pd128(v) + _mm256_extractf128_pd(v, 1);
    return _mm_cvtsd_f64(r + _mm_unpackhi_pd(r, r));
  }
  static Value reduce_max(V v) {
    const __m128d r = _mm_max_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_max_sd(r, _mm_unpackhi_pd(r, r)));
  }
  // Distance, per stage, from the elements of low to the elements of high.
  static constexpr int fold_step[] = {1, 2};
  template <int stage>
  static void fold_inputs(V a, V b, V& low, V& high) {
    if constexpr (stage == 0) {
      low = _mm256_unpacklo_pd(a, b);
      high = _mm256_unpackhi_pd(a, b);
    } else {
      low = _mm256_permute2f128_pd(a, b, 0x20);
      high = _mm256_permute2f128_pd(a, b, 0x31);
    }
  }
  template <int distance>
  static V swap(V v) {
    if constexpr (distance == 1) return _mm256_permute_pd(v, 0x5);
    if constexpr (distance == 2) return _mm256_permute2f128_pd(v, v, 0x01);
  }
};
