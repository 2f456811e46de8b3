// Implements softmax of many short rows. Included once per target. w is the number of lanes.
//
// A short row spends its time on the reduction of a vector to one number and on the way back: 3 shuffles and
// 3 dependent maxima, twice. Three methods avoid this cost:
// - group_rows computes w rows at a time. The w partial maxima are folded into one vector that holds all w
//   maxima, with about 2 shuffles per row and no latency to wait for. One division serves w rows.
// - packed_rows computes rows of 1, 2, 4, … < w elements, which are side by side in a vector. Swaps of
//   neighbours spread each row's maximum and sum over the row's own lanes.
// - ragged_rows folds maxima and sums as group_rows does, for rows of different lengths and scales.

template <class S>
SSMAX_INLINE bool shifts_exactly(typename S::V top_times_scale) {
  return S::all(S::less(S::abs(top_times_scale), S::set(largest_shift<typename S::Value>)));
}

/// Returns the maxima of w rows, one per lane. Marks in `nan` whether an element is NaN.
template <class S>
SSMAX_INLINE typename S::V group_maxima(const typename S::Value* in, index_t in_stride, index_t n,
                                        typename S::M& nan) {
  using V = typename S::V;
  constexpr index_t w = S::width;
  constexpr typename S::Value inf = std::numeric_limits<typename S::Value>::infinity();
  const index_t whole = n / w * w;
  V lanes[w];
  for (index_t r = 0; r < w; ++r) {
    const typename S::Value* x = in + r * in_stride;
    V top = S::set(-inf);
    for (index_t i = 0; i < whole; i += w) {
      const V v = S::load(x + i);
      nan = S::either(nan, S::unordered(v, v));
      top = S::max(top, v);
    }
    if (whole < n) {
      const V v = S::load_part(x + whole, n - whole, -inf);
      nan = S::either(nan, S::unordered(v, v));
      top = S::max(top, v);
    }
    lanes[r] = top;
  }
  return fold<S, Maximum>(lanes);
}

/// Writes the exponentials of w rows, each with its own shift. Returns the sums of the rows, one per lane.
/// `chains` rows are computed in step: two in AVX2 and four in AVX-512, because each row needs registers for
/// a shift and a sum as well.
template <class S>
SSMAX_INLINE typename S::V group_exponentials(const typename S::Value* in, index_t in_stride,
                                              typename S::Value* out, index_t out_stride, index_t n,
                                              const Exp<S>& exp, const typename S::Value* biases) {
  using T = typename S::Value;
  using V = typename S::V;
  constexpr index_t w = S::width;
  constexpr int chains = S::group_chains;
  constexpr T inf = std::numeric_limits<T>::infinity();
  const index_t whole = n / w * w;
  V lanes[w];
  for (index_t r = 0; r < w; r += chains) {
    V bias[chains], sum[chains], e[chains];
    SSMAX_UNROLL
    for (int k = 0; k < chains; ++k) {
      bias[k] = S::set(biases[r + k]);
      sum[k] = S::set(T{0});
    }
    const T* x = in + r * in_stride;
    T* y = out + r * out_stride;
    for (index_t i = 0; i < whole; i += w) {
      SSMAX_UNROLL
      for (int k = 0; k < chains; ++k) e[k] = S::load(x + k * in_stride + i);
      exp.template apply<chains>(e, bias);
      SSMAX_UNROLL
      for (int k = 0; k < chains; ++k) {
        S::store(y + k * out_stride + i, e[k]);
        sum[k] = S::add(sum[k], e[k]);
      }
    }
    if (whole < n) {
      SSMAX_UNROLL
      for (int k = 0; k < chains; ++k) e[k] = S::load_part(x + k * in_stride + whole, n - whole, -inf);
      exp.template apply<chains>(e, bias);
      SSMAX_UNROLL
      for (int k = 0; k < chains; ++k) {
        S::store_part(y + k * out_stride + whole, e[k], n - whole);
        sum[k] = S::add(sum[k], e[k]);
      }
    }
    SSMAX_UNROLL
    for (int k = 0; k < chains; ++k) lanes[r + k] = sum[k];
  }
  return fold<S, Sum>(lanes);
}

template <class S>
SSMAX_INLINE void group_multiply(typename S::Value* out, index_t out_stride, index_t n,
                                 const typename S::Value* factors) {
  constexpr index_t w = S::width;
  const index_t whole = n / w * w;
  for (index_t r = 0; r < w; ++r) {
    typename S::Value* y = out + r * out_stride;
    const typename S::V f = S::set(factors[r]);
    for (index_t i = 0; i < whole; i += w) S::store(y + i, S::mul(f, S::load(y + i)));
    if (whole < n) {
      const typename S::V v = S::load_part(y + whole, n - whole, typename S::Value{0});
      S::store_part(y + whole, S::mul(f, v), n - whole);
    }
  }
}

