/// @defgroup scaling Scalings (scaling.hpp)
/// Scalings. A scaling computes the multiplier c of a row's logits, y = softmax(c·z), and the gradient of its
/// parameters.
///
/// | scaling | multiplier | source |
/// |---|---|---|
/// | Softmax | 1 | |
/// | SSMax | s·ln n + b | arXiv:2501.19399; with b: its configuration (d) |
/// | LogN | ln n | arXiv:2501.19399, configuration (c); Chiang & Cholak, arXiv:2202.12172 |
/// | SizeTable | s·p_n + b | arXiv:2501.19399, the model of its Figure 2 |
/// | QwenLogN | max(1, ln(p+1) / ln L) | Qwen, use_logn_attn |
/// | Llama4Temperature | 1 + a·ln(1 + floor((p+1)/F)) | Llama 4, attn_temperature_tuning |
/// | MinistralTemperature | 1 + β·ln(1 + floor(p/L)) | Ministral 3 |
/// | InklingTemperature | 1 + α·ln max(1, (p+1)/F) | Inkling, log_scaling_alpha, log_scaling_n_floor |
/// | AdjustedSize | another scaling, for max(floor, n + offset) in place of n | s·ln(n+1), s·ln max(2, n) |
/// | PerQuery | c[batch, head, query], which you compute | arXiv:2411.12892, 2506.16640, 2602.11139 |
/// | Constant | any number | |
///
/// The number n counts the visible keys of the row. The position p is the query's own, counted from 0 (row.hpp). The
/// terms s, b and ln n multiply the logits. (Softmax is shift-invariant: adding a term to every logit has no effect.)
/// Scalings compute c in double, so s·ln n is never rounded to float.
///
/// row.hpp defines the concept, for a scaling of your own.
///
/// The scalings of published models depend on the query's own position p and not on n. PerQuery has a multiplier for
/// each query, which you compute outside of the attention, and its gradient.
///
/// For packed documents, the models' code in Hugging Face differs. Ministral 3 counts within the document
/// (`position_ids`). With the mask Documents, these scalings also count within the document. Llama 4 and Inkling
/// count through the documents. For their p, join masks that do not define positions, such as Causal and a MatrixMask
/// of the documents.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <span>
#include <type_traits>

#include "config.hpp"
#include "detail/checks/error.hpp"
#include "detail/checks/views.hpp"
#include "fast_path.hpp"
#include "query.hpp"
#include "row.hpp"
#include "view.hpp"

/// @addtogroup scaling
/// @{
SSMAX_BEGIN_DETAIL

/// Throws unless there is one element per head.
template <class T>
void check_per_head(const char* function, const char* name, std::span<T> values, index_t heads) {
  check_equal(function, name, "has extent", std::ssize(values), "heads are", heads);
}

/// Throws unless there is one element for each n from 1 to `largest_n`. More elements are allowed.
template <class T>
void check_table(const char* function, const char* name, std::span<T> values, index_t largest_n) {
  const auto extent = static_cast<index_t>(values.size());
  if (extent < largest_n) fail_value(function, name, "has extent", extent, "the largest n is", largest_n);
}

/// Throws unless `values` is [batch, heads, queries]. Any strides.
inline void check_per_query(const char* function, const char* name, const AnyView& values,
                            const QueryShape& shape) {
  const index_t extents[] = {shape.batch, shape.heads, shape.queries};
  check_fits_attention(function, name, values, extents);
}

SSMAX_END

SSMAX_BEGIN_DATA

/// The scaling c = 1: plain softmax.
struct Softmax : RowFunctor<Softmax> {
  using RowFunctor::operator();
  /// Returns 1.
  SSMAX_INLINE constexpr double operator()(const Row&) const { return 1.0; }
};

/// c depends on n alone.
template <>
inline constexpr bool by_size<Softmax> = true;

/// The scaling c = ln n: SSMax with s = 1.
struct LogN : RowFunctor<LogN> {
  using RowFunctor::operator();
  /// Returns ln n.
  SSMAX_INLINE double operator()(const Row& row) const { return std::log(static_cast<double>(row.n)); }
};

