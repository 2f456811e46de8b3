// Implements attention's tiles: the logits of many queries, one per lane, against a block of keys. Included
// once per target.
//
// A group is tile_vectors vectors of queries. All arrays of a group have the lanes last: Qᵀ [d][group], the
// block's logits and weights S [key][group], Oᵀ [channel][group]. So both products read one vector and
// broadcast one number of K or V, and K is not transposed. One lane holds the softmax state of a query, so
// kernels never reduce across lanes.

/// Computes sum[r][·] += Σ_k A(r, k) · b[k][·], one k after another. A is rows of K (a[r·a_stride + k]) or
/// columns of V (a[k·a_stride + r]).
template <class S, int vectors, bool columns>
SSMAX_INLINE void tile_product(const typename S::Value* a, index_t a_stride, const typename S::Value* b,
                               index_t b_stride, index_t steps, typename S::V (&sum)[S::tile_rows][vectors]) {
  using V = typename S::V;
  for (index_t k = 0; k < steps; ++k) {
    V x[vectors];
    SSMAX_UNROLL
    for (int v = 0; v < vectors; ++v) x[v] = S::load(b + k * b_stride + v * S::width);
    SSMAX_UNROLL
    for (int r = 0; r < S::tile_rows; ++r) {
      const V y = S::set(columns ? a[k * a_stride + r] : a[r * a_stride + k]);
      SSMAX_UNROLL
      for (int v = 0; v < vectors; ++v) sum[r][v] = S::fma(y, x[v], sum[r][v]);
    }
  }
}

template <class S, int vectors>
void tile_logits(const typename S::Value* k, index_t k_stride, index_t d, index_t keys,
                 const typename S::Value* q, typename S::Value* s) {
  for (index_t key = 0; key < keys; key += S::tile_rows) {
    typename S::V sum[S::tile_rows][vectors];
    clear_sums<S>(sum);
    tile_product<S, vectors, false>(k + key * k_stride, k_stride, q, group_width<S>, d, sum);
    store_sums<S>(sum, {s + key * group_width<S>, group_width<S>});
  }
}

/// Adds to o key by key. So results are bit-identical for any division of a chunk's keys into calls. The
/// division depends on the keys that are visible to other queries of the group.
template <class S, int vectors>
void tile_accumulate(const ValuePanels<typename S::Value>& values, const typename S::Value* s, index_t keys,
                     typename S::Value* o) {
  const ValuePanels<typename S::Value> v_panels = values;  // a copy that no store can change
  for (index_t panel = 0; panel < v_panels.panels; ++panel) {
    typename S::V sum[S::tile_rows][vectors];
    typename S::Value* rows = o + panel * S::tile_rows * group_width<S>;
    load_sums<S>({rows, group_width<S>}, sum);
    tile_product<S, vectors, true>(v_panels.first + panel * v_panels.panel_stride, v_panels.stride, s,
                                   group_width<S>, keys, sum);
    store_sums<S>(sum, {rows, group_width<S>});
  }
}

/// Adds the products of channels [c, c + count) of S::width keys with queries, one channel after the other. The sum of
/// a key is a lane, that of query r is sum[r].
template <class S, int rows>
SSMAX_INLINE void add_channels(const typename S::Value* const* k, index_t c, index_t count,
                               const typename S::Value* q, typename S::V (&sum)[rows]) {
  typename S::V x[S::width];
  if (count == S::width) {
    SSMAX_UNROLL
    for (index_t i = 0; i < S::width; ++i) x[i] = S::load(k[i] + c);
  } else {
    for (index_t i = 0; i < S::width; ++i) x[i] = S::load_part(k[i] + c, count, 0);
  }
  transpose_block<S>(x);
  SSMAX_UNROLL
  for (int column = 0; column < static_cast<int>(S::width); ++column) {
    if (column >= count) continue;
    SSMAX_UNROLL
    for (int r = 0; r < rows; ++r) {
      sum[r] = S::fma(x[column_paths<S>.of[column]], S::set(q[(c + column) * group_width<S> + r]), sum[r]);
    }
  }
}

