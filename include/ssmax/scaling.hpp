/// @defgroup scaling Scalings (scaling.hpp)
/// Scalings: the multiplier c of a row's logits, y = softmax(c·z), and the gradient of its parameters.
///
/// | scaling | multiplier | source |
/// |---|---|---|
/// | Softmax | 1 | |
/// | SSMax | s·ln n + b | arXiv:2501.19399; with b its configuration (d) |
/// | LogN | ln n | configuration (c); Chiang & Cholak, arXiv:2202.12172 |
/// | SizeTable | s·p_n + b | the form that its Figure 2 was learnt with |
/// | QwenLogN | max(1, ln(p+1) / ln L) | Qwen, use_logn_attn |
/// | Llama4Temperature | 1 + a·ln(1 + floor((p+1)/F)) | Llama 4, attn_temperature_tuning |
/// | MinistralTemperature | 1 + β·ln(1 + floor(p/L)) | Ministral 3 |
/// | InklingTemperature | 1 + α·ln max(1, (p+1)/F) | Inkling, log_scaling_alpha, log_scaling_n_floor |
/// | AdjustedSize | that of another scaling for max(floor, n + offset) | s·ln(n+1), s·ln max(2, n) |
/// | PerQuery | c[batch, head, query] | formed outside: arXiv:2411.12892, 2506.16640, 2602.11139 |
/// | Constant | any; yarn(x) = (0.1·ln x + 1)² | YaRN's attention factor, arXiv:2309.00071 |
///
/// n counts the keys that the row sees, p is the query's own position from 0 (row.hpp). s, b and ln n multiply:
/// adding any of them to every logit would do nothing, since softmax is shift-invariant. c is computed in
/// double: s·ln n is never rounded to float.
///
/// Those by position are in scaling_by_position.hpp, PerQuery is in scaling_per_query.hpp; this header has them,
/// too. row.hpp says what it takes to be one.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <span>
#include <type_traits>
#include <utility>

#include "config.hpp"
#include "detail/checks/error.hpp"
#include "detail/checks/views.hpp"
#include "fast_path.hpp"
#include "query.hpp"
#include "row.hpp"
#include "scaling_by_position.hpp"
#include "scaling_per_query.hpp"
#include "view.hpp"

/// @addtogroup scaling
/// @{
SSMAX_BEGIN_DETAIL

/// One element per head.
template <class T>
void check_per_head(const char* function, const char* name, std::span<T> values, index_t heads) {
  const auto extent = static_cast<index_t>(values.size());
  if (extent != heads) fail_value(function, name, "has extent", extent, "heads are", heads);
}

/// One element for each n from 1 to the largest, or more.
template <class T>
void check_table(const char* function, const char* name, std::span<T> values, index_t largest_n) {
  const auto extent = static_cast<index_t>(values.size());
  if (extent < largest_n) fail_value(function, name, "has extent", extent, "the largest n is", largest_n);
}

SSMAX_END

SSMAX_BEGIN_DATA

/// c = 1: plain softmax.
struct Softmax : RowFunctor<Softmax> {
  using RowFunctor::operator();
  /// 1.
  SSMAX_INLINE constexpr double operator()(const Row&) const { return 1.0; }
};

/// c depends on n alone.
template <>
inline constexpr bool by_size<Softmax> = true;

/// c = ln n: SSMax without its s.
struct LogN : RowFunctor<LogN> {
  using RowFunctor::operator();
  /// ln n.
  SSMAX_INLINE double operator()(const Row& row) const { return std::log(static_cast<double>(row.n)); }
};

/// c depends on n alone.
template <>
inline constexpr bool by_size<LogN> = true;

/// A number or one number per head.
template <class T>
class PerHead {
 public:
  /// One number for all heads.
  SSMAX_INLINE constexpr PerHead(T value) : value_(value) {}
  /// One number per head. The span must outlive this.
  SSMAX_INLINE constexpr PerHead(std::span<const T> values) : per_head_(true), values_(values) {}
  /// The number of a head.
  SSMAX_INLINE constexpr double operator[](index_t head) const {
    return static_cast<double>(per_head_ ? values_[static_cast<std::size_t>(head)] : value_);
  }
  /// Throws std::invalid_argument that names `function` and `name` unless there is one number per head or for all.
  SSMAX_INLINE void check(const char* function, const char* name, index_t heads) const {
    if (per_head_) detail::check_per_head(function, name, values_, heads);
  }
  /// Throws unless the gradient is left out, has one element per head, or the one of a number that all heads
  /// share.
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

/// Adds to a gradient's element of a head, or to its only one.
template <class T>
SSMAX_INLINE constexpr void add_to_head(std::span<T> gradient, index_t head, double value) {
  if (gradient.empty()) return;
  gradient[gradient.size() == 1 ? 0 : static_cast<std::size_t>(head)] += static_cast<T>(value);
}

/// What a std::vector, std::array or std::span holds.
template <class Range>
using ElementOf =
    typename decltype(std::span(std::declval<std::add_lvalue_reference_t<Range>>()))::value_type;

}  // namespace shared

