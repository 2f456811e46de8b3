// Implements the score functions that attention applies to whole vectors of logits. Included once per target.

/// Writes out = cap·tanh(u) with u = in / cap. -inf and NaN stay.
///
/// tanh u = e / (e + 2) with e = exp(2u) - 1 = (2^n - 1) + 2^n·(2^r - 1). The polynomial without its constant
/// term is 2^r - 1. So e, and the result for small logits, has an error of a few ulp.
template <class S>
void softcap(const typename S::Value* in, index_t n, typename S::Value cap, typename S::Value* out) {
  using T = typename S::Value;
  using V = typename S::V;
  using Constants = ExpConstants<T>;
  constexpr T furthest = sizeof(T) == sizeof(float) ? T{30} : T{60};  // tanh rounds to 1 from here on
  const V scale = S::set(static_cast<T>(2 * 1.4426950408889634 / static_cast<double>(cap)));
  const V magic = S::set(Constants::magic);
  for (index_t i = 0; i < n; i += S::width) {
    const V z = load_up_to<S>(in + i, n - i, 0);
    const V x = S::max(S::set(-furthest), S::min(S::set(furthest), S::mul(z, scale)));
    const V t = S::add(x, magic);
    const V r = S::sub(x, S::sub(t, magic));
    V p = S::set(Constants::polynomial[Constants::degree]);
    SSMAX_UNROLL
    for (int k = Constants::degree - 1; k > 0; --k) p = S::fma(p, r, S::set(Constants::polynomial[k]));
    const V power = S::shift_exponent(S::set(1), t);
    const V e = S::fma(S::mul(p, r), power, S::sub(power, S::set(1)));
    const V capped = S::mul(S::set(cap), S::div(e, S::add(e, S::set(2))));
    const auto keeps = S::either(S::unordered(z, z), S::less(z, S::set(std::numeric_limits<T>::lowest())));
    store_up_to<S>(out + i, S::select(keeps, z, capped), n - i);
  }
}

/// Computes slope *= 1 - (capped / cap)², the softcap's derivative at the logit whose result is `capped`.
template <class S>
void softcap_slope(const typename S::Value* capped, index_t n, typename S::Value cap,
                   typename S::Value* slope) {
  const typename S::V inverse = S::set(1 / cap), one = S::set(1);
  for (index_t i = 0; i < n; i += S::width) {
    const typename S::V t = S::mul(load_up_to<S>(capped + i, n - i, 0), inverse);
    const typename S::V factor = S::max(S::sub(one, S::mul(t, t)), S::set(0));
    store_up_to<S>(slope + i, S::mul(load_up_to<S>(slope + i, n - i, 0), factor), n - i);
  }
}

/// Computes, for one vector of queries, s[key][·] += slope · (first + key).
template <class S>
void tile_ramp(typename S::Value* s, index_t keys, const typename S::Value* slope,
               const typename S::Value* first) {
  const typename S::V m = S::load(slope), begin = S::load(first);
  for (index_t key = 0; key < keys; ++key) {
    typename S::Value* p = s + key * group_width<S>;
    const typename S::V distance = S::add(begin, S::set(static_cast<typename S::Value>(key)));
    S::store(p, S::fma(m, distance, S::load(p)));
  }
}

/// Computes, for one vector of queries, s[key][·] = a·(s[key][·] - a) + 1 with a = factors[key · step + ·],
/// and slope[key][·] *= a.
template <class S>
void tile_scale_by_distance(typename S::Value* s, typename S::Value* slope, index_t keys,
                            const typename S::Value* factors, index_t step) {
  const typename S::V one = S::set(1);
  for (index_t key = 0; key < keys; ++key) {
    const typename S::V a = S::load(factors + key * step);
    typename S::Value* p = s + key * group_width<S>;
    S::store(p, S::fma(a, S::sub(S::load(p), a), one));
    if (slope == nullptr) continue;
    p = slope + key * group_width<S>;
    S::store(p, S::mul(S::load(p), a));
  }
}

/// Computes, for one vector of queries, s[key][·] += bias[key][·]. A row of bias is one vector.
template <class S>
void tile_add(typename S::Value* s, index_t keys, const typename S::Value* bias) {
  for (index_t key = 0; key < keys; ++key) {
    typename S::Value* p = s + key * group_width<S>;
    S::store(p, S::add(S::load(p), S::load(bias + key * S::width)));
  }
}

/// Computes, for the logits of one query, s[key] += slope · distance[key].
template <class S>
void row_ramp(typename S::Value* s, index_t keys, typename S::Value slope,
              const typename S::Value* distance) {
  const typename S::V m = S::set(slope);
  for (index_t key = 0; key < keys; key += S::width) {
    const index_t left = keys - key;
    const typename S::V z = load_up_to<S>(s + key, left, 0);
    store_up_to<S>(s + key, S::fma(m, load_up_to<S>(distance + key, left, 0), z), left);
  }
}

/// Computes, for the logits of one query, s[key] = a·(s[key] - a) + 1 with a = factors[key].
template <class S>
void row_scale_by_distance(typename S::Value* s, index_t keys, const typename S::Value* factors) {
  const typename S::V one = S::set(1);
  for (index_t key = 0; key < keys; key += S::width) {
    const index_t left = keys - key;
    const typename S::V a = load_up_to<S>(factors + key, left, 0);
    store_up_to<S>(s + key, S::fma(a, S::sub(load_up_to<S>(s + key, left, 0), a), one), left);
  }
}

/// Computes, for the logits of one query, s[key] += bias[key].
template <class S>
void row_add(typename S::Value* s, index_t keys, const typename S::Value* bias) {
  for (index_t key = 0; key < keys; key += S::width) {
    const index_t left = keys - key;
    store_up_to<S>(s + key, S::add(load_up_to<S>(s + key, left, 0), load_up_to<S>(bias + key, left, 0)),
                   left);
  }
}

/// Computes, for one vector of queries, s[key][·] *= factor. -inf stays -inf.
template <class S>
void tile_multiply(typename S::Value* s, index_t keys, const typename S::Value* factor) {
  const typename S::V f = S::load(factor);
  for (index_t key = 0; key < keys; ++key) {
    typename S::Value* p = s + key * group_width<S>;
    const typename S::V x = S::load(p);
    S::store(p, S::select(unmasked<S>(x), S::mul(x, f), x));
  }
}

template <class T>
struct KernelTable<ScoreKernels<T>> {
  using S = Simd<T>;
  static constexpr ScoreKernels<T> value{
      .softcap = softcap<S>,
      .softcap_slope = softcap_slope<S>,
      .ramp = tile_ramp<S>,
      .scale_by_distance = tile_scale_by_distance<S>,
      .add = tile_add<S>,
      .ramp_row = row_ramp<S>,
      .scale_row_by_distance = row_scale_by_distance<S>,
      .add_row = row_add<S>,
      .multiply = tile_multiply<S>,
  };
};