/// Computes tile_logits for the first `rows` lanes, with the same bits. Sums of S::width keys lie side by side. Other
/// lanes of the vector get the logits of lane 0.
template <class S, int rows>
void row_logits(const std::byte* const* k, index_t d, index_t keys, const typename S::Value* q, index_t ahead,
                typename S::Value* s) {
  using T = typename S::Value;
  constexpr index_t w = S::width, groups = 4;  // sums that do not wait for each other
  const index_t whole = d / w * w;
  for (index_t first = 0; first < keys; first += groups * w) {
    const T* key[groups * w];
    for (index_t i = 0; i < groups * w; ++i)
      key[i] = reinterpret_cast<const T*>(k[std::min(first + i, keys - 1)]);
    typename S::V sum[groups][rows];
    clear_sums<S>(sum);
    for (index_t c = 0; c < whole; c += w) {
      if (ahead != 0 && c * index_t{sizeof(T)} % 64 == 0) {
        for (index_t i = 0; i < groups * w; ++i) {
          __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(key[i] + c) +
                                                           static_cast<std::uintptr_t>(groups * w * ahead)));
        }
      }
      SSMAX_UNROLL
      for (index_t g = 0; g < groups; ++g) add_channels<S, rows>(key + g * w, c, w, q, sum[g]);
    }
    if (whole < d) {
      for (index_t g = 0; g < groups; ++g) add_channels<S, rows>(key + g * w, whole, d - whole, q, sum[g]);
    }
    for (int r = 0; r < rows; ++r) {
      T numbers[groups * w];
      for (index_t g = 0; g < groups; ++g) S::store(numbers + g * w, sum[g][r]);
      T* to = s + first * group_width<S> + r;
      for (index_t i = 0; i < std::min(groups * w, keys - first); ++i, to += group_width<S>) {
        if (r == 0) {
          S::store(to, S::set(numbers[i]));
        } else {
          *to = numbers[i];
        }
      }
    }
  }
}

/// Computes tile_accumulate for the first `rows` lanes, with the same bits.
template <class S, int rows>
void row_accumulate(const std::byte* const* v, index_t channels, index_t keys,
                    const typename S::Value* weights, typename S::Value* o) {
  using T = typename S::Value;
  constexpr int vectors = 8 / rows;
  constexpr index_t w = S::width, most = vectors * w;  // channels whose sums are in registers
  for (index_t c = 0; c < channels; c += most) {
    const index_t count = std::min(most, channels - c);
    T numbers[rows * most] = {};
    for (index_t i = 0; i < count; ++i) {
      for (int r = 0; r < rows; ++r) numbers[r * most + i] = o[(c + i) * group_width<S> + r];
    }
    typename S::V sum[rows][vectors];
    load_sums<S>({numbers, most}, sum);
    for (index_t key = 0; key < keys; ++key) {
      const T* row = reinterpret_cast<const T*>(v[key]) + c;
      SSMAX_UNROLL
      for (index_t i = 0; i < vectors; ++i) {
        if (i * w >= count) continue;
        const typename S::V x = load_up_to<S>(row + i * w, count - i * w, 0);
        SSMAX_UNROLL
        for (int r = 0; r < rows; ++r)
          sum[r][i] = S::fma(x, S::set(weights[key * group_width<S> + r]), sum[r][i]);
      }
    }
    store_sums<S>(sum, {numbers, most});
    for (index_t i = 0; i < count; ++i) {
      for (int r = 0; r < rows; ++r) o[(c + i) * group_width<S> + r] = numbers[r * most + i];
    }
  }
}

/// Masks, for one vector of queries, the keys outside [first, last) of each lane, counted from s.
template <class S>
void tile_mask(typename S::Value* s, index_t keys, const typename S::Value* first,
               const typename S::Value* last) {
  using T = typename S::Value;
  const typename S::V begin = S::load(first), end = S::load(last),
                      masked_logit = S::set(-std::numeric_limits<T>::infinity());
  for (index_t key = 0; key < keys; ++key) {
    const typename S::V at = S::set(static_cast<T>(key));
    T* p = s + key * group_width<S>;
    S::store(p, S::select(S::less(at, begin), masked_logit,
                          S::select(S::less(at, end), S::load(p), masked_logit)));
  }
}

