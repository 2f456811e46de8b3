/// @defgroup softmax Rows (softmax.hpp)
/// Softmax and Scalable-Softmax over rows, their logarithms, and the gradients of both.
///
///     softmax               y_i = exp(c·z_i) / Σ_j exp(c·z_j)          c = scaling(row), see scaling.hpp
///     log_softmax           y_i = c·z_i - ln Σ_j exp(c·z_j)
///     logsumexp             l   = ln Σ_j exp(c·z_j)
///     softmax_backward      dz  = c·u, u = y ⊙ (dy - ⟨dy, y⟩), dc = ⟨u, z⟩, handed to the scaling
///     log_softmax_backward  dz  = c·u, u = dy - exp(y)·Σ dy,   dc = ⟨u, z⟩
///
/// Rows are views of rank 1 [key], 2 [row, key], 3 [head, query, key] or 4 [batch, head, query, key] with
/// last stride 1 and free strides otherwise; a std::vector or std::span is one row. float, half and bfloat16
/// compute in float, double in double. j runs over the keys that the mask lets the row see (mask.hpp); n is
/// their number; the row's position is that of the last one. Hidden keys are never read, and get 0 (-inf in
/// log form).
///
/// logsumexp of rank 2 to 4 writes one number a row; of one row it returns the number.
///
/// Special values: a logit of -inf is a masked key with probability 0, whatever the sign of c; it still
/// counts in n. A row with nothing visible gives 0 (log form and logsumexp: -inf) and no gradient. NaN in a
/// visible logit, +inf in one under c >= 0, and a c that is NaN or infinite make the whole row NaN; +inf
/// under c < 0 gets probability 0. Probabilities below 2^-125 of the largest (2^-1021 in double) may be
/// flushed to 0, and a log-probability or gradient beyond what the result's type holds is infinite. Apart
/// from that any finite logits and any finite c, of either sign, of 0 or of 1e308, give the right answer:
/// where c·z is out of reach, logits with the same largest c·z share the probability equally, and the
/// others get 0.
///
/// Accuracy, for every such c: exp within 1 ulp, arguments rounded at magnitude 1/2 only, sums over blocks
/// added in double; the multiplier is not rounded to float (but for one rounding in log form and gradients).
///
///     a probability's relative error  below 5e-7 in float, for rows of 10^6 elements; below 2e-15 in double
///     log_softmax, logsumexp          within 5e-7·(1 + |result|) in float, 1e-15·(1 + |result|) in double;
///                                     no log-probability is above 0
///
/// These bounds are for rounding to nearest. In the other modes (fesetround) results of ordinary logits stay
/// finite, and within 5e-5 in float, 5e-11 in double.
///
/// An executor (execution.hpp) shares the rows among its threads; results and gradients are the same bits for
/// every one. Its threads call the scaling and the mask; `accumulate`, of a scaling that learns, is called by
/// the caller's thread alone.
///
/// `out` may be the logits' own memory, or must lie apart from it; that of logsumexp must lie apart. Errors
/// are std::invalid_argument, thrown before anything is written. Nothing is allocated, but for 8 bytes a row
/// where a scaling learns from rows that threads share.
#pragma once

#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "detail/rows/driver.hpp"
#include "detail/rows/fill.hpp"
#include "detail/rows/groups.hpp"
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
  static_assert(std::same_as<Compute<X>, Compute<Y>>, "ssmax::softmax: double goes with double only");
}

/// Checks that all forward calls share; returns the shape.
template <class X, class Y, class S, class M>
QueryShape check_rows(const char* function, const View<X, 4>& logits, const char* out_name,
                      const View<Y, 4>& out, const S& scaling, const M& mask) {
  check_view(function, "logits", logits);
  check_output(function, out_name, out);
  check_same_extents(function, out_name, out, "logits", logits);
  check_in_place_or_apart(function, out_name, out, "logits", logits);
  const QueryShape shape = query_shape(logits);
  check_mask(mask, shape);
  check_scaling(function, scaling, shape);
  return shape;
}

template <class X, class Y, class S, class M, class E>
void softmax_rows(const View<X, 4>& logits, const View<Y, 4>& out, const S& scaling, const M& mask,
                  E& executor) {
  using T = Compute<X>;
  const QueryShape shape = check_rows("softmax", logits, "out", out, scaling, mask);
  if (out.empty()) return;
  const SoftmaxKernels<T> tables{kernels<RowKernels<T>>(), kernels<ShortRowKernels<T>>()};
  for_each_group<S>(shape, mask, executor, [&](const RowGroup& group) {
    Y* to = &out(group.batch, group.head, group.query, 0);
    if (group.keys.size() < shape.keys) {
      for (index_t r = 0; r < group.rows; ++r)
        fill_hidden(to + r * out.stride(2), shape.keys, group.keys, 0.0f);
    }
    if (group.keys.size() == 0) return;
    const X* from = &logits(group.batch, group.head, group.query, 0) + group.keys.begin;
    compiled::softmax_group(tables, from, logits.stride(2), to + group.keys.begin, out.stride(2), group.rows,
                            group.keys.size(), static_cast<double>(scaling(group.row)),
                            group.group_rows == 1);
  });
}

