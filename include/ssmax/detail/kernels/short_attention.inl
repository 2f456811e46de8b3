// Multiplies weights (one query per lane) by values (channels in lanes) and writes rows of results. Weights
// are broadcast from memory, so V and the result are not transposed. Included once per target.

/// Computes `rows` queries against `vectors` vectors of channels. The sums add key by key, as in
/// tile_accumulate, and are bit-identical to its sums.
template <class S, int rows, int vectors>
SSMAX_INLINE void weigh_values_tile(const typename S::Value* s, index_t queries,
                                    const KeyRows<typename S::Value>& values, index_t first,
                                    const typename S::Value* factor, typename S::Value* const* out) {
  using V = typename S::V;
  V sum[rows][vectors];
  clear_sums<S>(sum);
  const typename S::Value* v = values.first + first;
  for (index_t key = 0; key < values.count; ++key, s += group_width<S>, v += values.stride) {
    V x[vectors];
    SSMAX_UNROLL
    for (int i = 0; i < vectors; ++i) x[i] = S::load(v + i * S::width);
    SSMAX_UNROLL
    for (int r = 0; r < rows; ++r) {
      const V weight = S::set(s[r]);
      SSMAX_UNROLL
      for (int i = 0; i < vectors; ++i) sum[r][i] = S::fma(weight, x[i], sum[r][i]);
    }
  }
  SSMAX_UNROLL
  for (int r = 0; r < rows; ++r) {
    if (r >= queries) break;
    const V f = S::set(factor[r]);
    SSMAX_UNROLL
    for (int i = 0; i + 1 < vectors; ++i) S::store(out[r] + first + i * S::width, S::mul(sum[r][i], f));
    // Only the last vector may end past the channels.
    const index_t c = first + (vectors - 1) * S::width;
    store_up_to<S>(out[r] + c, S::mul(sum[r][vectors - 1], f), values.width - c);
  }
}

template <class S>
void weigh_values(const typename S::Value* s, index_t queries, const KeyRows<typename S::Value>& values,
                  const typename S::Value* factor, typename S::Value* const* out) {
  constexpr index_t w = S::width;
  constexpr int rows = std::min<int>(S::tile_rows, S::width);
  const KeyRows<typename S::Value> v = values;  // a copy that no store can change
  const index_t channels = v.width;
  for (index_t r = 0; r < queries; r += rows) {
    const index_t left = queries - r;
    index_t c = 0;
    // Divides four vectors into two and two, as in tile_add_product.
    for (; c + 2 * w < channels && (channels - c <= 3 * w || channels - c > 4 * w); c += 3 * w) {
      weigh_values_tile<S, rows, 3>(s + r, left, v, c, factor + r, out + r);
    }
    for (; c + w < channels; c += 2 * w) {
      weigh_values_tile<S, rows, 2>(s + r, left, v, c, factor + r, out + r);
    }
    if (c < channels) {
      weigh_values_tile<S, rows, 1>(s + r, left, v, c, factor + r, out + r);
    }
  }
}

template <class T>
struct KernelTable<ShortAttentionKernels<T>> {
  using S = Simd<T>;
  static constexpr ShortAttentionKernels<T> value{.weigh_values = weigh_values<S>};
};
