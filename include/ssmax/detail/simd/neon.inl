// Wraps NEON on AArch64: 4 floats or 2 doubles. Partial loads and stores handle lanes one by one, because a
// tail has at most 3 lanes. Included once, inside its target's namespace and region
// (dispatch/for_each_target.inl).
#pragma once

struct F32 {
  using Value = float;
  using V = float32x4_t;
  using M = uint32x4_t;
  static constexpr index_t width = 4;
  static constexpr int chains = 4;                       // exponentials in step, within one row
  static constexpr int group_chains = 2;                 // exponentials in step, across short rows
  static constexpr int tile_rows = 8, tile_vectors = 3;  // sums in registers, in attention's products

  static V set(Value v) { return vdupq_n_f32(v); }
  static V load(const Value* p) { return vld1q_f32(p); }
  static V load_part(const Value* p, index_t count, Value fill) {
    Value lanes[4] = {fill, fill, fill, fill};
    for (index_t i = 0; i < count; ++i) lanes[i] = p[i];
    return vld1q_f32(lanes);
  }
  static void store(Value* p, V v) { vst1q_f32(p, v); }
  static void store_part(Value* p, V v, index_t count) {
    Value lanes[4];
    vst1q_f32(lanes, v);
    for (index_t i = 0; i < count; ++i) p[i] = lanes[i];
  }

  static V add(V a, V b) { return a + b; }
  static V sub(V a, V b) { return a - b; }
  static V mul(V a, V b) { return a * b; }
  static V div(V a, V b) { return a / b; }
  static V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
  static V fused(V a, V b, V c) { return vfmaq_f32(c, a, b); }
  static V max(V a, V b) { return vmaxq_f32(a, b); }
  static V min(V a, V b) { return vminq_f32(a, b); }
  static V abs(V a) { return vabsq_f32(a); }
  static V sqrt(V a) { return vsqrtq_f32(a); }

  static M less(V a, V b) { return vcltq_f32(a, b); }
  static M not_less(V a, V b) { return vmvnq_u32(vcltq_f32(a, b)); }
  static M unordered(V a, V b) { return vmvnq_u32(vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b))); }
  static M either(M a, M b) { return vorrq_u32(a, b); }
  static M none() { return vdupq_n_u32(0); }
  static bool any(M m) { return vmaxvq_u32(m) != 0; }
  static bool all(M m) { return vminvq_u32(m) != 0; }
  static V keep(M m, V v) { return vreinterpretq_f32_u32(vandq_u32(m, vreinterpretq_u32_f32(v))); }
  static V select(M m, V a, V b) { return vbslq_f32(m, a, b); }

  static V shift_exponent(V p, V t) {
    return vreinterpretq_f32_u32(
        vaddq_u32(vreinterpretq_u32_f32(p), vshlq_n_u32(vreinterpretq_u32_f32(t), 23)));
  }

  static Value reduce_sum(V v) { return vaddvq_f32(v); }
  static Value reduce_max(V v) { return vmaxvq_f32(v); }
  // Distance, per stage, from the elements of low to the elements of high.
  static constexpr int fold_step[] = {1, 2};
  template <int stage>
  static void fold_inputs(V a, V b, V& low, V& high) {
    low = vuzp1q_f32(a, b);
    high = vuzp2q_f32(a, b);
  }
  template <int distance>
  static V swap(V v) {
    if constexpr (distance == 1) return vrev64q_f32(v);
    if constexpr (distance == 2) return vextq_f32(v, v, 2);
  }

  static V load_widened(const half* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(p))));
  }
  static V set_widened(half x) { return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(x.bits))); }
  static V load_widened(const bfloat16* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(p)), 16));
  }
  static V load_widened(const Int8* p) {
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(load_codes(p)))));
  }
  // Moves the bits to a half, whose bias of the exponent is larger by 8. `carried` has bit 7, the top bit of half's
  // exponent, changed for NaN only.
  static V load_over_256(const Fp8E4M3* p) {
    const int16x4_t code = vget_low_s16(vmovl_s8(load_codes(p)));
    const int16x4_t carried = vadd_s16(code, vdup_n_s16(1));
    const int16x4_t bits = veor_s16(code, vand_s16(carried, vdup_n_s16(0x80)));
    return vcvt_f32_f16(vreinterpret_f16_s16(vshl_n_s16(bits, 7)));
  }
  static V load_widened(const Fp8E4M3* p) { return mul(load_over_256(p), set(256)); }
  static V load_widened(const Fp8E5M2* p) {
    const int16x8_t bits = vshll_n_s8(load_codes(p), 8);
    return vcvt_f32_f16(vreinterpret_f16_s16(vget_low_s16(bits)));
  }
  /// Loads 4 numbers of 8 bits.
  static int8x8_t load_codes(const void* p) {
    std::uint32_t codes;
    __builtin_memcpy(&codes, p, sizeof(codes));
    return vreinterpret_s8_u32(vdup_n_u32(codes));
  }
  static void store_narrowed(half* p, V v) {
    vst1_u16(reinterpret_cast<std::uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32(v)));
  }
  static void store_narrowed(bfloat16* p, V v) {
    const uint32x4_t u = vreinterpretq_u32_f32(v);
    const uint32x4_t top = vshrq_n_u32(u, 16);
    const uint32x4_t odd = vandq_u32(top, vdupq_n_u32(1));
    const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7FFF)), odd), 16);
    const uint32x4_t quiet = vorrq_u32(top, vdupq_n_u32(0x40));
    vst1_u16(reinterpret_cast<std::uint16_t*>(p), vmovn_u32(vbslq_u32(unordered(v, v), quiet, rounded)));
  }
};

