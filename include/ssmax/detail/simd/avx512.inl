// Wraps AVX-512F: 16 floats or 8 doubles. Included once, inside its target's namespace and region
// (dispatch/for_each_target.inl).
#pragma once

struct F32 {
  using Value = float;
  using V = __m512;
  using M = __mmask16;
  static constexpr index_t width = 16;
  static constexpr int chains = 4;                       // exponentials in step, within one row
  static constexpr int group_chains = 4;                 // exponentials in step, across short rows
  static constexpr int tile_rows = 8, tile_vectors = 3;  // sums in registers, in attention's products

  static V set(Value v) { return _mm512_set1_ps(v); }
  static V load(const Value* p) { return _mm512_loadu_ps(p); }
  static M lanes_below(index_t count) { return static_cast<M>((1u << count) - 1u); }
  static V load_part(const Value* p, index_t count, Value fill) {
    return _mm512_mask_loadu_ps(set(fill), lanes_below(count), p);
  }
  static void store(Value* p, V v) { _mm512_storeu_ps(p, v); }
  static void store_part(Value* p, V v, index_t count) { _mm512_mask_storeu_ps(p, lanes_below(count), v); }

  static V add(V a, V b) { return a + b; }
  static V sub(V a, V b) { return a - b; }
  static V mul(V a, V b) { return a * b; }
  static V div(V a, V b) { return a / b; }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V fused(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm512_max_ps(a, b); }
  static V sqrt(V a) { return _mm512_sqrt_ps(a); }
  static V min(V a, V b) { return _mm512_min_ps(a, b); }
  static V abs(V a) {
    return _mm512_castsi512_ps(_mm512_and_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(0x7FFFFFFF)));
  }

  static M less(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static M not_less(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
  static M unordered(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
  static M either(M a, M b) { return static_cast<M>(a | b); }
  static M none() { return 0; }
  static bool any(M m) { return m != 0; }
  static bool all(M m) { return m == 0xFFFF; }
  static V keep(M m, V v) { return _mm512_maskz_mov_ps(m, v); }
  static V select(M m, V a, V b) { return _mm512_mask_blend_ps(m, b, a); }

  static V shift_exponent(V p, V t) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
  }

  static Value reduce_sum(V v) {
    v = add(v, _mm512_shuffle_f32x4(v, v, 0x4E));
    v = add(v, _mm512_shuffle_f32x4(v, v, 0xB1));
    v = add(v, swap<2>(v));
    return _mm_cvtss_f32(_mm512_castps512_ps128(add(v, swap<1>(v))));
  }
  static Value reduce_max(V v) {
    v = max(v, _mm512_shuffle_f32x4(v, v, 0x4E));
    v = max(v, _mm512_shuffle_f32x4(v, v, 0xB1));
    v = max(v, swap<2>(v));
    return _mm_cvtss_f32(_mm512_castps512_ps128(max(v, swap<1>(v))));
  }
  // Distance, per stage, from the elements of low to the elements of high.
  static constexpr int fold_step[] = {2, 1, 4, 8};
  template <int stage>
  static void fold_inputs(V a, V b, V& low, V& high) {
    if constexpr (stage == 0) {
      low = _mm512_unpacklo_ps(a, b);
      high = _mm512_unpackhi_ps(a, b);
    } else if constexpr (stage == 1) {
      low = _mm512_shuffle_ps(a, b, 0x44);
      high = _mm512_shuffle_ps(a, b, 0xEE);
    } else {
      low = _mm512_shuffle_f32x4(a, b, 0x88);
      high = _mm512_shuffle_f32x4(a, b, 0xDD);
    }
  }
  template <int distance>
  static V swap(V v) {
    if constexpr (distance == 1) return _mm512_permute_ps(v, 0xB1);
    if constexpr (distance == 2) return _mm512_permute_ps(v, 0x4E);
    if constexpr (distance == 4) return _mm512_shuffle_f32x4(v, v, 0xB1);
    if constexpr (distance == 8) return _mm512_shuffle_f32x4(v, v, 0x4E);
  }

  static V load_widened(const half* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static V set_widened(half x) { return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(x.bits))); }
  static V load_widened(const bfloat16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static V load_widened(const Int8* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  // Moves the bits to a half, whose bias of the exponent is larger by 8. `carried` has bit 7, the top bit of half's
  // exponent, changed for NaN only. Operations on 32-bit lanes and a product with 2^120 lose subnormal numbers in
  // programs that flush them to 0.
  static V load_over_256(const Fp8E4M3* p) {
    const __m256i code = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i carried = _mm256_add_epi16(code, _mm256_set1_epi16(1));
    const __m512i bits =
        _mm512_ternarylogic_epi32(_mm512_castsi256_si512(code), _mm512_castsi256_si512(carried),
                                  _mm512_set1_epi32(0x800080), 0x78);  // code ^ (carried & 0x80)
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm512_castsi512_si256(bits), 7));
  }
  static V load_widened(const Fp8E4M3* p) { return mul(load_over_256(p), set(256)); }
  static V load_widened(const Fp8E5M2* p) {
    const __m256i codes = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    // Number i becomes the upper half of 16 bits. This takes one shuffle, widening and shifting takes two.
    const __m256i upper = _mm256_setr_epi8(-1, 0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, -1, 7,  //
                                           -1, 8, -1, 9, -1, 10, -1, 11, -1, 12, -1, 13, -1, 14, -1, 15);
    return _mm512_cvtph_ps(_mm256_shuffle_epi8(codes, upper));
  }
  static void store_narrowed(half* p, V v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store_narrowed(bfloat16* p, V v) {
    const __m512i u = _mm512_castps_si512(v);
    const __m512i top = _mm512_srli_epi32(u, 16);
    const __m512i odd = _mm512_and_epi32(top, _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)), odd), 16);
    const __m512i quiet = _mm512_or_epi32(top, _mm512_set1_epi32(0x40));
    const __m512i result = _mm512_mask_blend_epi32(unordered(v, v), rounded, quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(result));
  }

  // Words of 32 bits, for random numbers.
  using U = __m512i;
  static U set_u(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static U load_u(const std::uint32_t* p) { return _mm512_loadu_si512(p); }
  static void store_u(std::uint32_t* p, U v) { _mm512_storeu_si512(p, v); }
  static U xor_u(U a, U b) { return _mm512_xor_si512(a, b); }
  static U xor_u(U a, U b, U c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
  static void multiply_u(U x, std::uint32_t factor, U& low, U& high) {
    const U even = _mm512_mul_epu32(x, set_u(factor)),
            odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), set_u(factor));
    low = _mm512_mask_shuffle_epi32(even, 0xAAAA, odd, _MM_PERM_CCAA);
    high = _mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_DDBB);
  }
  static M below_u(U a, U b) { return static_cast<M>(~_mm512_cmple_epu32_mask(b, a)); }
  static U shift_left_16(U a) { return _mm512_slli_epi32(a, 16); }
  // Clears bits where `where` is set.
  static U clear_u(U x, M where, std::uint32_t bits) {
    return _mm512_mask_andnot_epi32(x, where, set_u(bits), x);
  }
};