template <class X, class Y, class S, class M, class E>
void log_softmax_rows(const View<X, 4>& logits, const View<Y, 4>& out, const S& scaling, const M& mask,
                      E& executor) {
  using T = Compute<X>;
  const QueryShape shape = check_rows("log_softmax", logits, "out", out, scaling, mask);
  if (out.empty()) return;
  const RowKernels<T>& kernels = detail::kernels<RowKernels<T>>();
  for_each_group<S>(shape, mask, executor, [&](const RowGroup& group) {
    const double c = group.keys.size() == 0 ? 0.0 : static_cast<double>(scaling(group.row));
    for (index_t r = 0; r < group.rows; ++r) {
      Y* to = &out(group.batch, group.head, group.query + r, 0);
      fill_hidden(to, shape.keys, group.keys, -std::numeric_limits<float>::infinity());
      if (group.keys.size() == 0) continue;
      const X* from = &logits(group.batch, group.head, group.query + r, 0);
      compiled::log_softmax_row(kernels, from + group.keys.begin, group.keys.size(), c,
                                to + group.keys.begin);
    }
  });
}

template <class X, class Y, class S, class M, class E>
void logsumexp_rows(const View<X, 4>& logits, const View<Y, 3>& out, const S& scaling, const M& mask,
                    E& executor) {
  using T = Compute<X>;
  check_view("logsumexp", "logits", logits);
  check_output("logsumexp", "out", out);
  for (int i = 0; i < 3; ++i) {
    if (out.extent(i) != logits.extent(i))
      fail_extent("logsumexp", "out", i, out.extent(i), "logits", logits.extent(i));
  }
  // As rows of one key, so that results between the logits' rows are told apart from them.
  const View<Y, 4> results(out.data_handle(), {out.extent(0), out.extent(1), out.extent(2), 1},
                           {out.stride(0), out.stride(1), out.stride(2), 1});
  check_apart("logsumexp", "out", results, "logits", logits);
  const QueryShape shape = query_shape(logits);
  check_mask(mask, shape);
  check_scaling("logsumexp", scaling, shape);
  if (out.empty()) return;
  const RowKernels<T>& kernels = detail::kernels<RowKernels<T>>();
  for_each_group<S>(shape, mask, executor, [&](const RowGroup& group) {
    const double c = group.keys.size() == 0 ? 0.0 : static_cast<double>(scaling(group.row));
    for (index_t r = 0; r < group.rows; ++r) {
      double value = -std::numeric_limits<double>::infinity();
      if (group.keys.size() > 0) {
        const X* from = &logits(group.batch, group.head, group.query + r, 0);
        value = compiled::logsumexp_row(kernels, from + group.keys.begin, group.keys.size(), c);
      }
      out(group.batch, group.head, group.query + r) = static_cast<Y>(static_cast<T>(value));
    }
  });
}

}  // namespace detail

/// out = softmax(c·logits), row by row. Shapes: out as logits.
template <class X, class Y, int Rank, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && Mask<M> && Executor<E>
void softmax(const View<X, Rank>& logits, const View<Y, Rank>& out, const S& scaling = {}, const M& mask = {},
             E&& executor = E{}) {
  detail::check_storage<X, Y>();
  detail::softmax_rows(detail::with_rank<4>(View<const X, Rank>(logits)), detail::with_rank<4>(out), scaling,
                       mask, executor);
}

/// out = log softmax(c·logits), row by row. Shapes: out as logits.
template <class X, class Y, int Rank, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && Mask<M> && Executor<E>
void log_softmax(const View<X, Rank>& logits, const View<Y, Rank>& out, const S& scaling = {},
                 const M& mask = {}, E&& executor = E{}) {
  detail::check_storage<X, Y>();
  detail::log_softmax_rows(detail::with_rank<4>(View<const X, Rank>(logits)), detail::with_rank<4>(out),
                           scaling, mask, executor);
}

