/// @defgroup softmax Rows (softmax.hpp)
/// Computes Softmax and Scalable-Softmax over rows, their logarithms, and the gradients of both.
///
///     softmax               y_i = exp(c·z_i) / Σ_j exp(c·z_j)          c = scaling(row), see scaling.hpp
///     log_softmax           y_i = c·z_i - ln Σ_j exp(c·z_j)
///     logsumexp             l   = ln Σ_j exp(c·z_j)
///     softmax_backward      dz  = c·u, u = y ⊙ (dy - ⟨dy, y⟩), dc = ⟨u, z⟩, passed to the scaling
///     log_softmax_backward  dz  = c·u, u = dy - exp(y)·Σ dy,   dc = ⟨u, z⟩, passed to the scaling
///
/// | rank of the view | extents |
/// |---|---|
/// | 1; also std::vector, std::span | [key] |
/// | 2 | [row, key] |
/// | 3 | [head, query, key] |
/// | 4 | [batch, head, query, key] |
///
/// You choose the strides. A last stride other than 1 computes rows along another dimension of a tensor: for logits
/// [edge, head], `View<const float, 2>(z, {heads, edges}, {1, heads})` has a row per head. Rows of this kind are
/// copied, with masked keys, to scratch and back in blocks, and results are bit-identical to those of a contiguous
/// copy.
///
/// Rows of float, half and bfloat16 are computed in float, rows of double in double. The sums run over the visible keys
/// of the row (mask.hpp), and n is the number of visible keys. row.hpp defines the position of a row. Masked keys never
/// affect a result. The result of a masked key is 0, or -inf in log form. For rank 2 to 4, logsumexp writes one number
/// per row. For one row, logsumexp returns the number.
///
/// | special value | result |
/// |---|---|
/// | a visible logit of -inf | probability 0 for every sign of c; the key counts in n |
/// | no visible key | 0; log form and logsumexp: -inf; the gradient is 0 |
/// | NaN in a visible logit | the row is NaN |
/// | a visible logit of +inf, c >= 0 | the row is NaN |
/// | a visible logit of +inf, c < 0 | probability 0 |
/// | c is NaN or infinite | the row is NaN |
/// | a probability below 2^-125 of the largest (2^-1021 in double) | may be 0 |
/// | a log-probability or gradient beyond the range of the result's type | infinite |
/// | c·z overflows | logits with the largest c·z share the probability equally, the others have 0 |
///
/// For all other finite logits and finite c, of either sign, 0 or 1e308, the result has the bounds below.
///
/// | result | bound in float | bound in double |
/// |---|---|---|
/// | relative error of a probability, rows of up to 10^6 elements | 5e-7 | 2e-15 |
/// | error of log_softmax and logsumexp | 5e-7·(1 + abs(result)) | 1e-15·(1 + abs(result)) |
/// | the same in rounding modes other than to nearest (fesetround), ordinary logits | 5e-5 | 5e-11 |
///
/// No log-probability is above 0. The kernels compute exp within 1 ulp (double: 1.25), round arguments at
/// magnitude 1/2 only, and add the sums of blocks in double. Exception: dc of up to 16 rows of at most 128 elements is
/// one sum in the compute type. The multiplier is not rounded to float. Exception: log form and gradients round the
/// multiplier once.
///
/// An executor (execution.hpp) distributes the rows among its threads. Results and gradients are bit-identical for
/// every executor. The threads of the executor call the scaling and the mask. Exception: only the caller's thread
/// calls `accumulate` of a scaling with parameter gradients.
///
/// `out` may be the memory of the logits. Otherwise `out` must not overlap the logits. Exception: `out` of logsumexp
/// must never overlap the logits. Throws std::invalid_argument for every error, before anything is written. The
/// functions do not allocate, but in these cases:
///
/// | case | allocates |
/// |---|---|
/// | the backward has parameter gradients, and more than one thread or a last stride other than 1 | 8 bytes per row |
/// | a last stride is not 1 | each task, for each view: 256 KiB or 16 rows, whichever is larger |
///
/// If a task gets no memory, it throws std::bad_alloc, and results are partly written.
#pragma once

#include <concepts>
#include <numeric>
#include <span>
#include <type_traits>
#include <vector>

#include "detail/rows/driver.hpp"
#include "detail/rows/fill.hpp"
#include "detail/rows/groups.hpp"
#include "detail/rows/softmax_groups.hpp"
#include "detail/rows/strided.hpp"
#include "execution.hpp"
#include "mask.hpp"
#include "scaling.hpp"
#include "view.hpp"