/// c depends on n alone.
template <>
inline constexpr bool by_size<LogN> = true;

/// One number for all heads, or one number per head.
template <class T>
class PerHead {
 public:
  /// Stores one number for all heads.
  SSMAX_INLINE constexpr PerHead(T value) : value_(value) {}
  /// Stores one number per head. The span must outlive this object.
  SSMAX_INLINE constexpr PerHead(KeptSpan<const T> values) : per_head_(true), values_(values) {}
  /// Returns the number of a head.
  SSMAX_INLINE constexpr double operator[](index_t head) const {
    return static_cast<double>(per_head_ ? values_[static_cast<std::size_t>(head)] : value_);
  }
  /// Throws std::invalid_argument that names `function` and `name` if the extent of a span is not the number of
  /// heads.
  SSMAX_INLINE void check(const char* function, const char* name, index_t heads) const {
    if (per_head_) detail::check_per_head(function, name, values_, heads);
  }
  /// Throws unless the gradient is empty or has one element per head. Exception: for one number for all heads, one
  /// element is allowed.
  SSMAX_INLINE void check_gradient(const char* function, const char* name, std::span<T> gradient,
                                   index_t heads) const {
    const bool of_number = !per_head_ && gradient.size() == 1;
    if (!gradient.empty() && !of_number) detail::check_per_head(function, name, gradient, heads);
  }

 private:
  T value_{};
  bool per_head_ = false;
  std::span<const T> values_{};
};

namespace shared {

/// Adds `value` to the gradient of a head. If the gradient has one element, all heads add to it.
template <class T>
SSMAX_INLINE constexpr void add_to_head(std::span<T> gradient, index_t head, double value) {
  if (gradient.empty()) return;
  gradient[gradient.size() == 1 ? 0 : static_cast<std::size_t>(head)] += static_cast<T>(value);
}

}  // namespace shared

template <class T>
class SSMaxGradient;

/// The scaling c = s·ln n + b. s and b are numbers, or spans with one number per head. The spans must outlive the
/// scaling. (Rows of rank 1 and 2 have one head. Exception: ragged rows of rank 2 have heads.)
template <class T = float>
class SSMax : public RowFunctor<SSMax<T>> {
 public:
  using RowFunctor<SSMax<T>>::operator();

  /// Uses the same s and b for all heads.
  SSMAX_INLINE constexpr explicit SSMax(std::type_identity_t<T> s = T{1}, std::type_identity_t<T> b = T{0})
      : s_(s), b_(b) {}
  /// Uses one s per head and one b per head. If the span of b is empty, b is 0.
  SSMAX_INLINE constexpr explicit SSMax(KeptSpan<const T> s, KeptSpan<const T> b = {})
      : s_(s), b_(b.empty() ? PerHead<T>(T{0}) : PerHead<T>(b)) {}

  /// Returns s·ln n + b.
  SSMAX_INLINE double operator()(const Row& row) const {
    return s_[row.head] * std::log(static_cast<double>(row.n)) + b_[row.head];
  }
  /// Throws std::invalid_argument unless s and b are numbers or have one number per head.
  SSMAX_INLINE void check(index_t heads, index_t, const char* function = "SSMax") const {
    s_.check(function, "s", heads);
    b_.check(function, "b", heads);
  }

  /// Returns this scaling for a backward call, which adds to ds and db. ds and db have one element per head. If s or
  /// b is a number, its gradient may have a single element, to which all heads add. To omit a gradient, pass {}.
  [[nodiscard]] SSMAX_INLINE SSMaxGradient<T> gradient(std::span<T> ds, std::span<T> db = {}) const {
    return {*this, ds, db};
  }

 private:
  friend class SSMaxGradient<T>;

  PerHead<T> s_, b_;
};

/// c depends on the head and n alone.
template <class T>
inline constexpr bool by_size<SSMax<T>> = true;

