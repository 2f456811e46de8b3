// Implements attention's tiles by pair dots of bfloat16. Included once for each extension that has pair dots.
//
// The layouts are the layouts of prefill.inl with a pair of bfloat16 in the place of a float. A pair is two
// neighbours in the dimension that a product sums over:
//
// | product | pairs of | arrays |
// |---|---|---|
// | logits | channels | Q [d/2][group][2], K |
// | output | keys | weights [key/2][group][2], V |
//
// Logits, states and sums are float. K stays in its stored form. A multiplier is applied to the logits
// afterwards: in q it would be rounded.

/// Computes sum[r][·] += Σ over pairs of A(r, pair) · b[pair][·]. A(r, pair) is at a + r·a_stride +
/// pair·a_step, b[pair] at b + pair·b_step.
template <class S, class P, int vectors>
SSMAX_INLINE void pair_product(const bfloat16* a, index_t a_stride, index_t a_step, const bfloat16* b,
                               index_t b_step, index_t steps, typename S::V (&sum)[S::tile_rows][vectors]) {
  for (index_t k = 0; k < steps; ++k, a += a_step, b += b_step) {
    typename P::V x[vectors];
    SSMAX_UNROLL
    for (int v = 0; v < vectors; ++v) x[v] = P::load(b + v * 2 * S::width);
    SSMAX_UNROLL
    for (int r = 0; r < S::tile_rows; ++r) {
      const typename P::V y = P::set(a + r * a_stride);
      SSMAX_UNROLL
      for (int v = 0; v < vectors; ++v) sum[r][v] = P::dot(y, x[v], sum[r][v]);
    }
  }
}

template <class S, class P, int vectors>
void pair_logits(const bfloat16* k, index_t k_stride, index_t d, index_t keys, const bfloat16* q, float* s) {
  for (index_t key = 0; key < keys; key += S::tile_rows) {
    typename S::V sum[S::tile_rows][vectors];
    clear_sums<S>(sum);
    pair_product<S, P, vectors>(k + key * k_stride, k_stride, 2, q, 2 * group_width<S>, d / 2, sum);
    store_sums<S>(sum, {s + key * group_width<S>, group_width<S>});
  }
}

/// Reads V from panels [key/2][tile_rows][2].
template <class S, class P, int vectors>
void pair_accumulate(const ValuePanels<bfloat16>& values, const bfloat16* weights, index_t keys, float* o) {
  const ValuePanels<bfloat16> v_panels = values;  // a copy that no store can change
  for (index_t panel = 0; panel < v_panels.panels; ++panel) {
    typename S::V sum[S::tile_rows][vectors];
    float* rows = o + panel * S::tile_rows * group_width<S>;
    load_sums<S>({rows, group_width<S>}, sum);
    pair_product<S, P, vectors>(v_panels.first + panel * v_panels.panel_stride, 2, 2 * S::tile_rows, weights,
                                2 * group_width<S>, keys / 2, sum);
    store_sums<S>(sum, {rows, group_width<S>});
  }
}

template <class S>
void pair_multiply(float* s, index_t keys, const float* factor) {
  const typename S::V f = S::load(factor);
  for (index_t key = 0; key < keys; ++key) {
    float* p = s + key * group_width<S>;
    S::store(p, S::mul(S::load(p), f));
  }
}

template <class S>
void pair_place(const float* z, index_t keys, const float* factor, const float* offset, float* s) {
  const typename S::V f = S::load(factor), back = S::sub(S::set(0), S::load(offset));
  for (index_t at = 0; at < keys * group_width<S>; at += group_width<S>) {
    S::store(s + at, S::fma(S::load(z + at), f, back));
  }
}

template <class S>
SSMAX_INLINE typename S::V pair_multiplier(const TileState<float>& state, int vector) {
  return state.multiplier == nullptr ? S::set(1) : S::load(state.multiplier + vector * S::width);
}

/// Returns the number to subtract from logits: the shift, or 0 if no key was visible.
template <class S>
SSMAX_INLINE typename S::V pair_base(typename S::V shift) {
  return S::select(S::less(shift, S::set(std::numeric_limits<float>::lowest())), S::set(0), shift);
}