template <class T>
class SSMaxGradient;

/// c = s·ln n + b. s and b are numbers, or spans with one number per head, which must outlive the scaling.
/// (Rows of rank 1 and 2 have one head.)
template <class T = float>
class SSMax : public RowFunctor<SSMax<T>> {
 public:
  using RowFunctor<SSMax<T>>::operator();

  /// The same s and b for all heads.
  SSMAX_INLINE constexpr explicit SSMax(std::type_identity_t<T> s = T{1}, std::type_identity_t<T> b = T{0})
      : s_(s), b_(b) {}
  /// One s per head, and one b per head or, where that is empty, none.
  SSMAX_INLINE constexpr explicit SSMax(std::span<const T> s, std::span<const T> b = {})
      : s_(s), b_(b.empty() ? PerHead<T>(T{0}) : PerHead<T>(b)) {}
  /// @cond
  // clang-format off
  template <class... Range>
  requires(shared::Temporary<Range, const T> || ...)
  explicit SSMax(Range&&...) = delete;  // a temporary ends before the scaling is used: give the vector a name
  // clang-format on
  /// @endcond

  /// s·ln n + b.
  SSMAX_INLINE double operator()(const Row& row) const {
    return s_[row.head] * std::log(static_cast<double>(row.n)) + b_[row.head];
  }
  /// Throws std::invalid_argument unless s and b are numbers or have one number per head.
  SSMAX_INLINE void check(index_t heads, index_t, const char* function = "SSMax") const {
    s_.check(function, "s", heads);
    b_.check(function, "b", heads);
  }

  /// For backward: adds to ds and db, which have one element per head. Where s or b is a number, its gradient
  /// may also have one element in all, to which every head adds. Either may be left out: {}.
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

/// SSMax with somewhere to put ∂s and ∂b: ds[head] += ln n · dc, db[head] += dc.
template <class T>
class SSMaxGradient {
 public:
  /// `scaling.gradient(ds, db)` is this.
  SSMAX_INLINE constexpr SSMaxGradient(const SSMax<T>& scaling, std::span<T> ds, std::span<T> db)
      : scaling_(scaling), ds_(ds), db_(db) {}

  /// The multiplier of the scaling.
  SSMAX_INLINE double operator()(const Row& row) const { return scaling_(row); }
  /// Adds ∂loss/∂c of a row to the element of its head, or to the only one.
  SSMAX_INLINE void accumulate(const Row& row, double dc) const {
    if (!ds_.empty()) shared::add_to_head(ds_, row.head, std::log(static_cast<double>(row.n)) * dc);
    shared::add_to_head(db_, row.head, dc);
  }
  /// The check of the scaling; throws also unless every gradient has its extent or is left out.
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

/// c = s·p_n + b with a learnt p_n = p[n-1] for every size n, shared by all heads: p has at least as many
/// elements as the largest n. s and b as in SSMax. The spans must outlive the scaling.
template <class T = float>
class SizeTable : public RowFunctor<SizeTable<T>> {
 public:
  using RowFunctor<SizeTable<T>>::operator();

  /// The same s and b for all heads.
  SSMAX_INLINE constexpr explicit SizeTable(std::span<const T> p, T s = T{1}, T b = T{0})
      : p_(p), s_(s), b_(b) {}
  /// One s per head, and one b per head or, where that is empty, none.
  SSMAX_INLINE constexpr SizeTable(std::span<const T> p, std::span<const T> s, std::span<const T> b = {})
      : p_(p), s_(s), b_(b.empty() ? PerHead<T>(T{0}) : PerHead<T>(b)) {}
  /// @cond
  // clang-format off
  template <class... Range>
  requires(shared::Temporary<Range, const T> || ...)
  explicit SizeTable(Range&&...) = delete;  // a temporary ends before the scaling is used: give the vector a name
  // clang-format on
  /// @endcond