/// Computes softmax of groups of w rows. Several groups pass each of the three steps together, because the
/// groups of a step are independent. A single group would wait about 40 cycles for its maxima and 40 for its
/// sums. A batch has as many groups as fit the first-level cache.
template <class S>
index_t group_rows(const typename S::Value* in, index_t in_stride, typename S::Value* out, index_t out_stride,
                   index_t rows, index_t n, Scale<typename S::Value> scale) {
  using T = typename S::Value;
  using V = typename S::V;
  constexpr index_t w = S::width;
  constexpr index_t max_groups = 8, batch_elements = 12288 / static_cast<index_t>(sizeof(T));
  const index_t groups = std::clamp<index_t>(batch_elements / (w * std::max<index_t>(n, 1)), 1, max_groups);
  const V magic = S::set(ExpConstants<T>::magic);
  const Exp<S> exp(scale, T{0});
  T lanes[max_groups * w];
  index_t row = 0;
  for (bool regular = true; regular && row + w <= rows;) {
    const index_t last = std::min(groups * w, (rows - row) / w * w);
    index_t r = 0;
    for (; r < last; r += w) {
      typename S::M nan = S::none();
      const V top = S::mul(group_maxima<S>(in + r * in_stride, in_stride, n, nan), exp.high);
      regular = !S::any(nan) && shifts_exactly<S>(top);
      if (!regular) break;
      S::store(lanes + r, S::sub(magic, S::sub(S::add(top, magic), magic)));
    }
    const index_t count = r;
    for (r = 0; r < count; r += w) {
      const V sum = group_exponentials<S>(in + r * in_stride, in_stride, out + r * out_stride, out_stride, n,
                                          exp, lanes + r);
      S::store(lanes + r, S::div(S::set(T{1}), sum));
    }
    for (r = 0; r < count; r += w) group_multiply<S>(out + r * out_stride, out_stride, n, lanes + r);
    row += count;
    in += count * in_stride;
    out += count * out_stride;
  }
  return row;
}

/// Longest row of the kernels.
template <class S>
inline constexpr index_t longest_short_row = S::width > 1 ? 256 : 4;

/// Computes softmax of at most w rows of different lengths, one row per lane of the maxima and sums. All rows are
/// computed with the number of vectors of the longest one, so that the processor predicts the loops. Works on copies in
/// whole vectors: a load that follows a masked store to the same memory waits for the store.
///
/// Instructions per row bound the time, not latencies: rows in step, and several groups per step as in group_rows,
/// took the same time (Zen 5). Causal rows of 64 keys take 21 ns per row on Zen 5, of which 9 are spent by the callers.
template <class S>
bool ragged_rows(const RaggedRow<typename S::Value>* rows, index_t count) {
  using T = typename S::Value;
  using V = typename S::V;
  constexpr index_t w = S::width;
  constexpr T inf = std::numeric_limits<T>::infinity();
  V lanes[w];
  T numbers[w], copies[w * longest_short_row<S>];
  typename S::M nan = S::none();
  index_t longest = 0;
  for (index_t r = 0; r < count; ++r) longest = std::max(longest, rows[r].n);
  const index_t stride = (longest + w - 1) / w * w;
  // 1. Find the largest product with the scale of each row. An absent row has the product 0.
  for (index_t r = count; r < w; ++r) lanes[r] = S::set(T{0});
  for (index_t r = 0; r < count; ++r) {
    const RaggedRow<T>& row = rows[r];
    T* copy = copies + r * stride;
    V top = S::set(-inf);
    for (index_t i = 0; i < stride; i += w) {
      const V v = load_up_to<S>(row.in + i, row.n - i, -inf);
      S::store(copy + i, v);
      nan = S::either(nan, S::unordered(v, v));
      top = S::max(top, v);
    }
    lanes[r] = S::mul(top, S::set(row.scale.high));
  }
  const V top = fold<S, Maximum>(lanes);
  if (S::any(nan) || !shifts_exactly<S>(top)) return false;
  const V magic = S::set(ExpConstants<T>::magic);
  S::store(numbers, S::sub(S::add(top, magic), magic));
  // 2. Compute the exponentials. An absent row has the sum w.
  for (index_t r = count; r < w; ++r) lanes[r] = S::set(T{1});
  for (index_t r = 0; r < count; ++r) {
    T* e = copies + r * stride;
    const Exp<S> exp(rows[r].scale, numbers[r]);
    V sum = S::set(T{0});
    for (index_t i = 0; i < stride; i += w) {
      const V v = exp(S::load(e + i));
      S::store(e + i, v);
      sum = S::add(sum, v);
    }
    lanes[r] = sum;
  }
  S::store(numbers, S::div(S::set(T{1}), fold<S, Sum>(lanes)));
  // 3. Divide the rows by their sums.
  for (index_t r = 0; r < count; ++r) {
    const T* e = copies + r * stride;
    T* y = rows[r].out;
    const V factor = S::set(numbers[r]);
    const index_t columns = rows[r].n + rows[r].masked;
    index_t i = 0;
    for (; i < std::min(columns, stride); i += w)
      store_up_to<S>(y + i, S::mul(factor, S::load(e + i)), columns - i);
    for (; i < columns; i += w) store_up_to<S>(y + i, S::set(T{0}), columns - i);
    if (rows[r].n == 1) *y = 1;  // e · (1 / e) may differ from 1 by an ulp
  }
  return true;
}

