// Wraps WebAssembly's SIMD128: 4 floats or 2 doubles. Included once, inside its target's namespace and region
// (dispatch/for_each_target.inl).
//
// SIMD128 has no fused multiply-add. (The one of relaxed SIMD may or may not be fused.) So fma rounds twice,
// and Exp is a separate implementation (simd128_exp.inl). max and min return the same operand as in
// scalar.inl, also if one operand is NaN. An x86 processor does this in one instruction.
#pragma once

struct F32 {
  using Value = float;
  using V = v128_t;
  using M = v128_t;
  static constexpr index_t width = 4;
  static constexpr int chains = 4;                       // exponentials in step, within one row
  static constexpr int group_chains = 2;                 // exponentials in step, across short rows
  static constexpr int tile_rows = 4, tile_vectors = 3;  // sums in registers, in attention's products

  static V set(Value v) { return wasm_f32x4_splat(v); }
  static V load(const Value* p) { return wasm_v128_load(p); }
  static V load_part(const Value* p, index_t count, Value fill) {
    Value lanes[4] = {fill, fill, fill, fill};
    for (index_t i = 0; i < count; ++i) lanes[i] = p[i];
    return wasm_v128_load(lanes);
  }
  static void store(Value* p, V v) { wasm_v128_store(p, v); }
  static void store_part(Value* p, V v, index_t count) {
    Value lanes[4];
    wasm_v128_store(lanes, v);
    for (index_t i = 0; i < count; ++i) p[i] = lanes[i];
  }

  static V add(V a, V b) { return wasm_f32x4_add(a, b); }
  static V sub(V a, V b) { return wasm_f32x4_sub(a, b); }
  static V mul(V a, V b) { return wasm_f32x4_mul(a, b); }
  static V div(V a, V b) { return wasm_f32x4_div(a, b); }
  static V fma(V a, V b, V c) { return add(mul(a, b), c); }
  static V max(V a, V b) { return wasm_f32x4_pmax(b, a); }
  static V min(V a, V b) { return wasm_f32x4_pmin(b, a); }
  static V abs(V a) { return wasm_f32x4_abs(a); }
  static V sqrt(V a) { return wasm_f32x4_sqrt(a); }

  static M less(V a, V b) { return wasm_f32x4_lt(a, b); }
  static M not_less(V a, V b) { return wasm_v128_not(wasm_f32x4_lt(a, b)); }
  static M unordered(V a, V b) { return wasm_v128_or(wasm_f32x4_ne(a, a), wasm_f32x4_ne(b, b)); }
  static M either(M a, M b) { return wasm_v128_or(a, b); }
  static M none() { return wasm_i32x4_splat(0); }
  static bool any(M m) { return wasm_v128_any_true(m); }
  static bool all(M m) { return wasm_i32x4_all_true(m); }
  static V keep(M m, V v) { return wasm_v128_and(m, v); }
  static V select(M m, V a, V b) { return wasm_v128_bitselect(a, b, m); }

  static V shift_exponent(V p, V t) { return wasm_i32x4_add(p, wasm_i32x4_shl(t, 23)); }

  static Value reduce_sum(V v) {
    v = add(v, swap<2>(v));
    return wasm_f32x4_extract_lane(add(v, swap<1>(v)), 0);
  }
  static Value reduce_max(V v) {
    v = max(v, swap<2>(v));
    return wasm_f32x4_extract_lane(max(v, swap<1>(v)), 0);
  }
  // Distance, per stage, from the elements of low to the elements of high.
  static constexpr int fold_step[] = {1, 2};
  template <int stage>
  static void fold_inputs(V a, V b, V& low, V& high) {
    low = wasm_i32x4_shuffle(a, b, 0, 2, 4, 6);
    high = wasm_i32x4_shuffle(a, b, 1, 3, 5, 7);
  }
  template <int distance>
  static V swap(V v) {
    if constexpr (distance == 1) return wasm_i32x4_shuffle(v, v, 1, 0, 3, 2);
    if constexpr (distance == 2) return wasm_i32x4_shuffle(v, v, 2, 3, 0, 1);
  }