/// @cond
template <class T>
requires(std::is_constructible_v<double, T>) SSMax(T)
->SSMax<T>;
template <class T>
requires(std::is_constructible_v<double, T>) SSMax(T, T)
->SSMax<T>;
template <class S, class... B>
SSMax(S&&, B&&...) -> SSMax<shared::ElementOf<S>>;
/// @endcond

/// SSMax with gradients. A backward call adds to them: ds[head] += ln n · dc, db[head] += dc.
template <class T>
class SSMaxGradient {
 public:
  /// Stores the scaling and the spans. `scaling.gradient(ds, db)` calls this constructor.
  SSMAX_INLINE constexpr SSMaxGradient(const SSMax<T>& scaling, std::span<T> ds, std::span<T> db)
      : scaling_(scaling), ds_(ds), db_(db) {}

  /// Returns the multiplier of the scaling.
  SSMAX_INLINE double operator()(const Row& row) const { return scaling_(row); }
  /// Adds the terms of ∂loss/∂c of a row to ds and db.
  SSMAX_INLINE void accumulate(const Row& row, double dc) const {
    if (!ds_.empty()) shared::add_to_head(ds_, row.head, std::log(static_cast<double>(row.n)) * dc);
    shared::add_to_head(db_, row.head, dc);
  }
  /// Throws std::invalid_argument if the check of the scaling throws, or if a gradient has the wrong extent.
  SSMAX_INLINE void check(index_t heads, index_t largest_n, const char* function = "SSMax") const {
    scaling_.check(heads, largest_n, function);
    scaling_.s_.check_gradient(function, "ds", ds_, heads);
    scaling_.b_.check_gradient(function, "db", db_, heads);
  }

 private:
  SSMax<T> scaling_;
  std::span<T> ds_, db_;
};

/// c depends on the head and n alone.
template <class T>
inline constexpr bool by_size<SSMaxGradient<T>> = true;

template <class T>
class SizeTableGradient;

/// The scaling c = s·p_n + b with a parameter p_n = p[n-1] for every size n, shared by all heads. The span p has at
/// least as many elements as the largest n. The parameters s and b are as in SSMax. The spans must outlive the
/// scaling.
template <class T = float>
class SizeTable : public RowFunctor<SizeTable<T>> {
 public:
  using RowFunctor<SizeTable<T>>::operator();

  /// Uses the same s and b for all heads.
  SSMAX_INLINE constexpr explicit SizeTable(KeptSpan<const T> p, T s = T{1}, T b = T{0})
      : p_(p), s_(s), b_(b) {}
  /// Uses one s per head and one b per head. If the span of b is empty, b is 0.
  SSMAX_INLINE constexpr SizeTable(KeptSpan<const T> p, KeptSpan<const T> s, KeptSpan<const T> b = {})
      : p_(p), s_(s), b_(b.empty() ? PerHead<T>(T{0}) : PerHead<T>(b)) {}

  /// Returns s·p_n + b.
  SSMAX_INLINE double operator()(const Row& row) const {
    return s_[row.head] * static_cast<double>(p_[static_cast<std::size_t>(row.n - 1)]) + b_[row.head];
  }
  /// Throws std::invalid_argument unless p has an element for the largest n and s and b pass the checks of SSMax.
  SSMAX_INLINE void check(index_t heads, index_t largest_n, const char* function = "SizeTable") const {
    detail::check_table(function, "p", p_, largest_n);
    s_.check(function, "s", heads);
    b_.check(function, "b", heads);
  }

  /// Returns this scaling for a backward call, which adds to dp, ds and db. The span dp has at least as many elements
  /// as the largest n. The spans ds and db are as in SSMax. To omit a gradient, pass {}.
  [[nodiscard]] SSMAX_INLINE SizeTableGradient<T> gradient(std::span<T> dp, std::span<T> ds = {},
                                                           std::span<T> db = {}) const {
    return {*this, dp, ds, db};
  }

 private:
  friend class SizeTableGradient<T>;

  std::span<const T> p_;
  PerHead<T> s_, b_;
};