struct F64 {
  using Value = double;
  using V = float64x2_t;
  using M = uint64x2_t;
  static constexpr index_t width = 2;
  static constexpr int chains = 4;                       // exponentials in step, within one row
  static constexpr int group_chains = 2;                 // exponentials in step, across short rows
  static constexpr int tile_rows = 8, tile_vectors = 3;  // sums in registers, in attention's products

  static V set(Value v) { return vdupq_n_f64(v); }
  static V load(const Value* p) { return vld1q_f64(p); }
  static V load_part(const Value* p, index_t count, Value fill) {
    return count > 0 ? vsetq_lane_f64(*p, set(fill), 0) : set(fill);
  }
  static void store(Value* p, V v) { vst1q_f64(p, v); }
  static void store_part(Value* p, V v, index_t count) {
    if (count > 0) vst1q_lane_f64(p, v, 0);
  }

  static V add(V a, V b) { return a + b; }
  static V sub(V a, V b) { return a - b; }
  static V mul(V a, V b) { return a * b; }
  static V div(V a, V b) { return a / b; }
  static V fma(V a, V b, V c) { return vfmaq_f64(c, a, b); }
  static V fused(V a, V b, V c) { return vfmaq_f64(c, a, b); }
  static V max(V a, V b) { return vmaxq_f64(a, b); }
  static V min(V a, V b) { return vminq_f64(a, b); }
  static V abs(V a) { return vabsq_f64(a); }
  static V sqrt(V a) { return vsqrtq_f64(a); }

  static M less(V a, V b) { return vcltq_f64(a, b); }
  static M not_less(V a, V b) { return invert(vcltq_f64(a, b)); }
  static M unordered(V a, V b) { return invert(vandq_u64(vceqq_f64(a, a), vceqq_f64(b, b))); }
  static M invert(M m) { return veorq_u64(m, vdupq_n_u64(~std::uint64_t{0})); }
  static M either(M a, M b) { return vorrq_u64(a, b); }
  static M none() { return vdupq_n_u64(0); }
  static bool any(M m) { return (vgetq_lane_u64(m, 0) | vgetq_lane_u64(m, 1)) != 0; }
  static bool all(M m) { return (vgetq_lane_u64(m, 0) & vgetq_lane_u64(m, 1)) != 0; }
  static V keep(M m, V v) { return vreinterpretq_f64_u64(vandq_u64(m, vreinterpretq_u64_f64(v))); }
  static V select(M m, V a, V b) { return vbslq_f64(m, a, b); }

  static V shift_exponent(V p, V t) {
    return vreinterpretq_f64_u64(
        vaddq_u64(vreinterpretq_u64_f64(p), vshlq_n_u64(vreinterpretq_u64_f64(t), 52)));
  }

  static Value reduce_sum(V v) { return vaddvq_f64(v); }
  static Value reduce_max(V v) { return vmaxvq_f64(v); }
  // Distance, per stage, from the elements of low to the elements of high.
  static constexpr int fold_step[] = {1};
  template <int stage>
  static void fold_inputs(V a, V b, V& low, V& high) {
    low = vuzp1q_f64(a, b);
    high = vuzp2q_f64(a, b);
  }
  template <int distance>
  static V swap(V v) {
    if constexpr (distance == 1) return vextq_f64(v, v, 1);
  }
};