struct F64 {
  using Value = double;
  using V = __m512d;
  using M = __mmask8;
  static constexpr index_t width = 8;
  static constexpr int chains = 4;                       // exponentials in step, within one row
  static constexpr int group_chains = 4;                 // exponentials in step, across short rows
  static constexpr int tile_rows = 8, tile_vectors = 3;  // sums in registers, in attention's products

  static V set(Value v) { return _mm512_set1_pd(v); }
  static V load(const Value* p) { return _mm512_loadu_pd(p); }
  static M lanes_below(index_t count) { return static_cast<M>((1u << count) - 1u); }
  static V load_part(const Value* p, index_t count, Value fill) {
    return _mm512_mask_loadu_pd(set(fill), lanes_below(count), p);
  }
  static void store(Value* p, V v) { _mm512_storeu_pd(p, v); }
  static void store_part(Value* p, V v, index_t count) { _mm512_mask_storeu_pd(p, lanes_below(count), v); }

  static V add(V a, V b) { return a + b; }
  static V sub(V a, V b) { return a - b; }
  static V mul(V a, V b) { return a * b; }
  static V div(V a, V b) { return a / b; }
  static V fma(V a, V b, V c) { return _mm512_fmadd_pd(a, b, c); }
  static V fused(V a, V b, V c) { return _mm512_fmadd_pd(a, b, c); }
  static V max(V a, V b) { return _mm512_max_pd(a, b); }
  static V sqrt(V a) { return _mm512_sqrt_pd(a); }
  static V min(V a, V b) { return _mm512_min_pd(a, b); }
  static V abs(V a) {
    return _mm512_castsi512_pd(
        _mm512_and_epi64(_mm512_castpd_si512(a), _mm512_set1_epi64(0x7FFFFFFFFFFFFFFF)));
  }

  static M less(V a, V b) { return _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ); }
  static M not_less(V a, V b) { return _mm512_cmp_pd_mask(a, b, _CMP_NLT_UQ); }
  static M unordered(V a, V b) { return _mm512_cmp_pd_mask(a, b, _CMP_UNORD_Q); }
  static M either(M a, M b) { return static_cast<M>(a | b); }
  static M none() { return 0; }
  static bool any(M m) { return m != 0; }
  static bool all(M m) { return m == 0xFF; }
  static V keep(M m, V v) { return _mm512_maskz_mov_pd(m, v); }
  static V select(M m, V a, V b) { return _mm512_mask_blend_pd(m, b, a); }

  static V shift_exponent(V p, V t) {
    return _mm512_castsi512_pd(
        _mm512_add_epi64(_mm512_castpd_si512(p), _mm512_slli_epi64(_mm512_castpd_si512(t), 52)));
  }

  static Value reduce_sum(V v) {
    v = add(v, swap<4>(v));
    v = add(v, swap<2>(v));
    return _mm_cvtsd_f64(_mm512_castpd512_pd128(add(v, swap<1>(v))));
  }
  static Value reduce_max(V v) {
    v = max(v, swap<4>(v));
    v = max(v, swap<2>(v));
    return _mm_cvtsd_f64(_mm512_castpd512_pd128(max(v, swap<1>(v))));
  }
  // Distance, per stage, from the elements of low to the elements of high.
  static constexpr int fold_step[] = {1, 2, 4};
  template <int stage>
  static void fold_inputs(V a, V b, V& low, V& high) {
    if constexpr (stage == 0) {
      low = _mm512_unpacklo_pd(a, b);
      high = _mm512_unpackhi_pd(a, b);
    } else {
      low = _mm512_shuffle_f64x2(a, b, 0x88);
      high = _mm512_shuffle_f64x2(a, b, 0xDD);
    }
  }
  template <int distance>
  static V swap(V v) {
    if constexpr (distance == 1) return _mm512_permute_pd(v, 0x55);
    if constexpr (distance == 2) return _mm512_shuffle_f64x2(v, v, 0xB1);
    if constexpr (distance == 4) return _mm512_shuffle_f64x2(v, v, 0x4E);
  }
};
