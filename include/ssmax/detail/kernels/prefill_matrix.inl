// Implements attention's tiles by AMX: its products and its layout of V. All other kernels come from
// prefill_pairs.inl.
//
// Q and the weights, in the layouts of prefill_pairs.inl, are the unit's second operand. The first operand is
// 16 rows of K with 32 channels each, in storage order, or 16 channels of V with 32 keys each, which are
// transposed.

template <class S>
void matrix_acquire() {
  _tile_loadconfig(&tile_configuration);
}

template <class S>
void matrix_release() {
  _tile_release();
}

/// The number of channels from which on two vectors of logits are computed at once. So many channels exceed the
/// first-level cache, and loads bound the products. A latent call with 576 channels takes 7 % less time. At 256
/// channels or fewer, strips are faster.
inline constexpr index_t long_sums = 384;

template <class S, int vectors>
void matrix_logits(const bfloat16* k, index_t k_stride, index_t d, index_t keys, const bfloat16* q,
                   float* s) {
  constexpr index_t group = group_width<S>;
  tiles_see_memory();
  TileOperands rows{k, k_stride, 16 * k_stride, 32, q, s};
  if (vectors == 1 || d < long_sums) {
    tile_strips<false>({rows, vectors, 32 * k_stride, 32 * group}, keys / 32 * vectors, d / 32, group);
  } else {
    for (index_t key = 0; key < keys; key += 32) {
      tile_square<false>(rows, d / 32, group);
      if constexpr (vectors == 3) {
        TileOperands last = rows;
        last.b += 64;
        last.c += 32;
        tile_strips<false>({last, 1, 0, 0}, 1, d / 32, group);
      }
      rows.a += 32 * k_stride;
      rows.c += 32 * group;
    }
  }
  tiles_see_memory();
}

/// Reads V from panels [key/32][32 channels][32 keys].
template <class S, int vectors>
void matrix_accumulate(const ValuePanels<bfloat16>& v, const bfloat16* weights, index_t keys, float* o) {
  constexpr index_t group = group_width<S>;
  tiles_see_memory();
  const TileOperands first{v.first, 32, 16 * 32, 32 * 32, weights, o};
  tile_strips<true>({first, vectors, v.panel_stride, 32 * group}, v.panels * vectors, keys / 32, group);
  tiles_see_memory();
}

/// Computes weights and their products vector by vector, so that the unit never pauses for long. If it starts
/// after a pause of more than 0.4 µs, its products take about 0.3 µs longer. The weights of three vectors are such a
/// pause. With `counts`, also adds to the statistics.
template <class S, class P, int vectors, bool counts = false>
TileChange matrix_attend(float* s, index_t keys, const TileState<float>& state, bfloat16* weights,
                         const ValuePanels<bfloat16>& values, float* o) {
  typename S::V shifts[vectors], smallest[vectors];
  if (!pair_shifts<S, vectors, counts>(s, keys, state, shifts, smallest)) return TileChange::irregular;
  bool rises = false;
  for (int v = 0; v < vectors; ++v) {
    float* const sums = o + v * S::width;
    if (vector_weights<S, P, counts>(s, keys, state, v, shifts[v], weights,
                                     counts ? smallest + v : nullptr)) {
      rises = true;
      tile_rescale<S, 1>(sums, 32 * values.panels, state.factor + v * S::width);
    }
    matrix_accumulate<S, 1>(values, weights + 2 * v * S::width, keys, sums);
  }
  return rises ? TileChange::raised : TileChange::none;
}

/// Packs keys [first, first + keys) of the block of 32 keys at `to`. Both numbers are multiples of 8.
template <bool whole>
inline void matrix_pack_block(const bfloat16* v, index_t v_stride, index_t first, index_t keys,
                              index_t channels, bfloat16* to, index_t panel_stride) {
  for (index_t c = 0; c < (channels + 31) / 32 * 32; c += 8) {
    bfloat16* tile = to + c / 32 * panel_stride + c % 32 * 32;
    if (c + 8 <= channels) {
      transpose_words<whole>(v + c, v_stride, tile, first / 8, keys / 8);
    } else {
      bfloat16 rest[32][8] = {};
      for (index_t i = 0; i < keys; ++i) {
        for (index_t left = c; left < channels; ++left) rest[i][left - c] = v[i * v_stride + left];
      }
      transpose_words<whole>(rest[0], 8, tile, first / 8, keys / 8);
    }
  }
}

/// Packs rows of V into panels [key/32][32 channels][32 keys]. Blocks of 32 keys, and parts of 8 keys of a block, are
/// transposed by 8 channels at a time. All other keys are packed number by number.
inline void matrix_pack_values(const bfloat16* v, index_t v_stride, index_t first, index_t keys,
                               index_t channels, bfloat16* panels, index_t panel_stride) {
  const index_t padded = (channels + 31) / 32 * 32, last = first + keys;
  for (index_t key = first, count; key < last; key += count) {
    bfloat16* to = panels + key / 32 * 32 * 32;
    const bfloat16* row = v + (key - first) * v_stride;
    count = std::min(32 - key % 32, (last - key) / 8 * 8);
    if (count == 32) {
      matrix_pack_block<true>(row, v_stride, 0, 32, channels, to, panel_stride);
    } else if (key % 8 == 0 && count > 0) {
      matrix_pack_block<false>(row, v_stride, key % 32, count, channels, to, panel_stride);
    } else {
      for (index_t c = 0; c < padded; ++c) {
        to[c / 32 * panel_stride + c % 32 * 32 + key % 32] = c < channels ? row[c] : bfloat16{};
      }
      count = 1;
    }
  }
}

template <class T>
struct KernelTable<PrefillKernels<T, bfloat16>> {
  using S = Simd<T>;
  using P = Pairs;
  static constexpr PrefillKernels<T, bfloat16> value{
      .pass = 32,
      .width = S::width,
      .depth = 32,
      .alignment = 64,
      .acquire = matrix_acquire<S>,
      .release = matrix_release<S>,
      .transpose = transpose<S>,
      .logits = {matrix_logits<S, 1>, matrix_logits<S, 2>, matrix_logits<S, 3>},
      .multiply = pair_multiply<S>,
      .place = pair_place<S>,
      .mask_logits = tile_mask<S>,
      .weights = pair_weights<S, P, 1>,
      .group = {.weights = {pair_weights<S, P, 1>, pair_weights<S, P, 2>, pair_weights<S, P, 3>},
                .attend = {matrix_attend<S, P, 1>, matrix_attend<S, P, 2>, matrix_attend<S, P, 3>}},
      .rescale = tile_rescale<S, S::tile_vectors>,
      .accumulate = {matrix_accumulate<S, 1>, matrix_accumulate<S, 2>, matrix_accumulate<S, 3>},
      .merge = tile_merge<S>,
      .all_finite = pairs_finite<S, P>,
      .pack_values = matrix_pack_values,
  };
};