  /// s·p_n + b.
  SSMAX_INLINE double operator()(const Row& row) const {
    return s_[row.head] * static_cast<double>(p_[static_cast<std::size_t>(row.n - 1)]) + b_[row.head];
  }
  /// Throws std::invalid_argument unless p reaches to the largest n, and s and b are as SSMax wants them.
  SSMAX_INLINE void check(index_t heads, index_t largest_n, const char* function = "SizeTable") const {
    detail::check_table(function, "p", p_, largest_n);
    s_.check(function, "s", heads);
    b_.check(function, "b", heads);
  }

  /// For backward: adds to dp, of p's extent or at least the largest n, and to ds and db as SSMax does. Each
  /// may be left out: {}.
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

/// SizeTable with somewhere to put its gradients: dp[n-1] += s·dc, ds[head] += p_n·dc, db[head] += dc.
template <class T>
class SizeTableGradient {
 public:
  /// `scaling.gradient(dp, ds, db)` is this.
  SSMAX_INLINE constexpr SizeTableGradient(const SizeTable<T>& scaling, std::span<T> dp, std::span<T> ds,
                                           std::span<T> db)
      : scaling_(scaling), dp_(dp), ds_(ds), db_(db) {}

  /// The multiplier of the scaling.
  SSMAX_INLINE double operator()(const Row& row) const { return scaling_(row); }
  /// Adds ∂loss/∂c of a row to the element of its head, or to the only one.
  SSMAX_INLINE void accumulate(const Row& row, double dc) const {
    const auto size = static_cast<std::size_t>(row.n - 1);
    if (!dp_.empty()) dp_[size] += static_cast<T>(scaling_.s_[row.head] * dc);
    shared::add_to_head(ds_, row.head, static_cast<double>(scaling_.p_[size]) * dc);
    shared::add_to_head(db_, row.head, dc);
  }
  /// The check of the scaling; throws also unless every gradient has its extent or is left out.
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

/// Another scaling, asked about max(floor, n + offset) in place of n:
///
///     AdjustedSize{SSMax<float>{s}, 1}                         s·ln(n + 1)
///     AdjustedSize{SSMax<float>{s, b}.gradient(ds, db), 0, 2}  s·ln max(2, n) + b, learnt
template <class S>
class AdjustedSize : public RowFunctor<AdjustedSize<S>> {
  static_assert(Scaling<S>, "ssmax::AdjustedSize: S is a scaling");

 public:
  using RowFunctor<AdjustedSize<S>>::operator();

  /// The scaling, which is copied, and what becomes of n.
  SSMAX_INLINE constexpr explicit AdjustedSize(const S& scaling, index_t offset = 0, index_t floor = 1)
      : scaling_(scaling), offset_(offset), floor_(floor) {}

  /// The scaling's multiplier for that n.
  template <std::derived_from<Row> R>
  requires requires(const S& scaling, const R& row) { scaling(row); }
  SSMAX_INLINE double operator()(const R& row) const { return static_cast<double>(scaling_(adjusted(row))); }
  /// Adds to what the scaling learns.
  template <std::derived_from<Row> R>
  requires requires(const S& scaling, const R& row) { scaling.accumulate(row, 0.0); }
  SSMAX_INLINE void accumulate(const R& row, double dc) const { scaling_.accumulate(adjusted(row), dc); }
  /// Throws std::invalid_argument unless floor is at least 1, offset at most half of what index_t holds, and the
  /// scaling fits the largest n that comes of them.
  SSMAX_INLINE void check_shape(const QueryShape& shape, const char* function = "AdjustedSize") const {
    if (floor_ < 1) detail::fail_value(function, "floor", "is", floor_, "must be at least", 1);
    if (offset_ > detail::most_counted)
      detail::fail_value(function, "offset", "is", offset_, "must be at most", detail::most_counted);
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

/// The fast path of the scaling that it holds.
template <class S>
inline constexpr bool by_size<AdjustedSize<S>> = by_size<S>;

/// The same multiplier for every row.
struct Constant : RowFunctor<Constant> {
  double multiplier;  ///< c.

  /// c.
  SSMAX_INLINE constexpr explicit Constant(double c) : multiplier(c) {}
  /// YaRN's factor for a context extended by `extension`. Pass it here or scale cos and sin by its root, not
  /// both.
  SSMAX_INLINE static Constant yarn(double extension) {
    const double root = 0.1 * std::log(extension) + 1.0;
    return Constant{root * root};
  }
  using RowFunctor::operator();
  /// c.
  SSMAX_INLINE constexpr double operator()(const Row&) const { return multiplier; }
};

/// The same c for all rows.
template <>
inline constexpr bool by_size<Constant> = true;

SSMAX_END
/// @}
