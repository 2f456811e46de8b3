/// @defgroup scaling Scalings (scaling.hpp)
/// Scalings: the multiplier c of a row's logits, y = softmax(c·z), and the gradient of its parameters.
///
/// A scaling is any callable Row -> number, so a lambda is one. Optional members:
///
///     void check(index_t heads, index_t largest_n) const  called before any write; throws on bad sizes
///     void check_shape(const QueryShape&) const           likewise, for what has a number per query
///     void accumulate(const Row&, double dc) const        adds dc·∂c/∂parameter to the caller's arrays;
///                                                         this makes it learnable
///
/// One that has to know which query of the call it is asked about takes a PlacedRow in place of the Row. It
/// is asked about every query, also where many see the same keys.
///
/// A member of these names with another signature, or an operator() that is not const, is an
/// error of the compiler. The multiplier may be negative or zero. It is computed in double:
/// s·ln n is never rounded to float.
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
/// n counts the keys that the row sees, p is the 0-based position of its query. s, b and ln n multiply:
/// adding any of them to every logit would do nothing, since softmax is shift-invariant.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <span>
#include <type_traits>
#include <utility>

#include "config.hpp"
#include "detail/checks/error.hpp"
#include "detail/checks/optional_member.hpp"
#include "detail/checks/views.hpp"
#include "query.hpp"
#include "view.hpp"