/// Computes the shifts of vectors of queries after a block: the largest logit of each query. Returns false if a
/// vector is irregular. With `counts`, also finds the smallest logits, before the multiplier. A vector with a masked
/// key, or with a logit near the end of float's range, is then irregular.
template <class S, int vectors, bool counts = false>
SSMAX_INLINE bool pair_shifts(const float* s, index_t keys, const TileState<float>& state,
                              typename S::V (&shifts)[vectors],
                              [[maybe_unused]] typename S::V* smallest = nullptr) {
  using V = typename S::V;
  bool regular = true;
  SSMAX_UNROLL
  for (int v = 0; v < vectors; ++v) {
    V largest;
    regular = tile_top<S>(s + v * S::width, keys, largest, counts ? smallest + v : nullptr) && regular;
    const V multiplier = pair_multiplier<S>(state, v);
    largest = S::mul(largest, multiplier);
    shifts[v] = S::max(S::load(state.shift + v * S::width), largest);
    auto is_odd = S::either(S::unordered(largest, largest),
                            S::not_less(S::abs(pair_base<S>(shifts[v])), S::set(largest_shift<float>)));
    if constexpr (counts) {
      const V end = S::set(std::numeric_limits<float>::lowest() / 2);
      is_odd = S::either(is_odd, S::less(S::mul(smallest[v], multiplier), end));
    }
    regular = regular && !S::any(is_odd);
  }
  return regular;
}

/// Replaces the logits of vector v by weights and updates its state. `s` and `weights` begin with the first
/// vector. With `counts`, also adds to the statistics of the vector. Returns whether the shift rises. If `smallest`
/// is given, it holds the smallest logit of each lane before the multiplier, and no key is masked.
template <class S, class P, bool counts = false>
SSMAX_INLINE bool vector_weights(const float* s, index_t keys, const TileState<float>& state, int v,
                                 typename S::V raised, bfloat16* weights,
                                 [[maybe_unused]] const typename S::V* smallest = nullptr) {
  using V = typename S::V;
  s += v * S::width;
  weights += 2 * v * S::width;
  const typename P::V ones = P::ones();
  const V multiplier = pair_multiplier<S>(state, v), base = pair_base<S>(raised);
  const V back = S::sub(S::set(0), base);
  [[maybe_unused]] StepStatistics<S> step(raised);  // the largest logit so far
  if constexpr (counts) {
    if (smallest != nullptr) step.smallest[0] = *smallest;
  }
  V sums[2] = {S::set(0), S::set(0)};
  for (index_t key = 0; key < keys; key += 4) {
    V x[4];
    typename P::V pair[2];
    SSMAX_UNROLL
    for (int i = 0; i < 4; ++i) {
      const V product = S::load(s + (key + i) * group_width<S>);
      if constexpr (counts) {
        if (smallest == nullptr) step.add_logit(i % 2, product);
      }
      x[i] = S::fma(product, multiplier, back);
    }
    P::template exp2<2>(x, pair);
    SSMAX_UNROLL
    for (int i = 0; i < 2; ++i) {
      sums[i] = P::dot(pair[i], ones, sums[i]);
      if constexpr (counts) {
        const V weight[] = {P::low(pair[i]), P::high(pair[i])};
        SSMAX_UNROLL
        for (int j = 0; j < 2; ++j) {
          if (smallest == nullptr)
            step.template add_distance<true>(i, x[2 * i + j], weight[j]);
          else
            step.template add_distance<false>(i, x[2 * i + j], weight[j]);
        }
        step.squares[i] = P::dot(pair[i], pair[i], step.squares[i]);
      }
      P::store(weights + (key + 2 * i) * group_width<S>, pair[i]);
    }
  }
  float *shift = state.shift + v * S::width, *sum = state.sum + v * S::width;
  const V before = S::load(shift);
  V factor = S::sub(before, base);
  Exp2<S>(S::set(0)).template apply<1>(&factor);
  if constexpr (counts) {
    for (V& bound : step.smallest) bound = S::mul(bound, multiplier);
    step.add_to(state.statistics.from(v * S::width), S::load(sum), S::sub(before, base), factor);
  }
  S::store(state.factor + v * S::width, factor);
  S::store(shift, raised);
  S::store(sum, S::fma(S::load(sum), factor, S::add(sums[0], sums[1])));
  return S::any(S::less(before, raised));
}

/// Computes weights as tile_weights does, with two differences. Weights are rounded and stored in pairs. The
/// sum adds the rounded weights, so that the weights of a query sum to 1.
///
/// The shift is the largest logit itself. So the largest weight is 1, except for the rounding of the shift,
/// and is not changed by its own rounding. A block with a larger logit costs a rescaling. The function
/// computes the shifts of all vectors first, so that the following steps do not wait for them.
///
/// Rejected alternatives:
///
/// | shift | result |
/// |---|---|
/// | nearest integer | up to 1.25 times the error of out with logits of deviation 4 and 8 (PyTorch: less) |
/// | raised only if a weight is a quarter of the sum | same time, a tenth slower if some shifts rise |
///
/// A pair of weights is stored where a logit of its own key or of an earlier key was, so `weights` may be the
/// memory of s. Multipliers must be above 0. keys must be a multiple of 4.
///
/// With `counts`, also adds to the statistics.
template <class S, class P, int vectors, bool counts = false>
TileChange pair_weights(float* s, index_t keys, const TileState<float>& state, bfloat16* weights) {
  typename S::V shifts[vectors], smallest[vectors];
  if (!pair_shifts<S, vectors, counts>(s, keys, state, shifts, smallest)) return TileChange::irregular;
  bool rises = false;
  for (int v = 0; v < vectors; ++v)
    rises |=
        vector_weights<S, P, counts>(s, keys, state, v, shifts[v], weights, counts ? smallest + v : nullptr);
  return rises ? TileChange::raised : TileChange::none;
}

