// Implements attention's tiles in backward by AMX. dK and dV use rows of weights or gradients as the unit's
// first operand and pairs of queries as its second. All other kernels come from prefill_backward_pairs.inl.

/// Computes 32 keys by 32 channels at a time, as 2 × 2 tiles of sums.
template <class S>
void matrix_add_product(const bfloat16* a, index_t a_stride, index_t lanes, index_t keys, const bfloat16* b,
                        index_t pitch, float* out) {
  tiles_see_memory();
  for (index_t key = 0; key < keys; key += 32) {
    TileOperands t{a + key * a_stride, a_stride, 16 * a_stride, 32, b, out + key * pitch};
    for (index_t c = 0; c < pitch; c += 32, t.b += 64, t.c += 32) tile_square<true>(t, lanes / 32, pitch);
  }
}

template <class T>
struct KernelTable<RoundedBackwardKernels<T, bfloat16>> {
  using S = Simd<T>;
  using P = Pairs;
  static constexpr RoundedBackwardKernels<T, bfloat16> value{
      .gradients = pair_gradients<S, P>,
      .round = pair_round<S, P>,
      .form = pair_form<S, P>,
      .add_product = matrix_add_product<S>,
      .pair_rows = pair_rows<S, P>,
  };
};
