// This target's leaf tables. Included once per target, after the kernels.

template <class T>
using Lanes = std::conditional_t<sizeof(T) == sizeof(float), F32, F64>;

template <class Table>
struct LeafTable;

template <class T>
struct LeafTable<RowLeaves<T>> {
  using S = Lanes<T>;
  static constexpr RowLeaves<T> value{
      .width = static_cast<int>(S::width),
      .longest_short_row = S::width > 1 ? 256 : 4,
      .max = row_max<S>,
      .exp_store = row_exp_store<S>,
      .multiply = row_multiply<S>,
      .affine = row_affine<S>,
      .short_rows = group_rows<S>,
      .packed_rows = packed_rows<S>,
  };
};

template <class T>
struct LeafTable<GradientLeaves<T>> {
  using S = Lanes<T>;
  static constexpr GradientLeaves<T> value{
      .dot = row_dot<S>,
      .sum_unmasked = row_sum_unmasked<S>,
      .backward = row_backward<S>,
      .log_backward = row_log_backward<S>,
  };
};

template <class T>
struct LeafTable<RotaryLeaves<T>> {
  using S = Lanes<T>;
  static constexpr RotaryLeaves<T> value{
      .rotate_half_split = rotate_half_split<S>,
      .rotate_interleaved = rotate_interleaved<S>,
  };
};

template <class T>
struct LeafTable<ScoreLeaves<T>> {
  using S = Lanes<T>;
  static constexpr ScoreLeaves<T> value{
      .softcap = softcap<S>,
      .softcap_slope = softcap_slope<S>,
      .ramp = tile_ramp<S>,
      .add = tile_add<S>,
      .multiply = tile_multiply<S>,
  };
};

template <class T, class X>
struct LeafTable<FewLeaves<T, X>> {
  using S = Lanes<T>;
  static constexpr FewLeaves<T, X> value{.logits = few_logits<S, X>, .accumulate = few_accumulate<S, X>};
};

template <class T>
struct LeafTable<TileLeaves<T>> {
  using S = Lanes<T>;
  static_assert(S::tile_vectors == tile_vectors);
  static constexpr TileLeaves<T> value{
      .rows = S::tile_rows,
      .width = S::width,
      .transpose = transpose<S>,
      .logits = {tile_logits<S, 1>, tile_logits<S, 2>, tile_logits<S, 3>},
      .hide = tile_hide<S>,
      .weights = tile_weights<S>,
      .rescale = tile_rescale<S>,
      .accumulate = {tile_accumulate<S, 1>, tile_accumulate<S, 2>, tile_accumulate<S, 3>},
      .merge = tile_merge<S>,
      .all_finite = all_finite<S>,
      .pack_values = tile_pack_values<S>,
  };
};

template <class T>
struct LeafTable<TileGradientLeaves<T>> {
  using S = Lanes<T>;
  static constexpr TileGradientLeaves<T> value{
      .gradients = tile_gradients<S>,
      .score_gradients = tile_score_gradients<S>,
      .add_product = tile_add_product<S>,
      .add_rows = tile_add_rows<S>,
  };
};

template <class T>
struct LeafTable<ConversionLeaves<T>> {
  using S = Lanes<T>;
  static constexpr ConversionLeaves<T> value{
      .widen_half = widen<S, half>,
      .widen_bfloat16 = widen<S, bfloat16>,
      .narrow_half = narrow<S, half>,
      .narrow_bfloat16 = narrow<S, bfloat16>,
  };
};