template <class S, class P>
bool pairs_finite(const bfloat16* in, index_t stride, index_t rows, index_t columns) {
  bool finite = true;
  typename P::V largest[2] = {P::zero(), P::zero()};
  for (index_t r = 0; r < rows; ++r, in += stride) {
    index_t c = 0;
    for (; c + 4 * S::width <= columns; c += 4 * S::width) {
      largest[0] = P::max_magnitude(largest[0], P::load(in + c));
      largest[1] = P::max_magnitude(largest[1], P::load(in + c + 2 * S::width));
    }
    for (; c + 2 * S::width <= columns; c += 2 * S::width)
      largest[0] = P::max_magnitude(largest[0], P::load(in + c));
    for (; c < columns; ++c) finite = finite && (in[c].bits & 0x7F80) != 0x7F80;
  }
  return finite && !P::any_not_finite(P::max_magnitude(largest[0], largest[1]));
}

/// Returns pairs of the next `left` numbers of two rows, at most one vector. Missing numbers are 0.
template <class S, class P>
SSMAX_INLINE typename P::V interleave_up_to(const bfloat16* low, const bfloat16* high, index_t left) {
  if (left >= S::width) return P::interleave(low, high);
  bfloat16 part[2][S::width] = {};
  for (index_t i = 0; i < left; ++i) {
    part[0][i] = low[i];
    part[1][i] = high[i];
  }
  return P::interleave(part[0], part[1]);
}

/// Packs rows of V into panels [key/2][tile_rows][2]. A key whose neighbour belongs to another call is packed
/// number by number.
template <class S, class P>
void pair_pack_values(const bfloat16* v, index_t v_stride, index_t first, index_t keys, index_t channels,
                      bfloat16* panels, index_t panel_stride) {
  constexpr index_t rows = S::tile_rows, piece = rows < S::width ? rows : S::width;
  const index_t padded = (channels + rows - 1) / rows * rows;
  for (index_t key = first; key < first + keys; ++key, v += v_stride) {
    const bool paired = key % 2 == 0 && key + 1 < first + keys;
    bfloat16* to = panels + key / 2 * 2 * rows;
    if (!paired) {
      for (index_t c = 0; c < padded; ++c) {
        to[c / rows * panel_stride + c % rows * 2 + key % 2] = c < channels ? v[c] : bfloat16{};
      }
      continue;
    }
    for (index_t c = 0; c < padded; c += S::width) {
      alignas(64) bfloat16 pairs[2 * S::width];
      P::store(pairs, interleave_up_to<S, P>(v + c, v + v_stride + c, channels - c));
      for (index_t i = 0; i < S::width && c + i < padded; i += piece) {
        __builtin_memcpy(to + (c + i) / rows * panel_stride + (c + i) % rows * 2, pairs + 2 * i,
                         2 * piece * sizeof(bfloat16));
      }
    }
    ++key;
    v += v_stride;
  }
}

template <class T>
struct KernelTable<PrefillKernels<T, bfloat16>> {
  using S = Simd<T>;
  using P = Pairs;
  static constexpr PrefillKernels<T, bfloat16> value{
      .pass = S::tile_rows,
      .width = S::width,
      .depth = 2,
      .transpose = transpose<S>,
      .logits = {pair_logits<S, P, 1>, pair_logits<S, P, 2>, pair_logits<S, P, 3>},
      .multiply = pair_multiply<S>,
      .place = pair_place<S>,
      .mask_logits = tile_mask<S>,
      .weights = pair_weights<S, P, 1>,
      .group = {.weights = {pair_weights<S, P, 1>, pair_weights<S, P, 2>, pair_weights<S, P, 3>}},
      .rescale = tile_rescale<S, S::tile_vectors>,
      .accumulate = {pair_accumulate<S, P, 1>, pair_accumulate<S, P, 2>, pair_accumulate<S, P, 3>},
      .merge = tile_merge<S>,
      .all_finite = pairs_finite<S, P>,
      .pack_values = pair_pack_values<S, P>,
  };
};
