// Computes 2^(x·scale - shift) for a vector of x. Included once per target. S is the target's F32 or F64.
//
//     t = x·high + (magic - shift)               n = round(x·scale) - shift, in the low bits of t
//     r = x·high + (magic - shift - t) + x·low   in [-1/2, 1/2]: the parts before r are exact
//     2^r by a polynomial, then n is added to the exponent.
//
// | decision | reason |
// |---|---|
// | integer shift, not the maximum | x·scale - max·scale rounds: a difference of 10 costs 4e-7 of relative error |
// | degree 6 in float | degree 5 has a relative error of 7.5e-8, above one ulp just below 1 |
// | x·low is added | without it, e^-20 has an error of 4.8 ulp |
//
// The coefficients are minimax for the relative error (1.9e-9 in float, 3.1e-18 in double), by a Remez
// exchange in 50 digits. In float, a search over roundings of the coefficients then minimized the error of
// this arithmetic.
//
// Rejected alternative: a leading coefficient of 2^-13. It saves one of nine FMAs, and the two FMA ports
// bound the time of a row (0.253 instead of 0.268 ns per element on Zen 4). But its error is 1.14 ulp, above
// the bound of 1.

template <class T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  static constexpr float magic = 0x1.8p23f;
  static constexpr float smallest = magic - 125.0f;  // one less would make 2^n·p subnormal
  static constexpr int degree = 6;
  static constexpr float polynomial[] = {1.0f,           0x1.62e432p-1f,  0x1.ebfbeep-3f, 0x1.c6ae8ap-5f,
                                         0x1.3b283ap-7f, 0x1.5f38a0p-10f, 0x1.41d520p-13f};
};

template <>
struct ExpConstants<double> {
  static constexpr double magic = 0x1.8p52;
  static constexpr double smallest = magic - 1021.0;
  static constexpr int degree = 11;
  static constexpr double polynomial[] = {1.0,
                                          0x1.62e42fefa39efp-1,
                                          0x1.ebfbdff82c5adp-3,
                                          0x1.c6b08d7049fd1p-5,
                                          0x1.3b2ab6fb9f412p-7,
                                          0x1.5d87fe78cf23ap-10,
                                          0x1.43091310bf92dp-13,
                                          0x1.ffcbfba7c612fp-17,
                                          0x1.62bfc3c16e794p-20,
                                          0x1.b5267871de546p-24,
                                          0x1.e620fc05a9e45p-28,
                                          0x1.e7aa329d24a1fp-32};
};

template <class S>
struct Exp {
  using T = typename S::Value;
  using V = typename S::V;
  using Constants = ExpConstants<T>;

  V high, low, bias;

  SSMAX_INLINE Exp(Scale<T> scale, T shift)
      : high(S::set(scale.high)), low(S::set(scale.low)), bias(S::set(Constants::magic - shift)) {}

  SSMAX_INLINE V operator()(V x) const {
    apply<1>(&x, &bias);
    return x;
  }

  /// Computes `count` vectors in step, each with its own bias (magic - shift). One chain takes about 45
  /// cycles. A scheduler of 64 entries holds four chains that follow one another, and more chains if their
  /// steps alternate. A whole softmax then takes 0.28 instead of 0.32 ns per element.
  template <int count>
  SSMAX_INLINE void apply(V* x, const V* biases) const {
    V t[count], p[count];
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) t[i] = S::fused(x[i], high, biases[i]);
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) p[i] = S::fused(x[i], high, S::sub(biases[i], t[i]));
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) x[i] = S::fma(x[i], low, p[i]);
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) p[i] = S::set(Constants::polynomial[Constants::degree]);
    SSMAX_UNROLL
    for (int k = Constants::degree - 1; k > 0; --k) {
      SSMAX_UNROLL
      for (int i = 0; i < count; ++i) p[i] = S::fma(p[i], x[i], S::set(Constants::polynomial[k]));
    }
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) p[i] = S::fused(p[i], x[i], S::set(Constants::polynomial[0]));
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) {
      x[i] = S::keep(S::not_less(t[i], S::set(Constants::smallest)), S::shift_exponent(p[i], t[i]));
    }
  }
};

/// The exponential 2^(x - shift) for x in units of log2, with a shift per lane. Three additions replace two
/// FMAs, because additions run on other ports.
template <class S>
struct Exp2 {
  using T = typename S::Value;
  using V = typename S::V;
  using Constants = ExpConstants<T>;

  V bias;

  SSMAX_INLINE explicit Exp2(V shift) : bias(S::sub(S::set(Constants::magic), shift)) {}

  template <int count>
  SSMAX_INLINE void apply(V* x) const {
    V t[count], p[count];
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) t[i] = S::add(x[i], bias);
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) x[i] = S::sub(x[i], S::sub(t[i], bias));
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) p[i] = S::set(Constants::polynomial[Constants::degree]);
    SSMAX_UNROLL
    for (int k = Constants::degree - 1; k >= 0; --k) {
      SSMAX_UNROLL
      for (int i = 0; i < count; ++i) p[i] = S::fma(p[i], x[i], S::set(Constants::polynomial[k]));
    }
    SSMAX_UNROLL
    for (int i = 0; i < count; ++i) {
      x[i] = S::keep(S::not_less(t[i], S::set(Constants::smallest)), S::shift_exponent(p[i], t[i]));
    }
  }
};