/// out = ln Σ exp(c·logits) of every row. Shapes: out as logits without its last dimension. out must lie
/// apart from the logits.
template <class X, class Y, int Rank, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && Mask<M> && Executor<E>
void logsumexp(const View<X, Rank>& logits, const View<Y, Rank - 1>& out, const S& scaling = {},
               const M& mask = {}, E&& executor = E{}) {
  detail::check_storage<X, Y>();
  detail::logsumexp_rows(detail::with_rank<4>(View<const X, Rank>(logits)), detail::with_rank<3>(out),
                         scaling, mask, executor);
}

/// ln Σ exp(c·logits) of one row: a float, or a double of double.
template <class X, class S = Softmax, class M = Full>
requires Scaling<S> && Mask<M>
[[nodiscard]] detail::Compute<X> logsumexp(const View<X, 1>& logits, const S& scaling = {},
                                           const M& mask = {}) {
  detail::Compute<X> value{};
  Serial serial;
  detail::check_storage<X, detail::Compute<X>>();
  detail::logsumexp_rows(detail::with_rank<4>(View<const X, 1>(logits)),
                         View<detail::Compute<X>, 3>(&value, {1, 1, 1}), scaling, mask, serial);
  return value;
}

/// The arguments of a backward, all of one shape. dlogits may be the memory of dout.
template <class T, int Rank>
struct RowsBackward {
  View<const T, Rank> out{};     ///< What the forward returned.
  View<const T, Rank> dout{};    ///< The gradient that arrives at out.
  View<const T, Rank> logits{};  ///< What the forward read; may be left out where the scaling does not learn.
  View<T, Rank> dlogits{};       ///< Written.
};

namespace detail {

/// `gradient` is the driver of a group's rows.
template <class T, int Rank, class S, class M, class E, class Gradient>
void backward_rows(const char* function, const RowsBackward<T, Rank>& rows, const S& scaling, const M& mask,
                   E& executor, const Gradient& gradient) {
  constexpr bool learns = LearnableScaling<S>;
  const auto out = with_rank<4>(rows.out), dout = with_rank<4>(rows.dout), logits = with_rank<4>(rows.logits);
  const auto dlogits = with_rank<4>(rows.dlogits);
  check_view(function, "out", out);
  check_view(function, "dout", dout);
  check_output(function, "dlogits", dlogits);
  check_same_extents(function, "dout", dout, "out", out);
  check_same_extents(function, "dlogits", dlogits, "out", out);
  check_in_place_or_apart(function, "dlogits", dlogits, "out", out);
  check_in_place_or_apart(function, "dlogits", dlogits, "dout", dout);
  if (learns || is_given(rows.logits)) {
    check_view(function, "logits", logits);
    check_same_extents(function, "logits", logits, "out", out);
  }
  if constexpr (learns) {
    check_in_place_or_apart(function, "dlogits", dlogits, "logits", logits);
  }
  const QueryShape shape = query_shape(out);
  check_mask(mask, shape);
  check_scaling(function, scaling, shape);
  if (dlogits.empty()) return;
  // scaling.accumulate must be called for one group after the other, in their order. Where executor calls
  // share the rows, each writes its rows' dc here, and the caller's thread adds them up at the end.
  std::vector<double> dc_of_rows;
  if (learns && threads_of(executor) > 1) {
    dc_of_rows.resize(static_cast<std::size_t>(shape.batch * shape.heads * shape.queries));
  }
  // Where the dc of a group's first row is.
  const auto dc_of = [&](const RowGroup& group) {
    return dc_of_rows.data() + ((group.batch * shape.heads + group.head) * shape.queries + group.query);
  };
  using C = Compute<T>;
  const SoftmaxGradientKernels<C> tables{kernels<RowKernels<C>>(), kernels<DotKernels<C>>(),
                                         kernels<RowGradientKernels<C>>()};
  for_each_group<S>(shape, mask, executor, [&](const RowGroup& group) {
    const auto first = [&](const auto& view) {
      return row_of(view, group.batch, group.head, group.query) + group.keys.begin;
    };
    const GradientRows<T> work{.out = first(out),
                               .dout = first(dout),
                               .logits = learns ? first(logits) : nullptr,
                               .dlogits = first(dlogits),
                               .out_stride = out.stride(2),
                               .dout_stride = dout.stride(2),
                               .logits_stride = learns ? logits.stride(2) : 0,
                               .dlogits_stride = dlogits.stride(2),
                               .rows = group.rows,
                               .n = group.keys.size()};
    double dc = 0;
    if (work.n > 0) {
      const auto c = static_cast<double>(scaling(group.row));
      dc = gradient(tables, work, c, dc_of_rows.empty() ? nullptr : dc_of(group));
    }
    if (work.n < shape.keys) {
      for (index_t r = 0; r < group.rows; ++r) {
        fill_hidden(&dlogits(group.batch, group.head, group.query + r, 0), shape.keys, group.keys, 0.0f);
      }
    }
    if constexpr (learns) {
      if (work.n > 0 && dc_of_rows.empty()) scaling.accumulate(group.row, dc);
    }
  });
  if constexpr (learns) {
    if (dc_of_rows.empty()) return;
    Serial serial;
    for_each_group<S>(shape, mask, serial, [&](const RowGroup& group) {
      if (group.row.n == 0) return;
      const double* first = dc_of(group);
      scaling.accumulate(group.row, std::accumulate(first, first + group.rows, 0.0));
    });
  }
}

/// Has rows and columns, and an adaptor of its own.
template <class X>
concept MatrixLike = requires(X& x) {
  x.cols();
};

/// One row: what a std::span can be made of, as std::vector, std::array, std::span, an array. (Of the
/// libraries that have std::span, some lack std::ranges::contiguous_range, and some accept a matrix.)
template <class R>
concept Contiguous = !MatrixLike<R> && requires(R & range) {
  std::span(range);
};

}  // namespace detail