/// c depends on the head and n alone.
template <class T>
inline constexpr bool by_size<SizeTable<T>> = true;

/// @cond
template <class P, class... S>
SizeTable(P&&, S&&...) -> SizeTable<shared::ElementOf<P>>;
/// @endcond

/// SizeTable with gradients. A backward call adds to them: dp[n-1] += s·dc, ds[head] += p_n·dc, db[head] += dc.
template <class T>
class SizeTableGradient {
 public:
  /// Stores the scaling and the spans. `scaling.gradient(dp, ds, db)` calls this constructor.
  SSMAX_INLINE constexpr SizeTableGradient(const SizeTable<T>& scaling, std::span<T> dp, std::span<T> ds,
                                           std::span<T> db)
      : scaling_(scaling), dp_(dp), ds_(ds), db_(db) {}

  /// Returns the multiplier of the scaling.
  SSMAX_INLINE double operator()(const Row& row) const { return scaling_(row); }
  /// Adds the terms of ∂loss/∂c of a row to dp, ds and db.
  SSMAX_INLINE void accumulate(const Row& row, double dc) const {
    const auto size = static_cast<std::size_t>(row.n - 1);
    if (!dp_.empty()) dp_[size] += static_cast<T>(scaling_.s_[row.head] * dc);
    shared::add_to_head(ds_, row.head, static_cast<double>(scaling_.p_[size]) * dc);
    shared::add_to_head(db_, row.head, dc);
  }
  /// Throws std::invalid_argument if the check of the scaling throws, or if a gradient has the wrong extent.
  SSMAX_INLINE void check(index_t heads, index_t largest_n, const char* function = "SizeTable") const {
    scaling_.check(heads, largest_n, function);
    if (!dp_.empty()) detail::check_table(function, "dp", dp_, largest_n);
    scaling_.s_.check_gradient(function, "ds", ds_, heads);
    scaling_.b_.check_gradient(function, "db", db_, heads);
  }

 private:
  SizeTable<T> scaling_;
  std::span<T> dp_, ds_, db_;
};

/// c depends on the head and n alone.
template <class T>
inline constexpr bool by_size<SizeTableGradient<T>> = true;

/// Another scaling with max(floor, n + offset) in place of n:
///
///     AdjustedSize{SSMax<float>{s}, 1}                         s·ln(n + 1)
///     AdjustedSize{SSMax<float>{s, b}.gradient(ds, db), 0, 2}  s·ln max(2, n) + b, learnt
template <class S>
class AdjustedSize : public RowFunctor<AdjustedSize<S>> {
  static_assert(Scaling<S>, "ssmax::AdjustedSize: S is a scaling");

 public:
  using RowFunctor<AdjustedSize<S>>::operator();

  /// Copies the scaling. Stores offset and floor.
  SSMAX_INLINE constexpr explicit AdjustedSize(const S& scaling, index_t offset = 0, index_t floor = 1)
      : scaling_(scaling), offset_(offset), floor_(floor) {}

  /// Returns the multiplier of the scaling for the adjusted n.
  template <std::derived_from<Row> R>
  requires requires(const S& scaling, const R& row) { scaling(row); }
  SSMAX_INLINE double operator()(const R& row) const { return static_cast<double>(scaling_(adjusted(row))); }
  /// Passes dc with the adjusted n to the scaling, which adds to its gradients.
  template <std::derived_from<Row> R>
  requires requires(const S& scaling, const R& row) { scaling.accumulate(row, 0.0); }
  SSMAX_INLINE void accumulate(const R& row, double dc) const { scaling_.accumulate(adjusted(row), dc); }
  /// Throws std::invalid_argument if floor is below 1 or offset is above half of the range of index_t. Also throws if
  /// the check of the scaling fails for the largest adjusted n.
  SSMAX_INLINE void check_shape(const QueryShape& shape, const char* function = "AdjustedSize") const {
    if (floor_ < 1) detail::fail_value(function, "floor", "is", floor_, "must be at least", 1);
    if (offset_ > detail::max_counted)
      detail::fail_value(function, "offset", "is", offset_, "must be at most", detail::max_counted);
    QueryShape largest = shape;
    largest.keys = adjusted(Row{.n = shape.keys}).n;
    detail::check_scaling(function, scaling_, largest);
  }