/// Spreads the reduction of every `n` neighbouring lanes over these lanes.
template <class S, class Operation, int n, int distance = 1>
SSMAX_INLINE typename S::V spread(typename S::V v) {
  if constexpr (distance >= n) {
    return v;
  } else {
    return spread<S, Operation, n, 2 * distance>(
        Operation::template apply<S>(v, S::template swap<distance>(v)));
  }
}

/// Normalizes `count` vectors of packed rows in step. If a row is irregular, returns false and leaves x
/// unchanged.
template <class S, int n, int count>
SSMAX_INLINE bool normalise_packed(typename S::V* x, const Exp<S>& exp) {
  using T = typename S::Value;
  using V = typename S::V;
  const V magic = S::set(ExpConstants<T>::magic);
  V biases[count];
  bool regular = true;
  SSMAX_UNROLL
  for (int k = 0; k < count; ++k) {
    const V top = S::mul(spread<S, Maximum, n>(x[k]), exp.high);
    regular = regular && !S::any(S::unordered(x[k], x[k])) && shifts_exactly<S>(top);
    biases[k] = S::sub(magic, S::sub(S::add(top, magic), magic));
  }
  if (!regular) return false;
  exp.template apply<count>(x, biases);
  SSMAX_UNROLL
  for (int k = 0; k < count; ++k) x[k] = S::div(x[k], spread<S, Sum, n>(x[k]));
  return true;
}

template <class S, int n>
SSMAX_INLINE index_t packed_rows_of(const typename S::Value* in, typename S::Value* out, index_t rows,
                                    Scale<typename S::Value> scale) {
  using T = typename S::Value;
  using V = typename S::V;
  constexpr index_t w = S::width;
  constexpr int chains = 2;
  const index_t count = rows * n;
  const Exp<S> exp(scale, T{0});
  for (index_t i = 0; i < count; i += chains * w) {
    V x[chains];
    SSMAX_UNROLL
    for (int k = 0; k < chains; ++k) x[k] = load_up_to<S>(in + i + k * w, count - i - k * w, T{0});
    if (!normalise_packed<S, n, chains>(x, exp)) return i / n;
    SSMAX_UNROLL
    for (int k = 0; k < chains; ++k) store_up_to<S>(out + i + k * w, x[k], count - i - k * w);
  }
  return rows;
}

template <class S>
index_t packed_rows(const typename S::Value* in, typename S::Value* out, index_t rows, index_t n,
                    Scale<typename S::Value> scale) {
  if constexpr (S::width > 8) {
    if (n == 8) return packed_rows_of<S, 8>(in, out, rows, scale);
  }
  if constexpr (S::width > 4) {
    if (n == 4) return packed_rows_of<S, 4>(in, out, rows, scale);
  }
  if constexpr (S::width > 2) {
    if (n == 2) return packed_rows_of<S, 2>(in, out, rows, scale);
  }
  if constexpr (S::width > 1) {
    if (n == 1) return packed_rows_of<S, 1>(in, out, rows, scale);
  }
  return 0;
}

template <class T>
struct KernelTable<ShortRowKernels<T>> {
  using S = Simd<T>;
  static constexpr ShortRowKernels<T> value{
      .longest = longest_short_row<S>,
      .group = group_rows<S>,
      .packed = packed_rows<S>,
      .ragged = ragged_rows<S>,
  };
};