/// dlogits = c·y ⊙ (dout - ⟨dout, y⟩) with y = rows.out = softmax(c·logits). A scaling made by
/// .gradient(…) gets dc of every row added to its arrays; hidden keys get 0. Use:
///
///     softmax_backward<float, 2>({.out = y, …}, scaling, mask)
template <class T, int Rank, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && Mask<M> && Executor<E>
void softmax_backward(const RowsBackward<T, Rank>& rows, const S& scaling = {}, const M& mask = {},
                      E&& executor = E{}) {
  detail::check_storage<T, T>();
  detail::backward_rows("softmax_backward", rows, scaling, mask, executor, compiled::softmax_gradient<T>);
}

/// The same for rows.out = log_softmax(c·logits): dlogits = c·(dout - exp(out)·Σ dout). dout of a masked
/// key is ignored.
template <class T, int Rank, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && Mask<M> && Executor<E>
void log_softmax_backward(const RowsBackward<T, Rank>& rows, const S& scaling = {}, const M& mask = {},
                          E&& executor = E{}) {
  detail::check_storage<T, T>();
  detail::backward_rows("log_softmax_backward", rows, scaling, mask, executor,
                        compiled::log_softmax_gradient<T>);
}

/// One row in anything contiguous: std::vector, std::array, std::span.
template <detail::Contiguous In, detail::Contiguous Out, class S = Softmax>
requires Scaling<S>
void softmax(const In& logits, Out&& out, const S& scaling = {}) {
  softmax(View<const shared::ElementOf<In>, 1>(logits), View<shared::ElementOf<Out>, 1>(out), scaling);
}

/// One row in anything contiguous.
template <detail::Contiguous In, detail::Contiguous Out, class S = Softmax>
requires Scaling<S>
void log_softmax(const In& logits, Out&& out, const S& scaling = {}) {
  log_softmax(View<const shared::ElementOf<In>, 1>(logits), View<shared::ElementOf<Out>, 1>(out), scaling);
}

/// One row in anything contiguous: float and half precision give a float, double gives a double.
template <detail::Contiguous In, class S = Softmax>
requires Scaling<S>
[[nodiscard]] auto logsumexp(const In& logits, const S& scaling = {}) {
  return logsumexp(View<const shared::ElementOf<In>, 1>(logits), scaling);
}

/// Views as arguments of a functor: `scaling(in, out)`. There is no columns form: a view says its layout
/// itself.
template <class T, int Rank>
struct Adaptor<View<T, Rank>> {
  /// out = softmax(c·in); Axis::columns throws.
  template <class S, class Out>
  static void apply(const S& scaling, const View<T, Rank>& in, const Out& out, Axis axis) {
    if (axis != Axis::rows) detail::fail("ssmax: a view is normalised along its last dimension, Axis::rows");
    softmax(in, View<typename Out::element_type, Rank>(out), scaling);
  }
};

/// One contiguous row: `scaling(in, out)`, and a std::vector from `scaling(in)`.
template <detail::Contiguous Range>
struct Adaptor<Range> {
  using T = shared::ElementOf<Range>;  ///< Of the row's elements.

  /// out = softmax(c·in); Axis::columns throws.
  template <class S, class Out>
  static void apply(const S& scaling, const Range& in, Out& out, Axis axis) {
    if (axis != Axis::rows) detail::fail("ssmax: a span is one row, Axis::rows");
    softmax(in, out, scaling);
  }
  /// softmax(c·in) in a vector; Axis::columns throws.
  template <class S>
  static std::vector<T> apply(const S& scaling, const Range& in, Axis axis) {
    std::vector<T> out(std::size(in));
    apply(scaling, in, out, axis);
    return out;
  }
};

SSMAX_END
/// @}