 private:
  template <class R>
  SSMAX_INLINE constexpr R adjusted(R row) const {
    row.n = std::max(floor_, row.n + offset_);
    return row;
  }

  S scaling_;
  index_t offset_, floor_;
};

/// The fast path of the inner scaling.
template <class S>
inline constexpr bool by_size<AdjustedSize<S>> = by_size<S>;

/// The scaling with the same multiplier for every row.
struct Constant : RowFunctor<Constant> {
  double multiplier;  ///< The multiplier c.

  /// Sets the multiplier.
  SSMAX_INLINE constexpr explicit Constant(double c) : multiplier(c) {}
  using RowFunctor::operator();
  /// Returns the multiplier c.
  SSMAX_INLINE constexpr double operator()(const Row&) const { return multiplier; }
};

/// c is the same for all rows.
template <>
inline constexpr bool by_size<Constant> = true;

/// The scaling c = max(1, ln(p+1) / ln L) of Qwen. L is the trained length, at least 2.
struct QwenLogN : RowFunctor<QwenLogN> {
  index_t trained_length;  ///< L, the trained length.

  /// Sets L.
  SSMAX_INLINE constexpr explicit QwenLogN(index_t length) : trained_length(length) {}
  using RowFunctor::operator();
  /// Returns max(1, ln(p+1) / ln L).
  SSMAX_INLINE double operator()(const Row& row) const {
    const auto seen = static_cast<double>(row.position + 1);
    return row.position < trained_length ? 1.0
                                         : std::log(seen) / std::log(static_cast<double>(trained_length));
  }
  /// Throws std::invalid_argument if L is below 2.
  SSMAX_INLINE void check(index_t, index_t, const char* function = "QwenLogN") const {
    detail::check_at_least(function, "trained_length", trained_length, 2);
  }
};

/// The scaling c = 1 + a·ln(1 + floor((p+1)/F)) of Llama 4.
struct Llama4Temperature : RowFunctor<Llama4Temperature> {
  double scale;          ///< a.
  index_t floor_length;  ///< F.

  /// Sets a and F.
  SSMAX_INLINE constexpr explicit Llama4Temperature(double a = 0.1, index_t f = 8192)
      : scale(a), floor_length(f) {}
  using RowFunctor::operator();
  /// Returns 1 + a·ln(1 + floor((p+1)/F)).
  SSMAX_INLINE double operator()(const Row& row) const {
    return 1.0 + scale * std::log1p(static_cast<double>((row.position + 1) / floor_length));
  }
  /// Throws std::invalid_argument if F is below 1.
  SSMAX_INLINE void check(index_t, index_t, const char* function = "Llama4Temperature") const {
    detail::check_at_least(function, "floor_length", floor_length, 1);
  }
};

/// The scaling c = 1 + β·ln(1 + floor(p/L)) of Ministral 3.
struct MinistralTemperature : RowFunctor<MinistralTemperature> {
  double scale;            ///< β.
  index_t trained_length;  ///< L.

  /// Sets β and L.
  SSMAX_INLINE constexpr explicit MinistralTemperature(double beta = 0.1, index_t length = 16384)
      : scale(beta), trained_length(length) {}
  using RowFunctor::operator();
  /// Returns 1 + β·ln(1 + floor(p/L)).
  SSMAX_INLINE double operator()(const Row& row) const {
    return 1.0 + scale * std::log1p(static_cast<double>(row.position / trained_length));
  }
  /// Throws std::invalid_argument if L is below 1.
  SSMAX_INLINE void check(index_t, index_t, const char* function = "MinistralTemperature") const {
    detail::check_at_least(function, "trained_length", trained_length, 1);
  }
};

