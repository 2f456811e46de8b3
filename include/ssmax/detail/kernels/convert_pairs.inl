// Implements the kernels that convert rows of 8 bits to operands of the bf16 path. Included once for each extension
// that has pair dots.

/// Converts one element at a time if a row has fewer than two vectors, or if its factor overflows in units of
/// P::dequantize.
template <class S, class P, bool has_channels, class X>
void dequantize_each_row(const KeyRows<X>& rows, const float* factors,
                         [[maybe_unused]] const float* channel_factors, StridedRows<bfloat16> to) {
  const auto channels_from = [&](index_t i) { return has_channels ? channel_factors + i : nullptr; };
  constexpr index_t step = 2 * S::width;
  constexpr float unit = P::template dequantize_unit<X>;
  const KeyRows<X> k = rows;  // a copy that no store can change
  const index_t n = k.width;
  for (index_t row = 0; row < k.count; ++row) {
    const X* const in = k[row];
    bfloat16* const out = to[row];
    if (k.prefetches()) {
      const std::uintptr_t later = k.later(row);
      for (index_t i = 0; i < n; i += 64)
        __builtin_prefetch(reinterpret_cast<const void*>(later + static_cast<std::uintptr_t>(i)));
    }
    index_t i = 0;
    const bool overflows = unit != 1 && std::abs(factors[row]) >= 0x1p127f / unit;
    if (n >= step && !overflows) {
      const typename S::V factor = S::set(factors[row] * unit);
      for (; i + step <= n; i += step)
        P::template dequantize<has_channels>(in + i, factor, channels_from(i), out + i);
      // The last elements end at n: some are computed twice.
      if (i < n) {
        i = n - step;
        P::template dequantize<has_channels>(in + i, factor, channels_from(i), out + i);
      }
    } else {
      for (; i < n; ++i) {
        const float number = static_cast<float>(in[i]) * factors[row];
        out[i] = bfloat16(has_channels ? number * channel_factors[i] : number);
      }
    }
  }
}

template <class S, class P, class X>
void dequantize_rows(const KeyRows<X>& in, const float* factors, const float* channel_factors,
                     StridedRows<bfloat16> out) {
  const auto dequantize =
      channel_factors == nullptr ? dequantize_each_row<S, P, false, X> : dequantize_each_row<S, P, true, X>;
  dequantize(in, factors, channel_factors, out);
}

template <class S, class P>
void dequantize_groups(const KeyRows<Q8_0>& rows, const float*, const float*, StridedRows<bfloat16> to) {
  constexpr index_t step = 2 * S::width;
  static_assert(Q8_0::group % step == 0);
  const KeyRows<Q8_0> k = rows;  // a copy that no store can change
  for (index_t row = 0; row < k.count; ++row) {
    const KeyRows<Q8_0> groups{k[row], 1, k.width / Q8_0::group, Q8_0::group, k.ahead};
    bfloat16* out = to[row];
    for (index_t g = 0; g < groups.count; ++g, out += Q8_0::group) {
      if (k.prefetches()) __builtin_prefetch(reinterpret_cast<const void*>(groups.later(g)));
      const Q8_0& group = *groups[g];
      const typename S::V factor = S::set_widened(group.scale);
      SSMAX_UNROLL
      for (index_t i = 0; i < Q8_0::group; i += step)
        P::template dequantize<false>(group.values + i, factor, nullptr, out + i);
    }
  }
}

template <class X>
struct KernelTable<DequantizeKernels<X>> {
  static constexpr DequantizeKernels<X> value{.dequantize = dequantize_rows<F32, Pairs, X>};
};

template <>
struct KernelTable<DequantizeKernels<Q8_0>> {
  static constexpr DequantizeKernels<Q8_0> value{.dequantize = dequantize_groups<F32, Pairs>};
};