  // Converts half with integer operations, as in half.hpp. Subnormals and powers of two are exact in float,
  // so a product with 2^112 changes the exponent bias of all finite numbers.
  static V set_widened(half x) { return set(static_cast<float>(x)); }
  static V load_widened(const half* p) { return widen_half(wasm_u32x4_load16x4(p)); }
  static V widen_half(V bits) {
    const V magnitude = wasm_i32x4_shl(wasm_v128_and(bits, wasm_i32x4_splat(0x7FFF)), 13);
    const V sign = wasm_i32x4_shl(wasm_v128_and(bits, wasm_i32x4_splat(0x8000)), 16);
    const M special = wasm_i32x4_ge(magnitude, wasm_i32x4_splat(0x0F800000));  // infinite or NaN
    const V infinity = keep(special, wasm_i32x4_splat(0x7F800000));
    return wasm_v128_or(wasm_v128_or(mul(magnitude, set(0x1p112f)), infinity), sign);
  }
  static V load_widened(const bfloat16* p) { return wasm_i32x4_shl(wasm_u32x4_load16x4(p), 16); }
  static V load_widened(const Int8* p) { return wasm_f32x4_convert_i32x4(load_codes(p)); }
  // Moves the bits to a half, whose bias of the exponent is larger by 8. `carried` has bit 7, the top bit of half's
  // exponent, changed for NaN only.
  static V load_over_256(const Fp8E4M3* p) {
    const V code = load_codes(p);
    const V carried = wasm_i32x4_add(code, wasm_i32x4_splat(1));
    const V bits = wasm_v128_xor(code, wasm_v128_and(carried, wasm_i32x4_splat(0x80)));
    return widen_half(wasm_i32x4_shl(bits, 7));
  }
  static V load_widened(const Fp8E4M3* p) { return mul(load_over_256(p), set(256)); }
  static V load_widened(const Fp8E5M2* p) { return widen_half(wasm_i32x4_shl(load_codes(p), 8)); }
  /// Loads 4 signed numbers of 8 bits.
  static V load_codes(const void* p) {
    return wasm_i32x4_extend_low_i16x8(wasm_i16x8_extend_low_i8x16(wasm_v128_load32_zero(p)));
  }
  static void store_narrowed(half* p, V v) {
    const V magnitude = abs(v);
    const V sign = wasm_v128_and(wasm_u32x4_shr(v, 16), wasm_i32x4_splat(0x8000));
    const V odd = wasm_v128_and(wasm_u32x4_shr(magnitude, 13), wasm_i32x4_splat(1));
    const V rebiased = wasm_i32x4_sub(magnitude, wasm_i32x4_splat(0x38000000 - 0xFFF));
    const V normal = wasm_u32x4_shr(wasm_i32x4_add(rebiased, odd), 13);
    const V small = wasm_i32x4_sub(add(magnitude, set(0.5f)), wasm_i32x4_splat(0x3F000000));
    V result = select(wasm_i32x4_lt(magnitude, wasm_i32x4_splat(0x38800000)), small, normal);
    result = select(wasm_i32x4_ge(magnitude, wasm_i32x4_splat(0x477FF000)), wasm_i32x4_splat(0x7C00), result);
    result = select(unordered(v, v), wasm_i32x4_splat(0x7E00), result);
    store_low_bits(p, wasm_v128_or(result, sign));
  }
  static void store_narrowed(bfloat16* p, V v) {
    const V top = wasm_u32x4_shr(v, 16);
    const V odd = wasm_v128_and(top, wasm_i32x4_splat(1));
    const V rounded = wasm_u32x4_shr(wasm_i32x4_add(wasm_i32x4_add(v, wasm_i32x4_splat(0x7FFF)), odd), 16);
    const V quiet = wasm_v128_or(top, wasm_i32x4_splat(0x40));
    store_low_bits(p, select(unordered(v, v), quiet, rounded));
  }
  /// Stores the lower 16 bits of each lane. The upper bits must be 0.
  static void store_low_bits(void* p, V v) { wasm_v128_store64_lane(p, wasm_u16x8_narrow_i32x4(v, v), 0); }
};

struct F64 {
  using Value = double;
  using V = v128_t;
  using M = v128_t;
  static constexpr index_t width = 2;
  static constexpr int chains = 4;                       // exponentials in step, within one row
  static constexpr int group_chains = 2;                 // exponentials in step, across short rows
  static constexpr int tile_rows = 4, tile_vectors = 3;  // sums in registers, in attention's products

  static V set(Value v) { return wasm_f64x2_splat(v); }
  static V load(const Value* p) { return wasm_v128_load(p); }
  static V load_part(const Value* p, index_t count, Value fill) {
    return count > 0 ? wasm_v128_load64_lane(p, set(fill), 0) : set(fill);
  }
  static void store(Value* p, V v) { wasm_v128_store(p, v); }
  static void store_part(Value* p, V v, index_t count) {
    if (count > 0) wasm_v128_store64_lane(p, v, 0);
  }

  static V add(V a, V b) { return wasm_f64x2_add(a, b); }
  static V sub(V a, V b) { return wasm_f64x2_sub(a, b); }
  static V mul(V a, V b) { return wasm_f64x2_mul(a, b); }
  static V div(V a, V b) { return wasm_f64x2_div(a, b); }
  static V fma(V a, V b, V c) { return add(mul(a, b), c); }
  static V max(V a, V b) { return wasm_f64x2_pmax(b, a); }
  static V min(V a, V b) { return wasm_f64x2_pmin(b, a); }
  static V abs(V a) { return wasm_f64x2_abs(a); }
  static V sqrt(V a) { return wasm_f64x2_sqrt(a); }

  static M less(V a, V b) { return wasm_f64x2_lt(a, b); }
  static M not_less(V a, V b) { return wasm_v128_not(wasm_f64x2_lt(a, b)); }
  static M unordered(V a, V b) { return wasm_v128_or(wasm_f64x2_ne(a, a), wasm_f64x2_ne(b, b)); }
  static M either(M a, M b) { return wasm_v128_or(a, b); }
  static M none() { return wasm_i64x2_splat(0); }
  static bool any(M m) { return wasm_v128_any_true(m); }
  static bool all(M m) { return wasm_i64x2_all_true(m); }
  static V keep(M m, V v) { return wasm_v128_and(m, v); }
  static V select(M m, V a, V b) { return wasm_v128_bitselect(a, b, m); }

  static V shift_exponent(V p, V t) { return wasm_i64x2_add(p, wasm_i64x2_shl(t, 52)); }

  static Value reduce_sum(V v) { return wasm_f64x2_extract_lane(add(v, swap<1>(v)), 0); }
  static Value reduce_max(V v) { return wasm_f64x2_extract_lane(max(v, swap<1>(v)), 0); }
  // Distance, per stage, from the elements of low to the elements of high.
  static constexpr int fold_step[] = {1};
  template <int stage>
  static void fold_inputs(V a, V b, V& low, V& high) {
    low = wasm_i64x2_shuffle(a, b, 0, 2);
    high = wasm_i64x2_shuffle(a, b, 1, 3);
  }
  template <int distance>
  static V swap(V v) {
    if constexpr (distance == 1) return wasm_i64x2_shuffle(v, v, 1, 0);
  }
};