/// @addtogroup softmax
/// @{
SSMAX_BEGIN_CODE
namespace detail {

template <class X, class Y>
constexpr void check_storage() {
  static_assert(
      RowStorage<std::remove_const_t<X>> && RowStorage<Y>,
      "ssmax::softmax: elements are float, double, ssmax::half or ssmax::bfloat16; a storage type of "
      "your own needs a unit without SSMAX_COMPILED");
  static_assert(std::same_as<ComputeType<X>, ComputeType<Y>>,
                "ssmax::softmax: logits and out are computed in one type: double logits need a double out");
}

/// Checks the arguments of every forward call with a result per logit. Returns the groups of the rows.
template <class X, class Y, class S, class M>
RowDivision<S, M> check_rows(const char* function, const View<X, 4>& logits, const View<Y, 4>& out,
                             const S& scaling, const M& mask) {
  check_strided_view(function, "logits", logits);
  check_strided_output(function, "out", out);
  check_same_extents(function, "out", out, "logits", logits);
  check_in_place_or_no_overlap(function, "out", out, "logits", logits);
  return RowDivision<S, M>(function, logits, scaling, mask);
}

template <class S>
double multiplier_of(const S& scaling, const RowGroup& group) {
  return group.keys.size() == 0 ? 0.0 : static_cast<double>(scaling(group.row));
}

template <class X, class Y, class S, class M, class E>
void softmax_rows(const View<X, 4>& logits, const View<Y, 4>& out, const S& scaling, const M& mask,
                  E& executor) {
  using T = ComputeType<X>;
  using In = std::remove_const_t<X>;
  const auto rows = check_rows("softmax", logits, out, scaling, mask);
  if (out.empty()) return;
  const SoftmaxKernels<T> tables{kernels<RowKernels<T>>(), kernels<ShortRowKernels<T>>()};
  for_each_group_of(RowViews<In, Y, 1>{{logits}, out}, rows, executor,
                    SoftmaxGroups<In, Y, S>(tables, scaling, rows.collects()));
}

/// Calls compute(in, n, c, out) for the visible keys of each row. The result of a masked key is `masked`.
template <class X, class Y, class Division, class S, class E, class Compute>
void each_row(const RowViews<X, Y, 1>& all, const Division& rows, const S& scaling, E& executor, float masked,
              const Compute& compute) {
  for_each_group_of(all, rows, executor,
                    [&](const RowViews<X, Y, 1>& views, const RowGroup& group) SSMAX_INLINE_LAMBDA {
                      const double c = multiplier_of(scaling, group);
                      for (index_t r = 0; r < group.rows; ++r) {
                        Y* to = group.first(views.out, r);
                        fill_masked(to, group.elements.size(), group.keys, masked);
                        if (group.keys.size() == 0) continue;
                        const X* from = group.first(views.in[0], r) + group.keys.begin;
                        compute(from, group.keys.size(), c, to + group.keys.begin);
                      }
                    });
}

template <class X, class Y, class S, class M, class E>
void log_softmax_rows(const View<X, 4>& logits, const View<Y, 4>& out, const S& scaling, const M& mask,
                      E& executor) {
  const auto rows = check_rows("log_softmax", logits, out, scaling, mask);
  if (out.empty()) return;
  const auto& kernels = detail::kernels<RowKernels<ComputeType<X>>>();
  each_row(RowViews<std::remove_const_t<X>, Y, 1>{{logits}, out}, rows, scaling, executor,
           -std::numeric_limits<float>::infinity(), [&](const X* in, index_t n, double c, Y* to) {
             compiled::log_softmax_row(kernels, in, n, c, to);
           });
}

template <class X, class Y, class S, class M, class E>
void logsumexp_rows(const View<X, 4>& logits, const View<Y, 3>& out, const S& scaling, const M& mask,
                    E& executor) {
  using T = ComputeType<X>;
  using Views = RowViews<std::remove_const_t<X>, Y, 1>;
  check_strided_view("logsumexp", "logits", logits);
  check_output("logsumexp", "out", out);
  const RowDivision<S, M> rows("logsumexp", logits, scaling, mask);
  const QueryShape& shape = rows.shape();
  const View<const Y, 3> expected(nullptr, {shape.batch, shape.heads, shape.queries}, {});
  check_same_extents("logsumexp", "out", out, rows.name, expected);
  // Check the overlap as if each result were a row of one key: results may lie between the rows of the logits.
  const View<Y, 4> results(out.data_handle(), {out.extent(0), out.extent(1), out.extent(2), 1},
                           {out.stride(0), out.stride(1), out.stride(2), 1});
  check_no_overlap("logsumexp", "out", results, "logits", logits);
  if (out.empty()) return;
  const RowKernels<T>& kernels = detail::kernels<RowKernels<T>>();
  for_each_group_of(
      Views{{logits}, {}}, rows, executor,
      [&](const Views& views, const RowGroup& group) SSMAX_INLINE_LAMBDA {
        const double c = multiplier_of(scaling, group);
        for (index_t r = 0; r < group.rows; ++r) {
          double value = -std::numeric_limits<double>::infinity();
          if (group.keys.size() > 0) {
            const X* from = group.first(views.in[0], r);
            value = compiled::logsumexp_row(kernels, from + group.keys.begin, group.keys.size(), c);
          }
          out(group.row.batch, group.row.head, group.row.query + r) = static_cast<Y>(static_cast<T>(value));
        }
      });
}

}  // namespace detail

