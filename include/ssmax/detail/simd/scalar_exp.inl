// Computes the exponential of one lane, in place of the vectors' Exp of kernels/exp.inl. Included once, for
// the scalar target.
//
//     2^(x·scale - shift) = 2^n · 2^(j/64) · 2^(r/64)
//     with 64·n + j = round(64·x·scale) - 64·shift, |r| <= 1/2
//
// One lane can read 2^(j/64) from a table. So a polynomial of degree 2 (float) or 5 (double) is enough, where
// a vector needs degree 6 or 11.
//
// r must hold x·scale without the rounding of that product, and a fused multiply-add may be missing. So float
// computes r in double. Double splits both factors into two parts whose products are exact. The code does not
// rely on the rounding of a product: a compiler may contract a product and a sum.
//
// The error is 0.6 ulp in float and 1.1 ulp in double. In double it includes the rounding of the table's
// entries.

inline constexpr double exp_roots[64] = {
    // 2^(j/64)
    0x1.0000000000000p0, 0x1.02c9a3e778061p0, 0x1.059b0d3158574p0, 0x1.0874518759bc8p0, 0x1.0b5586cf9890fp0,
    0x1.0e3ec32d3d1a2p0, 0x1.11301d0125b51p0, 0x1.1429aaea92de0p0, 0x1.172b83c7d517bp0, 0x1.1a35beb6fcb75p0,
    0x1.1d4873168b9aap0, 0x1.2063b88628cd6p0, 0x1.2387a6e756238p0, 0x1.26b4565e27cddp0, 0x1.29e9df51fdee1p0,
    0x1.2d285a6e4030bp0, 0x1.306fe0a31b715p0, 0x1.33c08b26416ffp0, 0x1.371a7373aa9cbp0, 0x1.3a7db34e59ff7p0,
    0x1.3dea64c123422p0, 0x1.4160a21f72e2ap0, 0x1.44e086061892dp0, 0x1.486a2b5c13cd0p0, 0x1.4bfdad5362a27p0,
    0x1.4f9b2769d2ca7p0, 0x1.5342b569d4f82p0, 0x1.56f4736b527dap0, 0x1.5ab07dd485429p0, 0x1.5e76f15ad2148p0,
    0x1.6247eb03a5585p0, 0x1.6623882552225p0, 0x1.6a09e667f3bcdp0, 0x1.6dfb23c651a2fp0, 0x1.71f75e8ec5f74p0,
    0x1.75feb564267c9p0, 0x1.7a11473eb0187p0, 0x1.7e2f336cf4e62p0, 0x1.82589994cce13p0, 0x1.868d99b4492edp0,
    0x1.8ace5422aa0dbp0, 0x1.8f1ae99157736p0, 0x1.93737b0cdc5e5p0, 0x1.97d829fde4e50p0, 0x1.9c49182a3f090p0,
    0x1.a0c667b5de565p0, 0x1.a5503b23e255dp0, 0x1.a9e6b5579fdbfp0, 0x1.ae89f995ad3adp0, 0x1.b33a2b84f15fbp0,
    0x1.b7f76f2fb5e47p0, 0x1.bcc1e904bc1d2p0, 0x1.c199bdd85529cp0, 0x1.c67f12e57d14bp0, 0x1.cb720dcef9069p0,
    0x1.d072d4a07897cp0, 0x1.d5818dcfba487p0, 0x1.da9e603db3285p0, 0x1.dfc97337b9b5fp0, 0x1.e502ee78b3ff6p0,
    0x1.ea4afa2a490dap0, 0x1.efa1bee615a27p0, 0x1.f50765b6e4540p0, 0x1.fa7c1819e90d8p0,
};

template <class S>
requires(S::width == 1) struct Exp<S> {
  using T = typename S::Value;
  static constexpr bool is_float = sizeof(T) == sizeof(float);
  static constexpr double magic = ExpConstants<double>::magic;
  // Below this, the result may be subnormal.
  static constexpr double smallest = magic - 64 * (is_float ? 125.5 : 1021.5);

  T high, bias;                     // as in the vectors' Exp
  double scale, upper, lower, low;  // 64·scale in double: scale + low, with scale = upper + lower

  SSMAX_INLINE Exp(Scale<T> c, T shift)
      : high(c.high),
        bias(ExpConstants<T>::magic - shift),
        scale(64.0 * (is_float ? static_cast<double>(c.high) + static_cast<double>(c.low) : c.high)),
        upper(upper_bits(scale)),
        lower(scale - upper),
        low(64.0 * static_cast<double>(c.low)) {}

  SSMAX_INLINE T operator()(T x) const { return power(x, bias); }

  template <int count>
  SSMAX_INLINE void apply(T* x, const T* biases) const {
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) x[i] = power(x[i], biases[i]);
  }

  /// Returns x without the last 27 of its 53 bits.
  SSMAX_INLINE static double upper_bits(double x) {
    return __builtin_bit_cast(double, __builtin_bit_cast(std::uint64_t, x) & ~((std::uint64_t{1} << 27) - 1));
  }

  SSMAX_INLINE T power(T narrow, T bias_of_x) const {
    const double x = static_cast<double>(narrow);
    const double wide_bias = magic - 64.0 * static_cast<double>(ExpConstants<T>::magic - bias_of_x);
    const double product = x * scale;
    const double t = product + wide_bias;  // 64·n + j in its low bits
    const double rounded = t - wide_bias;
    double p;  // 2^(r/64) - 1
    if constexpr (is_float) {
      const double r = product - rounded;
      p = r * (0x1.62e48530be240p-7 + r * 0x1.ebfbdff82c58fp-15);
    } else {
      const double x_upper = upper_bits(x), x_lower = x - x_upper;
      const double r =
          (x_upper * upper - rounded) + (x_upper * lower + x_lower * upper) + (x_lower * lower + x * low);
      p = 0x1.3b2ad317dd7eep-31 + r * 0x1.5d87fe78a6731p-40;
      p = 0x1.ebfbdff82a2c5p-15 + r * (0x1.c6b08d704a0c0p-23 + r * p);
      p = r * (0x1.62e42fefa39efp-7 + r * p);
    }
    const std::uint64_t k = __builtin_bit_cast(std::uint64_t, t);
    const double root =  // 2^(n + j/64)
        __builtin_bit_cast(double, __builtin_bit_cast(std::uint64_t, exp_roots[k % 64]) + ((k / 64) << 52));
    // Uses a mask instead of a branch, which rows with scattered -inf mispredict: 2.3 instead of 6.1 ns per
    // element.
    const std::uint64_t kept = std::uint64_t{0} - static_cast<std::uint64_t>(!(t < smallest));
    return static_cast<T>(
        __builtin_bit_cast(double, __builtin_bit_cast(std::uint64_t, root + root * p) & kept));
  }
};
