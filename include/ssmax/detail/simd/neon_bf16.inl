// Wraps FEAT_BF16: 4 pairs of bfloat16, with a pair in the place of a float. Included once, inside its
// target's namespace and region (dispatch/for_each_extension.inl).
#pragma once

struct Pairs {
  using V = uint32x4_t;

  static V load(const bfloat16* p) { return vreinterpretq_u32_u16(vld1q_u16(&p->bits)); }
  /// Loads the first `count` numbers, fewer than 8. The other numbers are 0.
  static V load_part(const bfloat16* p, index_t count) {
    bfloat16 part[8] = {};
    for (index_t i = 0; i < count; ++i) part[i] = p[i];
    return load(part);
  }
  static void store(bfloat16* p, V v) { vst1q_u16(&p->bits, vreinterpretq_u16_u32(v)); }
  /// Returns the pair at p in every place.
  static V set(const bfloat16* p) {
    std::uint32_t pair;
    __builtin_memcpy(&pair, p, sizeof(pair));
    return vdupq_n_u32(pair);
  }
  /// Returns pairs of 1. The assembly makes the constant opaque to GCC 12, which otherwise replaces
  /// bfloat16's 1 by half precision's.
  static V ones() {
    V v = vdupq_n_u32(0x3F803F80);
    __asm__("" : "+w"(v));
    return v;
  }
  /// Returns the first, or the second, number of each pair.
  static float32x4_t low(V v) { return vreinterpretq_f32_u32(vshlq_n_u32(v, 16)); }
  static float32x4_t high(V v) { return vreinterpretq_f32_u32(vandq_u32(v, vdupq_n_u32(0xFFFF0000))); }
  /// Returns sum + (a.low·b.low + a.high·b.high), rounded to odd. Subnormal numbers count as 0.
  static float32x4_t dot(V a, V b, float32x4_t sum) {
    return vbfdotq_f32(sum, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
  }
  /// Writes the pairs (low, high) of 2^x, rounded to nearest. x is at most about 0 and may be -inf. Before
  /// rounding, the relative error of 2^x is at most 1.1e-4. Rounding adds up to 2^-8 = 3.9e-3, most just
  /// above a power of two. A quadratic polynomial is not used, because its error of 2e-3 would add to the
  /// error of rounding.
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
  /// Replaces x by 2^x, with the exponential of the float kernels. x may be -inf.
  template <int count>
  SSMAX_INLINE static void exp2_float(float32x4_t* x) {
    Exp2<F32>(F32::set(0)).template apply<count>(x);
  }
  /// Rounds two vectors to nearest and stores each to a row of 4 numbers. Returns their pairs (low, high).
  static V round_rows(float32x4_t low, float32x4_t high, bfloat16* low_row, bfloat16* high_row) {
    const V pairs = round(plain_nan(low), plain_nan(high));
    split(pairs, low_row, high_row);
    return pairs;
  }
  /// The power of two that `dequantize` expects in the factor.
  template <class X>
  static constexpr float dequantize_unit = 1;
  /// Multiplies 8 numbers by a factor and, with channels, by the factors of the channels. Rounds the products to
  /// nearest even and stores them.
  template <bool has_channels, class X>
  static void dequantize(const X* p, float32x4_t factor, [[maybe_unused]] const float* channels,
                         bfloat16* out) {
    for (int i = 0; i < 8; i += 4) {
      float32x4_t product = F32::mul(F32::load_widened(p + i), factor);
      if constexpr (has_channels) product = F32::mul(product, F32::load(channels + i));
      F32::store_narrowed(out + i, product);
    }
  }
  /// Returns the lanes that hold NaN or a number other than 0.
  static uint32x4_t not_zero(float32x4_t v) { return vmvnq_u32(vceqzq_f32(v)); }
  /// Returns (low[i], high[i]) for 4 numbers of two rows.
  static V interleave(const bfloat16* low, const bfloat16* high) {
    const uint16x4x2_t zipped = vzip_u16(vld1_u16(&low->bits), vld1_u16(&high->bits));
    return vreinterpretq_u32_u16(vcombine_u16(zipped.val[0], zipped.val[1]));
  }
  /// Returns (low[i], high[i]) for the first or the last 4 of 8 numbers of two rows.
  static V interleave_low(V low, V high) {
    return vreinterpretq_u32_u16(vzip1q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high)));
  }
  static V interleave_high(V low, V high) {
    return vreinterpretq_u32_u16(vzip2q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high)));
  }
  static float32x4_t as_floats(V v) { return vreinterpretq_f32_u32(v); }
  static V as_pairs(float32x4_t v) { return vreinterpretq_u32_f32(v); }
  static V zero() { return vdupq_n_u32(0); }
  /// Returns the larger magnitudes. NaN is the largest magnitude. The signs of a must be 0.
  static V max_magnitude(V a, V b) {
    const uint32x4_t magnitude = vandq_u32(b, vdupq_n_u32(0x7FFF7FFF));
    return vreinterpretq_u32_u16(vmaxq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(magnitude)));
  }
  /// Returns true if a number is NaN or infinite.
  static bool any_not_finite(V v) {
    const uint16x8_t infinite = vdupq_n_u16(0x7F80);
    return vmaxvq_u16(vceqq_u16(vandq_u16(vreinterpretq_u16_u32(v), infinite), infinite)) != 0;
  }

 private:
  /// Returns pairs (low, high) of floats, rounded to nearest, ties away from 0. A NaN needs a clear bit below
  /// its first mantissa bit, which stops the carry of the rounding.
  static V round(float32x4_t low, float32x4_t high) {
    const uint32x4_t half = vdupq_n_u32(0x8000);
    const uint32x4_t a = vaddq_u32(vreinterpretq_u32_f32(low), half);
    const uint32x4_t b = vaddq_u32(vreinterpretq_u32_f32(high), half);
    return vsriq_n_u32(b, a, 16);  // upper half of a below the upper half of b
  }
  /// Stores the low halves to one row and the high halves to another.
  static void split(V v, bfloat16* low, bfloat16* high) {
    vst1_u16(&low->bits, vmovn_u32(v));
    vst1_u16(&high->bits, vshrn_n_u32(v, 16));
  }
  /// Replaces every NaN by a NaN with one payload. The rounding of another payload could give 0.
  static float32x4_t plain_nan(float32x4_t x) {
    return F32::select(F32::unordered(x, x), F32::set(std::numeric_limits<float>::quiet_NaN()), x);
  }
};