/// A mask that divides views of this rank into rows, or RaggedRows (ragged_rows.hpp).
template <class M, int Rank>
concept RowMask = Mask<M> || detail::DividesRows<M, Rank>::value;

/// Writes out = softmax(c·logits) for every row. Shapes: out as logits.
template <class X, class Y, int Rank, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && RowMask<M, Rank> && Executor<E>
void softmax(const View<X, Rank>& logits, const View<Y, Rank>& out, const S& scaling = {}, const M& mask = {},
             E&& executor = E{}) {
  detail::check_storage<X, Y>();
  detail::softmax_rows(detail::with_rank<4>(View<const X, Rank>(logits)), detail::with_rank<4>(out), scaling,
                       mask, executor);
}

/// Writes out = log softmax(c·logits) for every row. Shapes: out as logits.
template <class X, class Y, int Rank, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && RowMask<M, Rank> && Executor<E>
void log_softmax(const View<X, Rank>& logits, const View<Y, Rank>& out, const S& scaling = {},
                 const M& mask = {}, E&& executor = E{}) {
  detail::check_storage<X, Y>();
  detail::log_softmax_rows(detail::with_rank<4>(View<const X, Rank>(logits)), detail::with_rank<4>(out),
                           scaling, mask, executor);
}

/// Writes out = ln Σ exp(c·logits) for every row. Shapes: out as logits without the last dimension. `out` must not
/// overlap the logits.
template <class X, class Y, int Rank, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && Mask<M> && Executor<E>
void logsumexp(const View<X, Rank>& logits, const View<Y, Rank - 1>& out, const S& scaling = {},
               const M& mask = {}, E&& executor = E{}) {
  detail::check_storage<X, Y>();
  detail::logsumexp_rows(detail::with_rank<4>(View<const X, Rank>(logits)), detail::with_rank<3>(out),
                         scaling, mask, executor);
}

/// Returns ln Σ exp(c·logits) of one row: a double for double, a float for the other types.
template <class X, class S = Softmax, class M = Full>
requires Scaling<S> && Mask<M>
[[nodiscard]] ComputeType<X> logsumexp(const View<X, 1>& logits, const S& scaling = {}, const M& mask = {}) {
  ComputeType<X> value{};
  Serial serial;
  detail::check_storage<X, ComputeType<X>>();
  detail::logsumexp_rows(detail::with_rank<4>(View<const X, 1>(logits)),
                         View<ComputeType<X>, 3>(&value, {1, 1, 1}), scaling, mask, serial);
  return value;
}

/// The arguments of a backward function, all of one shape. dlogits may be exactly out, dout or logits. dlogits must not
/// overlap a view that the call reads in another way.
template <class T, int Rank>
struct RowsBackward {
  View<const T, Rank> out{};   ///< Input: the result of the forward.
  View<const T, Rank> dout{};  ///< Input: the gradient of out.
  View<const T, Rank>
      logits{};             ///< Input of the forward; optional if the scaling has no parameter gradients.
  View<T, Rank> dlogits{};  ///< Output: the gradient of the logits.
};

