// Implements the kernels for gradients of rows. Included once per target. w is the number of lanes.
//
// A short row spends its time on the reduction of a vector to one number. Short rows are therefore computed w
// at a time. Their w partial sums are folded into one vector, with about 2 shuffles per row and no latency to
// wait for. Rows that are computed alone add their lanes in the same order, so that dlogits of all rows have the same
// bits. The sum for dc takes the lanes of up to 16 short rows.
//
// Softmax of 2 to 16 vectors keeps y and dy in registers between its two passes. Rows of up to 2048 elements take these
// kernels. Measured: docs/measured.md.

/// Returns a vector whose lanes add up to the sum of the elements whose log-probability is not -inf.
template <class S>
SSMAX_INLINE typename S::V unmasked_lanes(const typename S::Value* in, const typename S::Value* log_p,
                                          index_t n) {
  using T = typename S::Value;
  typename S::V s = S::set(T{0});
  index_t i = 0;
  for (; i + S::width <= n; i += S::width) {
    s = S::add(s, S::keep(unmasked<S>(S::load(log_p + i)), S::load(in + i)));
  }
  if (i < n) {
    s = S::add(s,
               S::keep(unmasked<S>(S::load_part(log_p + i, n - i, T{0})), S::load_part(in + i, n - i, T{0})));
  }
  return s;
}

template <class S>
typename S::Value row_sum_unmasked(const typename S::Value* in, const typename S::Value* log_p, index_t n) {
  return S::reduce_sum(unmasked_lanes<S>(in, log_p, n));
}

/// The sum Σ u·z of a kernel. A negative c takes one more instruction per vector. Rows of more than 16 vectors have a
/// kernel for other c: docs/measured.md.
enum class LogitSum { none, of_positive_c, of_any_c };

/// An accumulator of Σ u·z that returns c·u for each u. A logit of -inf, and with a negative c also one of +inf, has
/// u = 0. It becomes finite, because 0·inf is NaN.
template <class S, LogitSum kind>
struct LogitGradient {
  using T = typename S::Value;
  using V = typename S::V;

  V factor, sum, lowest, highest;

  SSMAX_INLINE explicit LogitGradient(T c)
      : factor(S::set(c)),
        sum(S::set(T{0})),
        lowest(S::set(std::numeric_limits<T>::lowest())),
        highest(S::set(std::numeric_limits<T>::max())) {}

  SSMAX_INLINE V whole(V u, [[maybe_unused]] const T* z, [[maybe_unused]] index_t at) {
    if constexpr (kind != LogitSum::none) add(u, S::load(z + at));
    return S::mul(factor, u);
  }
  SSMAX_INLINE V part(V u, [[maybe_unused]] const T* z, [[maybe_unused]] index_t at,
                      [[maybe_unused]] index_t count) {
    if constexpr (kind != LogitSum::none) add(u, S::load_part(z + at, count, T{0}));
    return S::mul(factor, u);
  }
  SSMAX_INLINE V up_to(V u, [[maybe_unused]] const T* z, [[maybe_unused]] index_t at,
                       [[maybe_unused]] index_t count) {
    if constexpr (kind != LogitSum::none) add(u, load_up_to<S>(z + at, count, T{0}));
    return S::mul(factor, u);
  }

 private:
  SSMAX_INLINE void add(V u, V z) {
    z = S::max(lowest, z);
    if constexpr (kind == LogitSum::of_any_c) z = S::min(highest, z);
    sum = S::fma(u, z, sum);
  }
};

/// Adds the lanes of rows, one row after the other, and writes one number for `rows_of_sum` rows.
template <class S>
class SumsOfRows {
  using T = typename S::Value;

 public:
  SSMAX_INLINE SumsOfRows(index_t rows_of_sum, T* to)
      : sum_(S::set(T{0})), left_(rows_of_sum), rows_of_sum_(rows_of_sum), to_(to) {}
  SSMAX_INLINE void add(typename S::V lanes) {
    sum_ = S::add(sum_, lanes);
    if (--left_ == 0) write();
  }
  /// Writes the sum of the last rows, which are fewer.
  SSMAX_INLINE void finish() {
    if (left_ < rows_of_sum_) write();
  }

 private:
  SSMAX_INLINE void write() {
    T numbers[S::width];
    S::store(numbers, fold_one<S>(sum_));
    *to_++ = numbers[0];
    sum_ = S::set(T{0});
    left_ = rows_of_sum_;
  }

  typename S::V sum_;
  index_t left_, rows_of_sum_;
  T* to_;
};

/// The gradient of one row's softmax. The functions return vectors whose lanes add up to the sum. `vectors` is
/// 1 for rows of at most one vector, or 0 for any row.
template <class S>
struct SoftmaxRowGradient {
  using T = typename S::Value;
  using V = typename S::V;
  static constexpr index_t w = S::width;