/// The scaling c = 1 + α·ln max(1, (p+1)/F) of Inkling. Inkling also multiplies its position bias by c. To do so,
/// pass the bias as the score function `Bias(bias)`: a scaling multiplies the result of the score function.
struct InklingTemperature : RowFunctor<InklingTemperature> {
  double alpha;          ///< α.
  index_t floor_length;  ///< F.

  /// Sets α and F.
  SSMAX_INLINE constexpr explicit InklingTemperature(double a = 0.1, index_t f = 128'000)
      : alpha(a), floor_length(f) {}
  using RowFunctor::operator();
  /// Returns 1 + α·ln max(1, (p+1)/F).
  SSMAX_INLINE double operator()(const Row& row) const {
    const double ratio = static_cast<double>(row.position + 1) / static_cast<double>(floor_length);
    return ratio > 1 ? 1.0 + alpha * std::log(ratio) : 1.0;
  }
  /// Throws std::invalid_argument if F is below 1.
  SSMAX_INLINE void check(index_t, index_t, const char* function = "InklingTemperature") const {
    detail::check_at_least(function, "floor_length", floor_length, 1);
  }
};

template <class T, class G>
class PerQueryGradient;

/// The scaling c = c[batch, head, query], for example a query-aware scale. T is float, double, half or bfloat16. Any
/// strides; stride 0 broadcasts. Query 0 is the first query of the call: over a cache, the first new query. Over MPI,
/// every rank passes the multipliers of the whole sequence. For rows of rank 2, the multipliers are [1, 1, rows].
template <class T>
class PerQuery {
 public:
  /// Stores the view [batch, heads, queries]. The multipliers must outlive the scaling.
  SSMAX_INLINE constexpr explicit PerQuery(const View<const T, 3>& multipliers) : c_(multipliers) {}

  /// Returns c[batch, head, query].
  SSMAX_INLINE constexpr double operator()(const PlacedRow& row) const {
    return static_cast<double>(c_(row.batch, row.head, row.query));
  }
  /// Throws std::invalid_argument unless c has the extents of the queries.
  SSMAX_INLINE void check_shape(const QueryShape& shape, const char* function = "PerQuery") const {
    detail::check_per_query(function, "c", c_, shape);
  }

  /// Returns this scaling for a backward call, which adds to dc. dc has the extents of c and is float or double. If c
  /// is broadcast along a dimension, give dc stride 0 there: the gradient is then summed over the dimension.
  template <class G>
  [[nodiscard]] SSMAX_INLINE constexpr PerQueryGradient<T, G> gradient(const View<G, 3>& dc) const {
    return {*this, dc};
  }

 private:
  template <class, class>
  friend class PerQueryGradient;

  View<const T, 3> c_;
};

/// Deduces T from the element type of a view.
template <class T>
PerQuery(View<T, 3>) -> PerQuery<std::remove_const_t<T>>;

/// PerQuery with a gradient. A backward call adds to it: dc[batch, head, query] += ∂loss/∂c of the query.
template <class T, class G>
class PerQueryGradient : public PerQuery<T> {
  static_assert(std::floating_point<G>, "ssmax::PerQuery::gradient: sums are float or double");

 public:
  /// Stores the scaling and the view. `scaling.gradient(dc)` calls this constructor.
  SSMAX_INLINE constexpr PerQueryGradient(const PerQuery<T>& scaling, const View<G, 3>& dc)
      : PerQuery<T>(scaling), dc_(dc) {}

  /// Adds ∂loss/∂c to the element of the query.
  SSMAX_INLINE void accumulate(const PlacedRow& row, double dc) const {
    dc_(row.batch, row.head, row.query) += static_cast<G>(dc);
  }
  /// Throws std::invalid_argument unless c and dc have the extents of the queries and do not overlap.
  SSMAX_INLINE void check_shape(const QueryShape& shape, const char* function = "PerQuery") const {
    PerQuery<T>::check_shape(shape, function);
    detail::check_per_query(function, "dc", dc_, shape);
    detail::check_no_overlap(function, "dc", dc_, "c", this->c_);
  }

 private:
  View<G, 3> dc_;
};

SSMAX_END
/// @}