namespace ssmax {
/// @addtogroup scaling
/// @{
inline namespace SSMAX_DATA_NAMESPACE {

/// What a scaling may look at: the head, the query's 0-based position, the number of keys the query sees (at
/// least 1).
struct Row {
  index_t head = 0;      ///< From 0.
  index_t position = 0;  ///< Of the query, from 0.
  index_t n = 0;         ///< How many keys the query sees.

  /// All three are equal.
  SSMAX_INLINE constexpr bool operator==(const Row&) const = default;
};

/// A Row, and which query of the call it belongs to.
struct PlacedRow : Row {
  index_t batch = 0;  ///< The query's batch entry, from 0.
  index_t query = 0;  ///< Its place among the queries of the call, from 0; among all, where q is a part.

  /// All five are equal.
  SSMAX_INLINE constexpr bool operator==(const PlacedRow&) const = default;
};

/// Which dimension of a matrix a functor normalises over.
enum class Axis {
  rows,    ///< Each row: the last dimension.
  columns  ///< Each column.
};

}  // namespace SSMAX_DATA_NAMESPACE

inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

SSMAX_OPTIONAL_MEMBER(has_scaling_check, "scaling", check, std::same_as<void>,
                      "void check(index_t heads, index_t largest_n) const", index_t{}, index_t{})
SSMAX_OPTIONAL_MEMBER(has_scaling_shape_check, "scaling", check_shape, std::same_as<void>,
                      "void check_shape(const QueryShape&) const", std::declval<const QueryShape&>())
SSMAX_OPTIONAL_MEMBER(learns_multiplier, "scaling", accumulate, std::same_as<void>,
                      "void accumulate(const Row&, double dc) const", std::declval<const PlacedRow&>(),
                      double{})

template <class S>
consteval bool find_reads_query() {
  constexpr bool takes_row = requires(const S& scaling, const Row& row) { scaling(row); };
  constexpr bool learns_from_row = requires(const S& scaling, const Row& row) {
    scaling.accumulate(row, 0.0);
  };
  return !takes_row || (learns_multiplier<S> && !learns_from_row);
}

/// A Row is not enough for the scaling: it asks which query of the call the row belongs to.
template <class S>
constexpr bool reads_query = find_reads_query<S>();

template <class S>
consteval bool is_scaling() {
  constexpr bool fits = requires(const S& scaling, const PlacedRow& row) {
    { scaling(row) } -> std::convertible_to<double>;
  };
  constexpr bool nearly_fits = requires(S & scaling, const PlacedRow& row) {
    { scaling(row) } -> std::convertible_to<double>;
  };
  static_assert(fits || !nearly_fits, "ssmax: the operator()(const Row&) of a scaling must be const");
  // Each of them refuses a member of its name that does not fit.
  if constexpr (fits)
    (void)has_scaling_check<S>, (void)has_scaling_shape_check<S>, (void)learns_multiplier<S>;
  return fits;
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE

inline namespace SSMAX_DATA_NAMESPACE {

/// A type that gives the multiplier of a row: the top of scaling.hpp.
template <class S>
concept Scaling = detail::is_scaling<S>();

/// A scaling that takes the gradient of its multiplier.
template <class S>
concept LearnableScaling = Scaling<S> && detail::learns_multiplier<S>;

}  // namespace SSMAX_DATA_NAMESPACE

inline namespace SSMAX_CODE_NAMESPACE {

/// Teaches the functors a container X: softmax.hpp has those for spans, vectors and views, eigen.hpp those
/// for Eigen. It offers `apply(scaling, in, out, axis)` and `apply(scaling, in, axis)`, which returns
/// the result.
template <class X>
struct Adaptor;

namespace detail {

template <class S>
SSMAX_INLINE void check_scaling(const S& scaling, const QueryShape& shape) {
  if constexpr (has_scaling_check<S>) scaling.check(shape.heads, shape.keys);
  if constexpr (has_scaling_shape_check<S>) scaling.check_shape(shape);
}

/// One element per head.
template <class T>
void check_per_head(const char* name, std::span<T> values, index_t heads) {
  const auto extent = static_cast<index_t>(values.size());
  if (extent != heads) fail_value("scaling", name, "has extent", extent, "heads are", heads);
}

/// One element for each n from 1 to the largest, or more.
template <class T>
void check_table(const char* name, std::span<T> values, index_t largest_n) {
  const auto extent = static_cast<index_t>(values.size());
  if (extent < largest_n) fail_value("scaling", name, "has extent", extent, "the largest n is", largest_n);
}

/// [batch, heads, queries], with any strides.
template <class T>
void check_per_query(const char* name, const View<T, 3>& values, const QueryShape& shape) {
  const std::array<index_t, 3> expected{shape.batch, shape.heads, shape.queries};
  for (int i = 0; i < 3; ++i) {
    const index_t extent = expected[static_cast<std::size_t>(i)];
    if (values.extent(i) != extent) {
      fail_extent("scaling", name, i, values.extent(i), "the attention", extent);
    }
  }
  if (values.empty()) return;
  if (values.data_handle() == nullptr) {
    fail_value("scaling", name, "is null but has size", values.size(), "must be", 0);
  }
  check_reach("scaling", name, values);
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE

inline namespace SSMAX_DATA_NAMESPACE {

/// Makes a scaling callable on data: `scaling(in, out)` and `out = scaling(in)`, for everything that has an
/// Adaptor.
template <class Derived>
struct RowFunctor {
  /// out = softmax(c·in). out may be in, or lies apart from it.
  template <class In, class Out>
  requires requires { sizeof(Adaptor<std::remove_cvref_t<In>>); }
  SSMAX_INLINE void operator()(const In& in, Out&& out, Axis axis = Axis::rows) const {
    Adaptor<std::remove_cvref_t<In>>::apply(static_cast<const Derived&>(*this), in, out, axis);
  }
  /// softmax(c·in), in a container of its own.
  template <class In>
  requires requires { sizeof(Adaptor<std::remove_cvref_t<In>>); }
  [[nodiscard]] SSMAX_INLINE auto operator()(const In& in, Axis axis = Axis::rows) const {
    return Adaptor<std::remove_cvref_t<In>>::apply(static_cast<const Derived&>(*this), in, axis);
  }
};

/// c = 1: plain softmax.
struct Softmax : RowFunctor<Softmax> {
  using RowFunctor::operator();
  /// 1.
  SSMAX_INLINE constexpr double operator()(const Row&) const { return 1.0; }
};

/// c = ln n: SSMax without its s.
struct LogN : RowFunctor<LogN> {
  using RowFunctor::operator();
  /// ln n.
  SSMAX_INLINE double operator()(const Row& row) const { return std::log(static_cast<double>(row.n)); }
};

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
  /// Throws std::invalid_argument, which says `name`, unless there is one number per head, or one for all.
  SSMAX_INLINE void check(const char* name, index_t heads) const {
    if (per_head_) detail::check_per_head(name, values_, heads);
  }
  /// Throws unless the gradient is left out, has one element per head, or the one of a number that all heads
  /// share.
  SSMAX_INLINE void check_gradient(const char* name, std::span<T> gradient, index_t heads) const {
    const bool of_number = !per_head_ && gradient.size() == 1;
    if (!gradient.empty() && !of_number) detail::check_per_head(name, gradient, heads);
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
  SSMAX_INLINE void check(index_t heads, index_t) const {
    s_.check("s", heads);
    b_.check("b", heads);
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
  SSMAX_INLINE void check(index_t heads, index_t largest_n) const {
    scaling_.check(heads, largest_n);
    scaling_.s_.check_gradient("ds", ds_, heads);
    scaling_.b_.check_gradient("db", db_, heads);
  }

 private:
  SSMax<T> scaling_;
  std::span<T> ds_, db_;
};

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
  SSMAX_INLINE void check(index_t heads, index_t largest_n) const {
    detail::check_table("p", p_, largest_n);
    s_.check("s", heads);
    b_.check("b", heads);
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
  SSMAX_INLINE void check(index_t heads, index_t largest_n) const {
    scaling_.check(heads, largest_n);
    if (!dp_.empty()) detail::check_table("dp", dp_, largest_n);
    scaling_.s_.check_gradient("ds", ds_, heads);
    scaling_.b_.check_gradient("db", db_, heads);
  }

 private:
  SizeTable<T> scaling_;
  std::span<T> dp_, ds_, db_;
};

/// c = max(1, ln(p+1) / ln L), L the length the model was trained at (at least 2).
struct QwenLogN : RowFunctor<QwenLogN> {
  index_t trained_length;  ///< L.

  /// L.
  SSMAX_INLINE constexpr explicit QwenLogN(index_t length) : trained_length(length) {}
  using RowFunctor::operator();
  /// max(1, ln(p+1) / ln L).
  SSMAX_INLINE double operator()(const Row& row) const {
    const auto seen = static_cast<double>(row.position + 1);
    return row.position < trained_length ? 1.0
                                         : std::log(seen) / std::log(static_cast<double>(trained_length));
  }
  /// Throws std::invalid_argument if L is below 2.
  SSMAX_INLINE void check(index_t, index_t) const {
    if (trained_length < 2)
      detail::fail_value("scaling", "trained_length", "is", trained_length, "must be at least", 2);
  }
};

/// c = 1 + a·ln(1 + floor((p+1)/F)).
struct Llama4Temperature : RowFunctor<Llama4Temperature> {
  double scale;          ///< a.
  index_t floor_length;  ///< F.

  /// a and F.
  SSMAX_INLINE constexpr explicit Llama4Temperature(double a = 0.1, index_t f = 8192)
      : scale(a), floor_length(f) {}
  using RowFunctor::operator();
  /// 1 + a·ln(1 + floor((p+1)/F)).
  SSMAX_INLINE double operator()(const Row& row) const {
    return 1.0 + scale * std::log1p(static_cast<double>((row.position + 1) / floor_length));
  }
  /// Throws std::invalid_argument if F is below 1.
  SSMAX_INLINE void check(index_t, index_t) const {
    if (floor_length < 1)
      detail::fail_value("scaling", "floor_length", "is", floor_length, "must be at least", 1);
  }
};

/// c = 1 + β·ln(1 + floor(p/L)).
struct MinistralTemperature : RowFunctor<MinistralTemperature> {
  double scale;            ///< β.
  index_t trained_length;  ///< L.

  /// β and L.
  SSMAX_INLINE constexpr explicit MinistralTemperature(double beta = 0.1, index_t length = 16384)
      : scale(beta), trained_length(length) {}
  using RowFunctor::operator();
  /// 1 + β·ln(1 + floor(p/L)).
  SSMAX_INLINE double operator()(const Row& row) const {
    return 1.0 + scale * std::log1p(static_cast<double>(row.position / trained_length));
  }
  /// Throws std::invalid_argument if L is below 1.
  SSMAX_INLINE void check(index_t, index_t) const {
    if (trained_length < 1)
      detail::fail_value("scaling", "trained_length", "is", trained_length, "must be at least", 1);
  }
};

/// c = 1 + α·ln max(1, (p+1)/F). Inkling multiplies its position bias by it, too, as any scaling does here with
/// what a score has made of a logit: give the bias as the score, `Bias(bias)`.
struct InklingTemperature : RowFunctor<InklingTemperature> {
  double alpha;          ///< α.
  index_t floor_length;  ///< F.

  /// α and F.
  SSMAX_INLINE constexpr explicit InklingTemperature(double a = 0.1, index_t f = 128'000)
      : alpha(a), floor_length(f) {}
  using RowFunctor::operator();
  /// 1 + α·ln max(1, (p+1)/F).
  SSMAX_INLINE double operator()(const Row& row) const {
    const double ratio = static_cast<double>(row.position + 1) / static_cast<double>(floor_length);
    return ratio > 1 ? 1.0 + alpha * std::log(ratio) : 1.0;
  }
  /// Throws std::invalid_argument if F is below 1.
  SSMAX_INLINE void check(index_t, index_t) const {
    if (floor_length < 1)
      detail::fail_value("scaling", "floor_length", "is", floor_length, "must be at least", 1);
  }
};

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
  /// Throws std::invalid_argument unless floor is at least 1 and the scaling fits.
  SSMAX_INLINE void check_shape(const QueryShape& shape) const {
    if (floor_ < 1) detail::fail_value("scaling", "floor", "is", floor_, "must be at least", 1);
    if (offset_ > detail::most_counted)
      detail::fail_value("scaling", "offset", "is", offset_, "must be at most", detail::most_counted);
    QueryShape largest = shape;
    largest.keys = adjusted(Row{.n = shape.keys}).n;
    detail::check_scaling(scaling_, largest);
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

template <class T, class G>
class PerQueryGradient;

/// c = c[batch, head, query], formed outside of the attention: what a query-aware scale gives. T is float,
/// double, half or bfloat16. Strides are free, and stride 0 broadcasts. Queries are counted in the call: in
/// decode the first new query is 0; over MPI they are those of the whole sequence, on every rank. Rows of rank 2 are
/// the queries of one head, [1, 1, rows].
template <class T>
class PerQuery {
 public:
  /// [batch, heads, queries], which must outlive the scaling.
  SSMAX_INLINE constexpr explicit PerQuery(const View<const T, 3>& multipliers) : c_(multipliers) {}

  /// c[batch, head, query].
  SSMAX_INLINE constexpr double operator()(const PlacedRow& row) const {
    return static_cast<double>(c_(row.batch, row.head, row.query));
  }
  /// Throws std::invalid_argument unless c has the extents of the queries.
  SSMAX_INLINE void check_shape(const QueryShape& shape) const { detail::check_per_query("c", c_, shape); }

  /// For backward: adds to dc, of c's extents, float or double. A dimension of stride 0 is summed over, as it
  /// must be where c is broadcast along it.
  template <class G>
  [[nodiscard]] SSMAX_INLINE constexpr PerQueryGradient<T, G> gradient(const View<G, 3>& dc) const {
    return {*this, dc};
  }

 private:
  template <class, class>
  friend class PerQueryGradient;

  View<const T, 3> c_;
};

/// Of a view: T is its type of elements.
template <class T>
PerQuery(View<T, 3>) -> PerQuery<std::remove_const_t<T>>;

/// PerQuery with somewhere to put ∂c: dc[batch, head, query] += ∂loss/∂c of that query.
template <class T, class G>
class PerQueryGradient : public PerQuery<T> {
  static_assert(std::floating_point<G>, "ssmax::PerQuery::gradient: sums are float or double");

 public:
  /// `scaling.gradient(dc)` is this.
  SSMAX_INLINE constexpr PerQueryGradient(const PerQuery<T>& scaling, const View<G, 3>& dc)
      : PerQuery<T>(scaling), dc_(dc) {}

  /// Adds to the element of the query.
  SSMAX_INLINE void accumulate(const PlacedRow& row, double dc) const {
    dc_(row.batch, row.head, row.query) += static_cast<G>(dc);
  }
  /// Throws std::invalid_argument unless c and dc have the extents of the queries, and lie apart.
  SSMAX_INLINE void check_shape(const QueryShape& shape) const {
    PerQuery<T>::check_shape(shape);
    detail::check_per_query("dc", dc_, shape);
    detail::check_apart("scaling", "dc", dc_, "c", this->c_);
  }

 private:
  View<G, 3> dc_;
};

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

}  // namespace SSMAX_DATA_NAMESPACE
/// @}
}  // namespace ssmax