  template <int vectors>
  SSMAX_INLINE static V total(const T* y, const T* dy, index_t n) {
    if constexpr (vectors == 0) return dot_lanes<S>(y, dy, n);
    // A product that is added is part of an FMA: the compiler would choose per caller whether to make it one.
    return S::fma(load_up_to<S>(y, n, T{0}), load_up_to<S>(dy, n, T{0}), S::set(T{0}));
  }

  template <int vectors, LogitSum kind>
  SSMAX_INLINE static V write(const T* y, const T* dy, const T* z, index_t n, V mean, T c, T* dz) {
    LogitGradient<S, kind> even(c), odd(c);
    if constexpr (vectors == 1) {
      const V u = S::mul(load_up_to<S>(y, n, T{0}), S::sub(load_up_to<S>(dy, n, T{0}), mean));
      store_up_to<S>(dz, even.up_to(u, z, 0, n), n);
      return even.sum;
    }
    index_t i = 0;
    for (; i + 2 * w <= n; i += 2 * w) {
      const V u0 = S::mul(S::load(y + i), S::sub(S::load(dy + i), mean));
      const V u1 = S::mul(S::load(y + i + w), S::sub(S::load(dy + i + w), mean));
      S::store(dz + i, even.whole(u0, z, i));
      S::store(dz + i + w, odd.whole(u1, z, i + w));
    }
    for (; i + w <= n; i += w) {
      const V u = S::mul(S::load(y + i), S::sub(S::load(dy + i), mean));
      S::store(dz + i, even.whole(u, z, i));
    }
    if (i < n) {
      const V u = S::mul(S::load_part(y + i, n - i, T{0}), S::sub(S::load_part(dy + i, n - i, T{0}), mean));
      S::store_part(dz + i, odd.part(u, z, i, n - i), n - i);
    }
    return S::add(even.sum, odd.sum);
  }
};

/// The gradient of the logarithm of one row's softmax, for rows whose probabilities are not stored.
template <class S>
struct LogSoftmaxRowGradient {
  using T = typename S::Value;
  using V = typename S::V;
  static constexpr index_t w = S::width;
  static constexpr Scale<T> log2e{
      sizeof(T) == sizeof(double) ? T(1.4426950408889634) : T(0x1.715476p+0f),
      sizeof(T) == sizeof(double) ? T(2.0355273740931033e-17) : T(0x1.4ae0cp-26f)};

  template <int vectors>
  SSMAX_INLINE static V total(const T* log_p, const T* dy, index_t n) {
    return unmasked_lanes<S>(dy, log_p, n);
  }

  SSMAX_INLINE static V difference(const Exp<S>& exp, V log_p, V dy, V total) {
    return S::keep(unmasked<S>(log_p), S::fma(S::sub(S::set(T{0}), total), exp(log_p), dy));
  }

  template <int vectors, LogitSum kind>
  SSMAX_INLINE static V write(const T* log_p, const T* dy, const T* z, index_t n, V total, T c, T* dz) {
    const Exp<S> exp(log2e, T{0});
    LogitGradient<S, kind> gradient(c);
    index_t i = 0;
    for (; i + w <= n; i += w) {
      const V u = difference(exp, S::load(log_p + i), S::load(dy + i), total);
      S::store(dz + i, gradient.whole(u, z, i));
    }
    if (i < n) {
      const V u =
          difference(exp, S::load_part(log_p + i, n - i, T{0}), S::load_part(dy + i, n - i, T{0}), total);
      S::store_part(dz + i, gradient.part(u, z, i, n - i), n - i);
    }
    return gradient.sum;
  }
};

/// Longest row that is computed w rows at a time. A longer row is computed alone: its y and dy are then read
/// from the first-level cache in the second pass, and its reduction overlaps the next row's first pass.
inline constexpr index_t longest_in_group = 128;

/// Computes `count` rows, where count is w or 1. `vectors` is as in Row.
template <class S, class Row, int vectors, LogitSum kind, index_t count>
SSMAX_INLINE void gradients_of_group(const GradientRows<typename S::Value>& rows, index_t first,
                                     typename S::Value c, SumsOfRows<S>& sums) {
  using T = typename S::Value;
  constexpr index_t w = S::width;
  constexpr bool with_logits = kind != LogitSum::none;
  const T* out = rows.out + first * rows.out_stride;
  const T* dout = rows.dout + first * rows.dout_stride;
  typename S::V lanes[w];
  T numbers[w];
  SSMAX_UNROLL
  for (index_t k = 0; k < count; ++k)
    lanes[k] = Row::template total<vectors>(out + k * rows.out_stride, dout + k * rows.dout_stride, rows.n);
  if (count > 1) S::store(numbers, fold<S, Sum>(lanes));
  for (index_t k = 0; k < count; ++k) {
    const typename S::V total = count > 1 ? S::set(numbers[k]) : fold_one<S>(lanes[k]);
    lanes[k] = Row::template write<vectors, kind>(
        out + k * rows.out_stride, dout + k * rows.dout_stride,
        with_logits ? rows.logits + (first + k) * rows.logits_stride : rows.logits, rows.n, total, c,
        rows.dlogits + (first + k) * rows.dlogits_stride);
  }
  if (!with_logits) return;
  for (index_t k = 0; k < count; ++k) sums.add(lanes[k]);
}