/// Finds the largest logit of each lane and, if `smallest` is given, the smallest. Returns false if a logit is NaN.
template <class S>
SSMAX_INLINE bool tile_top(const typename S::Value* s, index_t keys, typename S::V& largest,
                           typename S::V* smallest = nullptr) {
  using V = typename S::V;
  constexpr auto infinity = std::numeric_limits<typename S::Value>::infinity();
  const V lowest = S::set(-infinity);
  V top[4] = {lowest, lowest, lowest, lowest}, bottom[2] = {S::set(infinity), S::set(infinity)};
  typename S::M nan = S::none();
  index_t key = 0;
  for (; key + 4 <= keys; key += 4) {
    V x[4];
    SSMAX_UNROLL
    for (int i = 0; i < 4; ++i) x[i] = S::load(s + (key + i) * group_width<S>);
    nan = S::either(nan, S::either(S::unordered(x[0], x[1]), S::unordered(x[2], x[3])));
    SSMAX_UNROLL
    for (int i = 0; i < 4; ++i) top[i] = S::max(top[i], x[i]);
    if (smallest != nullptr) {
      SSMAX_UNROLL
      for (int i = 0; i < 4; ++i) bottom[i % 2] = S::min(bottom[i % 2], x[i]);
    }
  }
  for (; key < keys; ++key) {
    const V x = S::load(s + key * group_width<S>);
    nan = S::either(nan, S::unordered(x, x));
    top[0] = S::max(top[0], x);
    if (smallest != nullptr) bottom[0] = S::min(bottom[0], x);
  }
  largest = S::max(S::max(top[0], top[1]), S::max(top[2], top[3]));
  if (smallest != nullptr) *smallest = S::min(bottom[0], bottom[1]);
  return !S::any(nan);
}

/// The statistics of one vector over the keys of one step. Sums have two parts, which add alternate keys.
template <class S>
struct StepStatistics {
  using T = typename S::Value;
  using V = typename S::V;

  /// A lower bound of distances, where weights are 0. A masked key then adds 0 instead of NaN.
  static constexpr int lowest = -2048;

  V largest, smallest[2], distances[2], squares[2];

  SSMAX_INLINE explicit StepStatistics(V of_top) : largest(of_top) {
    smallest[0] = smallest[1] = S::set(std::numeric_limits<T>::infinity());
    distances[0] = distances[1] = squares[0] = squares[1] = S::set(0);
  }

  /// Adds a logit to `smallest`, unless it is masked.
  SSMAX_INLINE void add_logit(int part, V x) {
    const typename S::M is_masked = S::less(x, S::set(std::numeric_limits<T>::lowest()));
    smallest[part] = S::select(is_masked, smallest[part], S::min(smallest[part], x));
  }
  /// Adds weight · distance. With `masks`, the key may be masked.
  template <bool masks>
  SSMAX_INLINE void add_distance(int part, V distance, V weight) {
    const V bounded = masks ? S::max(distance, S::set(lowest)) : distance;
    distances[part] = S::fma(weight, bounded, distances[part]);
  }
  /// Adds a weight 2^distance, but no logit.
  template <bool masks>
  SSMAX_INLINE void add_weight(int part, V distance, V weight) {
    add_distance<masks>(part, distance, weight);
    squares[part] = S::fma(weight, weight, squares[part]);
  }
  /// Adds to statistics of earlier keys, whose weights have the sum `sum`. `factor` = 2^rise turns these weights into
  /// weights under the raised shift.
  SSMAX_INLINE void add_to(const TileStatistics<T>& to, V sum, V rise, V factor) const {
    const V moved = S::fma(S::max(rise, S::set(lowest)), sum, S::load(to.distances));
    S::store(to.distances, S::fma(moved, factor, S::add(distances[0], distances[1])));
    S::store(to.squares, S::fma(S::load(to.squares), S::mul(factor, factor), S::add(squares[0], squares[1])));
    S::store(to.largest, S::max(S::load(to.largest), largest));
    S::store(to.smallest, S::min(S::load(to.smallest), S::min(smallest[0], smallest[1])));
  }
};

