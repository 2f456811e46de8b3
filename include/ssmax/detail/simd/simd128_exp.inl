// Computes the exponential without a fused multiply-add, in place of the vectors' Exp of kernels/exp.inl.
// Included once, for the simd128 target.
//
//     t = x·high + (magic - shift)
//     r = x·(high + low) - n
//     2^r = u + ((1 - u) + r/2 + r·q)  with u = 1 + r/2 and the polynomial 1 + r·(1/2 + q)
//
// The low bits of t hold n, as in kernels/exp.inl. But the product is rounded, so n may be the other
// neighbour of x·scale. r lies in [-1/2, 1/2] or slightly outside. It is rounded once in float and twice in
// double.
//
// Float computes r in double, where x·(high + low) has a relative error of 2^-53. Double splits both factors
// into two parts whose products are exact, as scalar_exp.inl does.
//
// Reason for u: 1 + r·p with p near 0.69 rounds r·p and p at up to a quarter of an ulp each. In float, its
// error is 1.14 ulp. q is 0.19, so its rounding counts a quarter, and (1 - u) + r/2 is exact. In float, the
// error is then 0.89 ulp.

/// The function x·(high + low) - n.
template <class S>
struct Remainder;

template <>
struct Remainder<F32> {
  v128_t scale;  // high + low, in double

  SSMAX_INLINE explicit Remainder(Scale<float> c)
      : scale(wasm_f64x2_splat(static_cast<double>(c.high) + static_cast<double>(c.low))) {}

  SSMAX_INLINE v128_t operator()(v128_t x, v128_t n) const {
    const v128_t low = half_of(x, n), high = half_of(F32::swap<2>(x), F32::swap<2>(n));
    return wasm_i32x4_shuffle(low, high, 0, 1, 4, 5);
  }
  /// Returns the results of the two lower lanes.
  SSMAX_INLINE v128_t half_of(v128_t x, v128_t n) const {
    const v128_t product = wasm_f64x2_mul(wasm_f64x2_promote_low_f32x4(x), scale);
    return wasm_f32x4_demote_f64x2_zero(wasm_f64x2_sub(product, wasm_f64x2_promote_low_f32x4(n)));
  }
};

template <>
struct Remainder<F64> {
  v128_t upper, lower, low;  // high = upper + lower

  SSMAX_INLINE explicit Remainder(Scale<double> c)
      : upper(upper_bits(F64::set(c.high))), lower(F64::sub(F64::set(c.high), upper)), low(F64::set(c.low)) {}

  /// Returns x without the last 27 of its 53 bits.
  SSMAX_INLINE static v128_t upper_bits(v128_t x) {
    return wasm_v128_and(x, wasm_i64x2_splat(-(std::int64_t{1} << 27)));
  }

  SSMAX_INLINE v128_t operator()(v128_t x, v128_t n) const {
    const v128_t x_upper = upper_bits(x), x_lower = F64::sub(x, x_upper);
    const v128_t middle = F64::add(F64::mul(x_upper, lower), F64::mul(x_lower, upper));
    const v128_t least = F64::add(F64::mul(x_lower, lower), F64::mul(x, low));
    return F64::add(F64::add(F64::sub(F64::mul(x_upper, upper), n), middle), least);
  }
};

template <class S>
requires(S::width > 1) struct Exp<S> {
  using T = typename S::Value;
  using V = typename S::V;
  using Constants = ExpConstants<T>;

  V high, bias;  // as in the vectors' Exp
  Remainder<S> remainder;

  SSMAX_INLINE Exp(Scale<T> scale, T shift)
      : high(S::set(scale.high)), bias(S::set(Constants::magic - shift)), remainder(scale) {}

  SSMAX_INLINE V operator()(V x) const {
    apply<1>(&x, &bias);
    return x;
  }

  template <int count>
  SSMAX_INLINE void apply(V* x, const V* biases) const {
    const V one = S::set(T{1});
    V t[count], p[count];
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) t[i] = S::add(S::mul(x[i], high), biases[i]);
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) x[i] = remainder(x[i], S::sub(t[i], biases[i]));
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) p[i] = S::set(Constants::polynomial[Constants::degree]);
    SSMAX_UNROLL
    for (int k = Constants::degree - 1; k > 0; --k) {
      const V coefficient = S::set(Constants::polynomial[k] - (k == 1 ? T(0.5) : T(0)));
      SSMAX_UNROLL
      for (int i = 0; i < count; ++i) p[i] = S::fma(p[i], x[i], coefficient);
    }
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) {
      const V r_half = S::mul(x[i], S::set(T(0.5)));
      const V u = S::add(one, r_half);
      p[i] = S::add(u, S::fma(x[i], p[i], S::add(S::sub(one, u), r_half)));
    }
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) {
      x[i] = S::keep(S::not_less(t[i], S::set(Constants::smallest)), S::shift_exponent(p[i], t[i]));
    }
  }
};