template <class S, class Row, int vectors, LogitSum kind>
void gradients_of_rows(const GradientRows<typename S::Value>& rows, typename S::Value c, index_t rows_of_sum,
                       typename S::Value* to) {
  SumsOfRows<S> sums(rows_of_sum, to);
  index_t r = 0;
  if (rows.n <= longest_in_group) {
    for (; r + S::width <= rows.rows; r += S::width)
      gradients_of_group<S, Row, vectors, kind, S::width>(rows, r, c, sums);
  }
  for (; r < rows.rows; ++r) gradients_of_group<S, Row, vectors, kind, 1>(rows, r, c, sums);
  if (kind != LogitSum::none) sums.finish();
}

/// Number of vectors of y, and of dy, that are kept in registers: half of a target's registers hold both.
template <class S>
inline constexpr int most_in_registers = S::tile_rows;

/// Computes rows of softmax one at a time. The first `vectors` vectors of y and dy stay in registers between the
/// two passes, others are read twice. `has_rest`: a row has more vectors.
template <class S, int vectors, bool has_rest, LogitSum kind>
void gradients_in_registers(const GradientRows<typename S::Value>& all, typename S::Value c,
                            index_t rows_of_sum, typename S::Value* to) {
  using T = typename S::Value;
  using V = typename S::V;
  using Row = SoftmaxRowGradient<S>;
  const GradientRows<T> rows = all;  // a copy stays in registers, because no store changes it
  constexpr index_t w = S::width, last = (vectors - 1) * w;
  constexpr bool with_logits = kind != LogitSum::none;
  const index_t kept = has_rest ? vectors * w : rows.n, rest = rows.n - kept;
  const T* y = rows.out;
  const T* dy = rows.dout;
  const T* z = rows.logits;
  T* dz = rows.dlogits;
  SumsOfRows<S> sums(rows_of_sum, to);
  for (index_t r = 0; r < rows.rows; ++r) {
    V y_kept[vectors], dy_kept[vectors], sum[2] = {S::set(T{0}), S::set(T{0})};
    SSMAX_UNROLL
    for (int i = 0; i < vectors; ++i) {
      const bool whole = i + 1 < vectors;
      y_kept[i] = whole ? S::load(y + i * w) : load_up_to<S>(y + last, kept - last, T{0});
      dy_kept[i] = whole ? S::load(dy + i * w) : load_up_to<S>(dy + last, kept - last, T{0});
      sum[i % 2] = S::fma(y_kept[i], dy_kept[i], sum[i % 2]);
    }
    V lanes = S::add(sum[0], sum[1]);
    if constexpr (has_rest) lanes = S::add(lanes, dot_lanes<S>(y + kept, dy + kept, rest));
    const V mean = fold_one<S>(lanes);
    LogitGradient<S, kind> gradient(c);
    SSMAX_UNROLL
    for (int i = 0; i < vectors; ++i) {
      const V u = S::mul(y_kept[i], S::sub(dy_kept[i], mean));
      if (i + 1 < vectors) {
        S::store(dz + i * w, gradient.whole(u, z, i * w));
      } else {
        store_up_to<S>(dz + last, gradient.up_to(u, z, last, kept - last), kept - last);
      }
    }
    lanes = gradient.sum;
    if constexpr (has_rest) {
      lanes = S::add(lanes, Row::template write<0, kind>(y + kept, dy + kept, with_logits ? z + kept : z,
                                                         rest, mean, c, dz + kept));
    }
    if (with_logits) {
      sums.add(lanes);
      z += rows.logits_stride;
    }
    y += rows.out_stride;
    dy += rows.dout_stride;
    dz += rows.dlogits_stride;
  }
  if (with_logits) sums.finish();
}

template <class S, LogitSum kind, int vectors = 2>
void gradients_of_vectors(const GradientRows<typename S::Value>& rows, typename S::Value c,
                          index_t rows_of_sum, typename S::Value* sums) {
  if (rows.n <= vectors * S::width)
    return gradients_in_registers<S, vectors, false, kind>(rows, c, rows_of_sum, sums);
  if constexpr (vectors < most_in_registers<S>) {
    gradients_of_vectors<S, kind, vectors + 1>(rows, c, rows_of_sum, sums);
  } else {
    gradients_in_registers<S, vectors, true, kind>(rows, c, rows_of_sum, sums);
  }
}