/// Replaces the logits of one vector of queries by weights 2^(x - base) and returns their sum. Calls add(part, logit,
/// weight), where part is 0 or 1 and the weight is not stored yet.
template <class S, class F>
SSMAX_INLINE typename S::V weigh(const typename S::Value* s, index_t keys, typename S::V base,
                                 typename S::Value* weights, const F& add) {
  using V = typename S::V;
  const Exp2<S> power(base);
  V sums[4] = {S::set(0), S::set(0), S::set(0), S::set(0)};
  index_t key = 0;
  for (; key + 4 <= keys; key += 4) {
    V x[4];
    SSMAX_UNROLL
    for (int i = 0; i < 4; ++i) x[i] = S::load(s + (key + i) * group_width<S>);
    power.template apply<4>(x);
    SSMAX_UNROLL
    for (int i = 0; i < 4; ++i) {
      // A logit is read again before its weight, which may overwrite it, is stored.
      add(i % 2, s + (key + i) * group_width<S>, x[i]);
      sums[i] = S::add(sums[i], x[i]);
      S::store(weights + (key + i) * group_width<S>, x[i]);
    }
  }
  for (; key < keys; ++key) {
    V x = S::load(s + key * group_width<S>);
    power.template apply<1>(&x);
    add(0, s + key * group_width<S>, x);
    sums[0] = S::add(sums[0], x);
    S::store(weights + key * group_width<S>, x);
  }
  return S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3]));
}

/// Replaces the logits of one vector of queries by weights 2^(x - shift) and updates shift and sum. With `counts`, also
/// adds to the statistics. Weights, shift and sum do not depend on `counts`.
template <class S, bool counts>
TileChange tile_weights(typename S::Value* s, index_t keys, const TileState<typename S::Value>& state,
                        typename S::Value* weights) {
  using T = typename S::Value;
  using V = typename S::V;
  V largest, smallest;
  const bool ordered = tile_top<S>(s, keys, largest, counts ? &smallest : nullptr);
  const V magic = S::set(ExpConstants<T>::magic);
  const V before = S::load(state.shift);
  const V nearest = S::sub(S::add(largest, magic), magic);
  const V raised = S::select(S::less(S::add(before, S::set(raise_distance)), nearest), nearest, before);
  const V base = S::select(S::less(raised, S::set(std::numeric_limits<T>::lowest())), S::set(0), raised);
  if (!ordered || S::any(S::not_less(S::abs(base), S::set(largest_shift<T>)))) return TileChange::irregular;

  V factor = S::sub(before, base), sum;
  Exp2<S>(S::set(0)).template apply<1>(&factor);
  if constexpr (counts) {
    StepStatistics<S> step(largest);
    if (S::any(S::less(smallest, S::set(std::numeric_limits<T>::lowest())))) {
      sum = weigh<S>(s, keys, base, weights, [&](int part, const T* logit, V weight) {
        step.add_logit(part, S::load(logit));
        step.template add_weight<true>(part, S::sub(S::load(logit), base), weight);
      });
    } else {
      step.smallest[0] = smallest;
      sum = weigh<S>(s, keys, base, weights, [&](int part, const T* logit, V weight) {
        step.template add_weight<false>(part, S::sub(S::load(logit), base), weight);
      });
    }
    step.add_to(state.statistics, S::load(state.sum), S::sub(before, base), factor);
  } else {
    sum = weigh<S>(s, keys, base, weights, [](int, const T*, V) {});
  }
  S::store(state.shift, raised);
  S::store(state.factor, factor);
  S::store(state.sum, S::fma(S::load(state.sum), factor, sum));
  return S::any(S::less(before, raised)) ? TileChange::raised : TileChange::none;
}

