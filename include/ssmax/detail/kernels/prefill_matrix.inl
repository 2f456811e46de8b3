// Attention's tiles by AMX: its products and how it wants V. All else is as in prefill_pairs.inl, whose
// layouts of Q and of the weights are what the unit takes for its second operand. Its first is 16 rows of K, 32
// channels each, as they are stored; or 16 channels of V, 32 keys each, which takes transposing.

template <class S>
void matrix_acquire() {
  _tile_loadconfig(&tile_configuration);
}

template <class S>
void matrix_release() {
  _tile_release();
}

template <class S, int vectors>
void matrix_logits(const bfloat16* k, index_t k_stride, index_t d, index_t keys, const bfloat16* q,
                   float* s) {
  constexpr index_t group = group_width<S>;
  tiles_see_memory();
  const TileOperands first{k, k_stride, 16 * k_stride, 32, q, s};
  tile_strips<false>({first, vectors, 32 * k_stride, 32 * group}, keys / 32 * vectors, d / 32, group);
  tiles_see_memory();
}

/// V in panels [key/32][32 channels][32 keys].
template <class S, int vectors>
void matrix_accumulate(const bfloat16* values, index_t, index_t panel_stride, index_t panels,
                       const bfloat16* weights, index_t keys, float* o) {
  constexpr index_t group = group_width<S>;
  tiles_see_memory();
  const TileOperands first{values, 32, 16 * 32, 32 * 32, weights, o};
  tile_strips<true>({first, vectors, panel_stride, 32 * group}, panels * vectors, keys / 32, group);
  tiles_see_memory();
}

/// Rows of V into panels [key/32][32 channels][32 keys]: 32 whole keys in pairs, which are then transposed as
/// floats are. Other keys go number by number.
template <class S, class P>
void matrix_pack_values(const bfloat16* v, index_t v_stride, index_t first, index_t keys, index_t channels,
                        bfloat16* panels, index_t panel_stride) {
  const index_t padded = (channels + 31) / 32 * 32, last = first + keys;
  for (index_t key = first; key < last;) {
    bfloat16* to = panels + key / 32 * 32 * 32;
    const bfloat16* row = v + (key - first) * v_stride;
    if (key % 32 != 0 || key + 32 > last) {
      for (index_t c = 0; c < padded; ++c) {
        to[c / 32 * panel_stride + c % 32 * 32 + key % 32] = c < channels ? row[c] : bfloat16{};
      }
      ++key;
      continue;
    }
    for (index_t c = 0; c < padded; c += 16) {
      typename S::V pairs[16];
      for (index_t i = 0; i < 16; ++i) {
        const bfloat16* low = row + 2 * i * v_stride + c;
        pairs[i] = P::as_floats(interleave_up_to<S, P>(low, low + v_stride, channels - c));
      }
      transpose_block<S>(pairs);
      float* tile = reinterpret_cast<float*>(to + c / 32 * panel_stride + c % 32 * 32);
      SSMAX_UNROLL
      for (int i = 0; i < 16; ++i) S::store(tile + transposed_column<S>(i) * 16, pairs[i]);
    }
    key += 32;
  }
}

template <class T>
struct KernelTable<PrefillKernels<T, bfloat16>> {
  using S = Lanes<T>;
  using P = Pairs;
  static constexpr PrefillKernels<T, bfloat16> value{
      .rows = 32,
      .width = S::width,
      .few = 3,
      .depth = 32,
      .acquire = matrix_acquire<S>,
      .release = matrix_release<S>,
      .transpose = transpose<S>,
      .logits = {matrix_logits<S, 1>, matrix_logits<S, 2>, matrix_logits<S, 3>},
      .multiply = pair_multiply<S>,
      .hide = tile_hide<S>,
      .weights = pair_weights<S, P, 1>,
      .group_weights = {pair_weights<S, P, 1>, pair_weights<S, P, 2>, pair_weights<S, P, 3>},
      .rescale = tile_rescale<S>,
      .accumulate = {matrix_accumulate<S, 1>, matrix_accumulate<S, 2>, matrix_accumulate<S, 3>},
      .merge = tile_merge<S>,
      .all_finite = pairs_finite<S, P>,
      .pack_values = matrix_pack_values<S, P>,
  };
};
