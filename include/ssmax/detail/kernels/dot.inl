// Implements the dot product Σ a·b. Included once per target.

/// Returns a vector whose lanes add up to Σ a·b.
template <class S>
SSMAX_INLINE typename S::V dot_lanes(const typename S::Value* a, const typename S::Value* b, index_t n) {
  using T = typename S::Value;
  constexpr index_t w = S::width;
  typename S::V s0 = S::set(T{0}), s1 = s0, s2 = s0, s3 = s0;
  index_t i = 0;
  for (; i + 4 * w <= n; i += 4 * w) {
    s0 = S::fma(S::load(a + i), S::load(b + i), s0);
    s1 = S::fma(S::load(a + i + w), S::load(b + i + w), s1);
    s2 = S::fma(S::load(a + i + 2 * w), S::load(b + i + 2 * w), s2);
    s3 = S::fma(S::load(a + i + 3 * w), S::load(b + i + 3 * w), s3);
  }
  for (; i + w <= n; i += w) s0 = S::fma(S::load(a + i), S::load(b + i), s0);
  if (i < n) s1 = S::fma(S::load_part(a + i, n - i, T{0}), S::load_part(b + i, n - i, T{0}), s1);
  return S::add(S::add(s0, s1), S::add(s2, s3));
}

template <class S>
typename S::Value dot(const typename S::Value* a, const typename S::Value* b, index_t n) {
  return S::reduce_sum(dot_lanes<S>(a, b, n));
}

template <class T>
struct KernelTable<DotKernels<T>> {
  static constexpr DotKernels<T> value{.dot = dot<Simd<T>>};
};