namespace detail {

/// The views of a backward function: out, dout and logits, which are null if they are not read, and dlogits.
template <class T>
using GradientViews = RowViews<T, T, 3>;

/// Checks the views of a backward call and returns them.
template <bool wants_gradients, class T, int Rank>
GradientViews<T> check_gradient_views(const char* function, const RowsBackward<T, Rank>& rows) {
  GradientViews<T> views{{with_rank<4>(rows.out), with_rank<4>(rows.dout), with_rank<4>(rows.logits)},
                         with_rank<4>(rows.dlogits)};
  const auto& [out, dout, logits] = views.in;
  const View<T, 4>& dlogits = views.out;
  check_strided_view(function, "out", out);
  check_strided_view(function, "dout", dout);
  check_strided_output(function, "dlogits", dlogits);
  check_same_extents(function, "dout", dout, "out", out);
  check_same_extents(function, "dlogits", dlogits, "out", out);
  check_in_place_or_no_overlap(function, "dlogits", dlogits, "out", out);
  check_in_place_or_no_overlap(function, "dlogits", dlogits, "dout", dout);
  if (wants_gradients || is_given(rows.logits)) {
    check_strided_view(function, "logits", logits);
    check_same_extents(function, "logits", logits, "out", out);
  }
  if constexpr (wants_gradients) {
    check_in_place_or_no_overlap(function, "dlogits", dlogits, "logits", logits);
  }
  if (!wants_gradients) views.in[2] = {};
  return views;
}

/// Checks the arguments, then computes the gradients of every group of rows with `gradient`.
template <class T, int Rank, class S, class M, class E, class Gradient>
void backward_rows(const char* function, const RowsBackward<T, Rank>& rows, const S& scaling, const M& mask,
                   E& executor, const Gradient& gradient) {
  constexpr bool wants_gradients = LearnableScaling<S>;
  const GradientViews<T> all = check_gradient_views<wants_gradients>(function, rows);
  const RowDivision<S, M> division(function, all.out, scaling, mask);
  const QueryShape& shape = division.shape();
  if (all.out.empty()) return;
  // The caller's thread must call scaling.accumulate for the groups in their order. If several threads share the
  // rows, or if groups are divided into blocks of rows, each thread writes the dc of its rows here. The caller's thread
  // adds the dc after the loop.
  std::vector<double> dc_of_rows;
  if (wants_gradients && (threads_of(executor) > 1 || !are_contiguous_rows(all)))
    dc_of_rows.resize(static_cast<std::size_t>(shape.rows()));
  // Returns the address of the dc of the first row of a group.
  const auto dc_of = [&](const PlacedRow& row) {
    return dc_of_rows.data() + ((row.batch * shape.heads + row.head) * shape.queries + row.query);
  };
  using C = ComputeType<T>;
  const SoftmaxGradientKernels<C> tables{kernels<RowKernels<C>>(), kernels<DotKernels<C>>(),
                                         kernels<RowGradientKernels<C>>()};
  for_each_group_of(
      all, division, executor, [&](const GradientViews<T>& views, const RowGroup& group) SSMAX_INLINE_LAMBDA {
        const auto& [out, dout, logits] = views.in;
        const auto first = [&](const auto& view) { return group.first(view) + group.keys.begin; };
        // The number of rows is a constant for ragged rows: constant strides are stored faster.
        const auto stride = [&](const auto& view) { return group.rows == 1 ? 0 : view.stride(2); };
        const GradientRows<T> work{.out = first(out),
                                   .dout = first(dout),
                                   .logits = wants_gradients ? first(logits) : nullptr,
                                   .dlogits = first(views.out),
                                   .out_stride = stride(out),
                                   .dout_stride = stride(dout),
                                   .logits_stride = stride(logits),
                                   .dlogits_stride = stride(views.out),
                                   .rows = group.rows,
                                   .n = group.keys.size()};
        double dc = 0;
        if (work.n > 0) {
          const auto c = static_cast<double>(scaling(group.row));
          dc = gradient(tables, work, c, dc_of_rows.empty() ? nullptr : dc_of(group.row));
        }
        if (work.n < group.elements.size()) {
          for (index_t r = 0; r < group.rows; ++r)
            fill_masked(group.first(views.out, r), group.elements.size(), group.keys, 0.0f);
        }
        if constexpr (wants_gradients) {
          if (work.n > 0 && dc_of_rows.empty()) scaling.accumulate(group.row, dc);
        }
      });
  if constexpr (wants_gradients) {
    if (dc_of_rows.empty()) return;
    Serial serial;
    division.for_each_group(serial, [&] {
      return [&](const RowGroup& group) {
        if (group.row.n == 0) return;
        const double* first = dc_of(group.row);
        scaling.accumulate(group.row, std::accumulate(first, first + group.rows, 0.0));
      };
    });
  }
}

/// A type with rows and columns, which has its own adaptor.
template <class X>
concept MatrixLike = requires(X& x) {
  x.cols();
};

/// A type that converts to a std::span and so is one row: std::vector, std::array, std::span, an array. (Some
/// standard libraries have std::span but lack std::ranges::contiguous_range. In others this concept accepts a
/// matrix.)
template <class R>
concept Contiguous = !MatrixLike<R> && requires(R & range) {
  std::span(range);
};

}  // namespace detail