/// Computes o[rows][·] *= factor for the first `vectors` vectors of a group.
template <class S, int vectors>
void tile_rescale(typename S::Value* o, index_t rows, const typename S::Value* factor) {
  typename S::V f[vectors];
  for (int v = 0; v < vectors; ++v) f[v] = S::load(factor + v * S::width);
  for (index_t r = 0; r < rows; ++r) {
    for (int v = 0; v < vectors; ++v) {
      typename S::Value* p = o + r * group_width<S> + v * S::width;
      S::store(p, S::mul(S::load(p), f[v]));
    }
  }
}

/// Computes out = out·factor + in·in_factor with a factor per lane.
template <class S>
void tile_merge(typename S::Value* out, const typename S::Value* in, index_t rows,
                const typename S::Value* factor, const typename S::Value* in_factor) {
  for (index_t v = 0; v < group_width<S>; v += S::width) {
    const typename S::V f = S::load(factor + v), g = S::load(in_factor + v);
    for (index_t at = v; at < rows * group_width<S>; at += group_width<S>) {
      S::store(out + at, S::fma(S::load(out + at), f, S::mul(S::load(in + at), g)));
    }
  }
}

template <class S>
bool all_finite(const typename S::Value* in, index_t stride, index_t rows, index_t columns) {
  typename S::V zero[4] = {S::set(0), S::set(0), S::set(0), S::set(0)};  // 0 · x stays 0 if x is finite
  for (index_t r = 0; r < rows; ++r, in += stride) {
    index_t c = 0;
    for (; c + 4 * S::width <= columns; c += 4 * S::width) {
      SSMAX_UNROLL
      for (int i = 0; i < 4; ++i) zero[i] = S::fma(S::load(in + c + i * S::width), S::set(0), zero[i]);
    }
    for (; c < columns; c += S::width)
      zero[0] = S::fma(load_up_to<S>(in + c, columns - c, 0), S::set(0), zero[0]);
  }
  return !S::any(S::either(S::unordered(zero[0], zero[1]), S::unordered(zero[2], zero[3])));
}

/// Packs rows of V into panels of tile_rows channels, [panel][key][channel]. Missing channels are 0.
template <class S>
void tile_pack_values(const typename S::Value* v, index_t v_stride, index_t first, index_t keys,
                      index_t channels, typename S::Value* panels, index_t panel_stride) {
  using T = typename S::Value;
  constexpr index_t rows = S::tile_rows;
  for (index_t key = 0; key < keys; ++key) {
    const T* row = v + key * v_stride;
    T* to = panels + (first + key) * rows;
    index_t c = 0;
    for (; c + rows <= channels; c += rows, to += panel_stride)
      __builtin_memcpy(to, row + c, rows * sizeof(T));
    if (c == channels) continue;
    for (index_t r = 0; r < rows; ++r) to[r] = c + r < channels ? row[c + r] : T{0};
  }
}

/// The empty table of targets without a bf16 path.
template <class T>
struct KernelTable<PrefillKernels<T, bfloat16>> {
  static constexpr PrefillKernels<T, bfloat16> value{};
};

template <class T>
struct KernelTable<PrefillKernels<T>> {
  using S = Simd<T>;
  static_assert(S::tile_vectors == tile_vectors);
  static constexpr PrefillKernels<T> value{
      .pass = S::tile_rows,
      .width = S::width,
      .transpose = transpose<S>,
      .logits = {tile_logits<S, 1>, tile_logits<S, 2>, tile_logits<S, 3>},
      .mask_logits = tile_mask<S>,
      .weights = tile_weights<S, false>,
      .rescale = tile_rescale<S, S::tile_vectors>,
      .accumulate = {tile_accumulate<S, 1>, tile_accumulate<S, 2>, tile_accumulate<S, 3>},
      .row_logits = {row_logits<S, 1>, row_logits<S, 2>},
      .row_accumulate = {row_accumulate<S, 1>, row_accumulate<S, 2>},
      .merge = tile_merge<S>,
      .all_finite = all_finite<S>,
      .pack_values = tile_pack_values<S>,
  };
};
