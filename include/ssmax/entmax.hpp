/// @defgroup entmax Sparse rows (entmax.hpp)
/// Computes sparsemax and entmax-1.5 of rows, and their gradients. Most elements of such a result are exactly 0.
///
///     sparsemax            y_i = max(0, c·z_i - τ)             c = scaling(row), see scaling.hpp
///     entmax15             y_i = max(0, c·z_i / 2 - τ)²        τ such that Σ y = 1
///     sparsemax_backward   dz  = c·u, u = w ⊙ (dy - ⟨w, dy⟩ / Σ w), w = 1 where y > 0, else 0
///     entmax15_backward    the same with w = √y;               dc = ⟨u, z⟩, passed to the scaling
///
/// Sources: arXiv:1602.02068 (sparsemax), 1905.05702 (entmax-1.5), 2506.16640 (ASEntmax). ASEntmax is entmax15 with a
/// multiplier c that grows with ln n, as SSMax or PerQuery return.
///
/// Views, element types, masks, n, executors and errors are those of softmax.hpp.
///
/// | special value | result |
/// |---|---|
/// | a visible logit of -inf | probability 0 for every sign of c |
/// | no visible key | 0 |
/// | NaN in a visible logit, +inf with c >= 0, a c that is NaN or infinite | the row is NaN |
/// | y is 0, or rounds to 0 in half | the gradient is 0, and dout is not read there |
///
/// The kernels find τ exactly, as the root of a polynomial on the support, in a few passes and without sorting. Let r
/// be the height of a logit above τ: y is r for sparsemax and r² for entmax15. The result adds one rounding.
///
/// | quantity | bound of the error in float | in double |
/// |---|---|---|
/// | r | 5e-7 | 1e-15 |
/// | Σ y | 1.2e-6 | 3.3e-15 |
#pragma once

#include "detail/rows/entmax.hpp"
#include "softmax.hpp"

/// @addtogroup entmax
/// @{
SSMAX_BEGIN_CODE
namespace detail {

template <int power, class X, class Y, class S, class M, class E>
void entmax_rows(const char* function, const View<X, 4>& logits, const View<Y, 4>& out, const S& scaling,
                 const M& mask, E& executor) {
  using T = ComputeType<X>;
  const auto rows = check_rows(function, logits, out, scaling, mask);
  if (out.empty()) return;
  const RowKernels<T>& row_kernels = kernels<RowKernels<T>>();
  const EntmaxKernels<T>& tables = kernels<EntmaxKernels<T>>();
  each_row(
      RowViews<std::remove_const_t<X>, Y, 1>{{logits}, out}, rows, scaling, executor, 0.0f,
      [&](const X* in, index_t n, double c, Y* to) { entmax_row<power>(row_kernels, tables, in, n, c, to); });
}

/// Computes the gradients of a group of rows. backward_rows calls it.
template <int power, class T>
double entmax_gradient(const GradientRows<T>& rows, double c, double* dc) {
  const auto& tables = kernels<EntmaxKernels<ComputeType<T>>>();
  const GradientFactor<ComputeType<T>> factor(c);
  double sum = 0;
  for (index_t r = 0; r < rows.rows; ++r) {
    const double dc_of_row =
        entmax_row_gradient<power>(tables, rows.out + r * rows.out_stride, rows.dout + r * rows.dout_stride,
                                   rows.logits == nullptr ? nullptr : rows.logits + r * rows.logits_stride,
                                   rows.n, factor, rows.dlogits + r * rows.dlogits_stride);
    if (dc != nullptr) dc[r] = dc_of_row;
    sum += dc_of_row;
  }
  return sum;
}

}  // namespace detail

/// Writes out = sparsemax(c·logits) for every row. Shapes: out as logits.
template <class X, class Y, int Rank, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && RowMask<M, Rank> && Executor<E>
void sparsemax(const View<X, Rank>& logits, const View<Y, Rank>& out, const S& scaling = {},
               const M& mask = {}, E&& executor = E{}) {
  detail::check_storage<X, Y>();
  detail::entmax_rows<1>("sparsemax", detail::with_rank<4>(View<const X, Rank>(logits)),
                         detail::with_rank<4>(out), scaling, mask, executor);
}

/// Writes out = entmax-1.5(c·logits) for every row. Shapes: out as logits.
template <class X, class Y, int Rank, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && RowMask<M, Rank> && Executor<E>
void entmax15(const View<X, Rank>& logits, const View<Y, Rank>& out, const S& scaling = {},
              const M& mask = {}, E&& executor = E{}) {
  detail::check_storage<X, Y>();
  detail::entmax_rows<2>("entmax15", detail::with_rank<4>(View<const X, Rank>(logits)),
                         detail::with_rank<4>(out), scaling, mask, executor);
}

/// Writes the gradient of rows.out = sparsemax(c·logits). Use it as softmax_backward.
template <class T, int Rank, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && RowMask<M, Rank> && Executor<E>
void sparsemax_backward(const RowsBackward<T, Rank>& rows, const S& scaling = {}, const M& mask = {},
                        E&& executor = E{}) {
  detail::check_storage<T, T>();
  detail::backward_rows("sparsemax_backward", rows, scaling, mask, executor,
                        [](const auto&, const auto& group, double c, double* dc) {
                          return detail::entmax_gradient<1>(group, c, dc);
                        });
}

/// Writes the gradient of rows.out = entmax15(c·logits). Use it as softmax_backward.
template <class T, int Rank, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && RowMask<M, Rank> && Executor<E>
void entmax15_backward(const RowsBackward<T, Rank>& rows, const S& scaling = {}, const M& mask = {},
                       E&& executor = E{}) {
  detail::check_storage<T, T>();
  detail::backward_rows("entmax15_backward", rows, scaling, mask, executor,
                        [](const auto&, const auto& group, double c, double* dc) {
                          return detail::entmax_gradient<2>(group, c, dc);
                        });
}

/// Writes the sparsemax of one row in a contiguous range: std::vector, std::array, std::span.
template <detail::Contiguous In, detail::Contiguous Out, class S = Softmax>
requires Scaling<S>
void sparsemax(const In& logits, Out&& out, const S& scaling = {}) {
  sparsemax(View<const shared::ElementOf<In>, 1>(logits), View<shared::ElementOf<Out>, 1>(out), scaling);
}

/// Writes the entmax-1.5 of one row in a contiguous range.
template <detail::Contiguous In, detail::Contiguous Out, class S = Softmax>
requires Scaling<S>
void entmax15(const In& logits, Out&& out, const S& scaling = {}) {
  entmax15(View<const shared::ElementOf<In>, 1>(logits), View<shared::ElementOf<Out>, 1>(out), scaling);
}

SSMAX_END
/// @}