/// Writes dlogits = c·y ⊙ (dout - ⟨dout, y⟩) with y = rows.out = softmax(c·logits). A scaling made by .gradient(…)
/// receives the dc of all rows and adds them to its arrays. The gradient of a masked key is 0. Use:
///
///     softmax_backward<float, 2>({.out = y, …}, scaling, mask)
template <class T, int Rank, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && RowMask<M, Rank> && Executor<E>
void softmax_backward(const RowsBackward<T, Rank>& rows, const S& scaling = {}, const M& mask = {},
                      E&& executor = E{}) {
  detail::check_storage<T, T>();
  detail::backward_rows("softmax_backward", rows, scaling, mask, executor, compiled::softmax_gradient<T>);
}

/// Writes dlogits = c·(dout - exp(out)·Σ dout) with rows.out = log_softmax(c·logits). It ignores dout of a masked
/// key. Otherwise as softmax_backward.
template <class T, int Rank, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && RowMask<M, Rank> && Executor<E>
void log_softmax_backward(const RowsBackward<T, Rank>& rows, const S& scaling = {}, const M& mask = {},
                          E&& executor = E{}) {
  detail::check_storage<T, T>();
  detail::backward_rows("log_softmax_backward", rows, scaling, mask, executor,
                        compiled::log_softmax_gradient<T>);
}

/// Writes the softmax of one row in a contiguous range: std::vector, std::array, std::span.
template <detail::Contiguous In, detail::Contiguous Out, class S = Softmax>
requires Scaling<S>
void softmax(const In& logits, Out&& out, const S& scaling = {}) {
  softmax(View<const shared::ElementOf<In>, 1>(logits), View<shared::ElementOf<Out>, 1>(out), scaling);
}

/// Writes the log softmax of one row in a contiguous range.
template <detail::Contiguous In, detail::Contiguous Out, class S = Softmax>
requires Scaling<S>
void log_softmax(const In& logits, Out&& out, const S& scaling = {}) {
  log_softmax(View<const shared::ElementOf<In>, 1>(logits), View<shared::ElementOf<Out>, 1>(out), scaling);
}

/// Returns the logsumexp of one row in a contiguous range: a double for double, a float for the other types.
template <detail::Contiguous In, class S = Softmax>
requires Scaling<S>
[[nodiscard]] auto logsumexp(const In& logits, const S& scaling = {}) {
  return logsumexp(View<const shared::ElementOf<In>, 1>(logits), scaling);
}

/// Views as arguments of a functor: `scaling(in, out)`. A view defines its own layout, so Axis::columns is an error.
template <class T, int Rank>
struct Adaptor<View<T, Rank>> {
  /// Writes out = softmax(c·in). Throws std::invalid_argument for Axis::columns.
  template <class S, class Out>
  static void apply(const S& scaling, const View<T, Rank>& in, const Out& out, Axis axis) {
    if (axis != Axis::rows) detail::fail("ssmax: a view is normalised along its last dimension, Axis::rows");
    softmax(in, View<typename Out::element_type, Rank>(out), scaling);
  }
};

/// One contiguous row as an argument of a functor: `scaling(in, out)`, or `scaling(in)`, which returns a std::vector.
template <detail::Contiguous Range>
struct Adaptor<Range> {
  using T = shared::ElementOf<Range>;  ///< Type of the elements.

  /// Writes out = softmax(c·in). Throws std::invalid_argument for Axis::columns.
  template <class S, class Out>
  static void apply(const S& scaling, const Range& in, Out& out, Axis axis) {
    if (axis != Axis::rows) detail::fail("ssmax: a span is one row, Axis::rows");
    softmax(in, out, scaling);
  }
  /// Returns softmax(c·in) in a vector. Throws std::invalid_argument for Axis::columns.
  template <class S>
  static std::vector<T> apply(const S& scaling, const Range& in, Axis axis) {
    std::vector<T> out(std::size(in));
    apply(scaling, in, out, axis);
    return out;
  }
};

SSMAX_END
/// @}
