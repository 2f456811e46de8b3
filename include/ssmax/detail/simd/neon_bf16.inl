// FEAT_BF16: 4 pairs of bfloat16, a pair in the place of a float.
// Included once, inside its target's namespace and region (dispatch/for_each_extension.inl).
#pragma once

struct Pairs {
  using V = uint32x4_t;

  static V load(const bfloat16* p) { return vreinterpretq_u32_u16(vld1q_u16(&p->bits)); }
  /// The first `count` numbers, fewer than 8. Missing ones are 0.
  static V load_part(const bfloat16* p, index_t count) {
    bfloat16 part[8] = {};
    for (index_t i = 0; i < count; ++i) part[i] = p[i];
    return load(part);
  }
  static void store(bfloat16* p, V v) { vst1q_u16(&p->bits, vreinterpretq_u16_u32(v)); }
  /// The pair at p in every place.
  static V set(const bfloat16* p) {
    std::uint32_t pair;
    __builtin_memcpy(&pair, p, sizeof(pair));
    return vdupq_n_u32(pair);
  }
  /// Hidden from GCC 12, which would make of bfloat16's 1 that of half precision.
  static V ones() {
    V v = vdupq_n_u32(0x3F803F80);
    __asm__("" : "+w"(v));
    return v;
  }
  /// sum + (a.low·b.low + a.high·b.high), rounded to odd, subnormal numbers as 0.
  static float32x4_t dot(V a, V b, float32x4_t sum) {
    return vbfdotq_f32(sum, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
  }
  /// (low, high) of 2^x for vectors x of about 0 at most, -inf too: to nearest. 2^x is known within 1.1e-4 of
  /// itself, where rounding costs up to 2^-8 = 3.9e-3, most just above a power of two. (A quadratic's 2e-3 would
  /// add to that.)
  template <int pairs>
  SSMAX_INLINE static void exp2(const float32x4_t* x, V* out) {
    using Constants = ExpConstants<float>;
    const float32x4_t magic = F32::set(Constants::magic);
    float32x4_t t[2 * pairs], p[2 * pairs];
    SSMAX_UNROLL
    for (int i = 0; i < 2 * pairs; ++i) t[i] = F32::add(x[i], magic);
    SSMAX_UNROLL
    for (int i = 0; i < 2 * pairs; ++i) {
      const float32x4_t f = F32::sub(x[i], F32::sub(t[i], magic));
      p[i] = F32::fma(F32::set(0x1.c2a218p-5f), f, F32::set(0x1.f00c52p-3f));
      p[i] = F32::fma(p[i], f, F32::set(0x1.62f5fap-1f));
      p[i] = F32::fma(p[i], f, F32::set(1));
      p[i] = F32::keep(F32::not_less(t[i], F32::set(Constants::smallest)), F32::shift_exponent(p[i], t[i]));
    }
    SSMAX_UNROLL
    for (int i = 0; i < pairs; ++i) out[i] = round(p[2 * i], p[2 * i + 1]);
  }
  /// 2^x of vectors x, -inf too, as for float.
  template <int count>
  SSMAX_INLINE static void exp2_float(float32x4_t* x) {
    Exp2<F32>(F32::set(0)).template apply<count>(x);
  }
  /// Two vectors rounded to nearest, each to a row of 4 numbers. Returns their pairs (low, high).
  static V round_rows(float32x4_t low, float32x4_t high, bfloat16* low_row, bfloat16* high_row) {
    const V pairs = round(plain_nan(low), plain_nan(high));
    split(pairs, low_row, high_row);
    return pairs;
  }
  /// Lanes that hold another number than 0, or NaN.
  static uint32x4_t not_zero(float32x4_t v) { return vmvnq_u32(vceqzq_f32(v)); }
  /// (low[i], high[i]) for 4 numbers of two rows.
  static V interleave(const bfloat16* low, const bfloat16* high) {
    const uint16x4x2_t zipped = vzip_u16(vld1_u16(&low->bits), vld1_u16(&high->bits));
    return vreinterpretq_u32_u16(vcombine_u16(zipped.val[0], zipped.val[1]));
  }
  /// Numbers in even places of two rows, in pairs, and those in odd ones.
  static V even(V low, V high) {
    return vreinterpretq_u32_u16(vtrn1q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high)));
  }
  static V odd(V low, V high) {
    return vreinterpretq_u32_u16(vtrn2q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high)));
  }
  static V zero() { return vdupq_n_u32(0); }
  /// The larger magnitudes, NaN above all. a has no signs.
  static V max_magnitude(V a, V b) {
    const uint32x4_t magnitude = vandq_u32(b, vdupq_n_u32(0x7FFF7FFF));
    return vreinterpretq_u32_u16(vmaxq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(magnitude)));
  }
  /// Whether some number is NaN or infinite.
  static bool any_not_finite(V v) {
    const uint16x8_t infinite = vdupq_n_u16(0x7F80);
    return vmaxvq_u16(vceqq_u16(vandq_u16(vreinterpretq_u16_u32(v), infinite), infinite)) != 0;
  }

 private:
  /// (low, high) of floats, NaN with a clear bit below its first: to nearest, ties away from 0.
  static V round(float32x4_t low, float32x4_t high) {
    const uint32x4_t half = vdupq_n_u32(0x8000);
    const uint32x4_t a = vaddq_u32(vreinterpretq_u32_f32(low), half);
    const uint32x4_t b = vaddq_u32(vreinterpretq_u32_f32(high), half);
    return vsriq_n_u32(b, a, 16);  // a's upper half under b's
  }
  /// The low halves and the high ones, apart.
  static void split(V v, bfloat16* low, bfloat16* high) {
    vst1_u16(&low->bits, vmovn_u32(v));
    vst1_u16(&high->bits, vshrn_n_u32(v, 16));
  }
  /// NaN with one payload: rounded by its bits, another could become 0.
  static float32x4_t plain_nan(float32x4_t x) {
    return F32::select(F32::unordered(x, x), F32::set(std::numeric_limits<float>::quiet_NaN()), x);
  }
};