template <class S, LogitSum kind>
void short_softmax_gradients(const GradientRows<typename S::Value>& rows, typename S::Value c,
                             index_t rows_of_sum, typename S::Value* sums) {
  if (rows.n > S::width) return gradients_of_vectors<S, kind>(rows, c, rows_of_sum, sums);
  gradients_of_rows<S, SoftmaxRowGradient<S>, 1, kind>(rows, c, rows_of_sum, sums);
}

template <class S>
void softmax_gradients(const GradientRows<typename S::Value>& rows, typename S::Value c, index_t rows_of_sum,
                       typename S::Value* sums) {
  using Row = SoftmaxRowGradient<S>;
  const bool has_logits = rows.logits != nullptr;
  if (rows.n <= 16 * S::width) {
    return has_logits ? short_softmax_gradients<S, LogitSum::of_any_c>(rows, c, rows_of_sum, sums)
                      : short_softmax_gradients<S, LogitSum::none>(rows, c, rows_of_sum, sums);
  }
  if (!has_logits) return gradients_of_rows<S, Row, 0, LogitSum::none>(rows, c, rows_of_sum, sums);
  if (c < 0) return gradients_of_rows<S, Row, 0, LogitSum::of_any_c>(rows, c, rows_of_sum, sums);
  gradients_of_rows<S, Row, 0, LogitSum::of_positive_c>(rows, c, rows_of_sum, sums);
}

template <class S>
void log_softmax_gradients(const GradientRows<typename S::Value>& rows, typename S::Value c,
                           index_t rows_of_sum, typename S::Value* sums) {
  using Row = LogSoftmaxRowGradient<S>;
  if (rows.logits == nullptr) return gradients_of_rows<S, Row, 0, LogitSum::none>(rows, c, rows_of_sum, sums);
  gradients_of_rows<S, Row, 0, LogitSum::of_any_c>(rows, c, rows_of_sum, sums);
}

template <class S>
typename S::Value row_backward(const GradientRows<typename S::Value>& row, typename S::Value mean,
                               typename S::Value c) {
  using T = typename S::Value;
  using Row = SoftmaxRowGradient<S>;
  const T *y = row.out, *dy = row.dout, *z = row.logits;
  const typename S::V m = S::set(mean);
  return S::reduce_sum(
      z == nullptr ? Row::template write<0, LogitSum::none>(y, dy, z, row.n, m, c, row.dlogits)
                   : Row::template write<0, LogitSum::of_positive_c>(y, dy, z, row.n, m, c, row.dlogits));
}

template <class S, LogitSum kind>
typename S::V row_log_gradient(const GradientRows<typename S::Value>& row, const typename S::Value* p,
                               typename S::Value total, typename S::Value c) {
  using T = typename S::Value;
  using V = typename S::V;
  constexpr index_t w = S::width;
  const T *log_p = row.out, *dy = row.dout, *z = row.logits;
  T* dz = row.dlogits;
  const index_t n = row.n;
  const V k = S::set(total);
  LogitGradient<S, kind> gradient(c);
  index_t i = 0;
  for (; i + w <= n; i += w) {
    const V u = S::keep(unmasked<S>(S::load(log_p + i)), S::sub(S::load(dy + i), S::mul(k, S::load(p + i))));
    S::store(dz + i, gradient.whole(u, z, i));
  }
  if (i < n) {
    const V u =
        S::keep(unmasked<S>(S::load_part(log_p + i, n - i, T{0})),
                S::sub(S::load_part(dy + i, n - i, T{0}), S::mul(k, S::load_part(p + i, n - i, T{0}))));
    S::store_part(dz + i, gradient.part(u, z, i, n - i), n - i);
  }
  return gradient.sum;
}

template <class S>
typename S::Value row_log_backward(const GradientRows<typename S::Value>& row, const typename S::Value* p,
                                   typename S::Value total, typename S::Value c) {
  return S::reduce_sum(row.logits == nullptr
                           ? row_log_gradient<S, LogitSum::none>(row, p, total, c)
                           : row_log_gradient<S, LogitSum::of_positive_c>(row, p, total, c));
}

template <class T>
struct KernelTable<RowGradientKernels<T>> {
  using S = Simd<T>;
  static constexpr RowGradientKernels<T> value{
      .sum_unmasked = row_sum_unmasked<S>,
      .backward = row_backward<S>,
      .log_backward = row_log_backward<S>,
      .longest = 2048,
      .backward_rows = softmax_gradients<S>,
      .log_backward_rows = log_softmax_gradients<S>,
  };
};
