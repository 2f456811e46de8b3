// Softmax and its relatives over rows, and their gradients.
#include <ssmax/entmax.hpp>
#include <ssmax/ragged_rows.hpp>
#include <ssmax/softmax.hpp>

#include "executor.hpp"
#include "operators.hpp"

namespace ssmax_torch {

namespace {

template <RowFunction function, class T, int Rank, class Rows>
void compute(const ssmax::View<const T, Rank>& logits, const ssmax::View<T, Rank>& out, const Rows& rows) {
  const ssmax::Softmax c;
  if constexpr (function == RowFunction::softmax) ssmax::softmax(logits, out, c, rows, TorchThreads{});
  if constexpr (function == RowFunction::log_softmax)
    ssmax::log_softmax(logits, out, c, rows, TorchThreads{});
  if constexpr (function == RowFunction::sparsemax) ssmax::sparsemax(logits, out, c, rows, TorchThreads{});
  if constexpr (function == RowFunction::entmax15) ssmax::entmax15(logits, out, c, rows, TorchThreads{});
}

template <RowFunction function, class T, int Rank, class Rows>
void compute_gradient(const ssmax::RowsBackward<T, Rank>& views, const Rows& rows) {
  const ssmax::Softmax c;
  if constexpr (function == RowFunction::softmax) ssmax::softmax_backward(views, c, rows, TorchThreads{});
  if constexpr (function == RowFunction::log_softmax)
    ssmax::log_softmax_backward(views, c, rows, TorchThreads{});
  if constexpr (function == RowFunction::sparsemax) ssmax::sparsemax_backward(views, c, rows, TorchThreads{});
  if constexpr (function == RowFunction::entmax15) ssmax::entmax15_backward(views, c, rows, TorchThreads{});
}

/// Calls f with the rank of the tensors and the rows that they are divided into.
template <class F>
void with_rows(const MaybeTensor& begins, const F& f) {
  if (begins) {
    f(std::integral_constant<int, 2>{}, ssmax::RaggedRows(integers("begins", begins)));
  } else {
    f(std::integral_constant<int, 4>{}, ssmax::Full{});
  }
}

}  // namespace

template <RowFunction function>
Tensor rows(const Tensor& logits, const MaybeTensor& begins) {
  return with_type("logits", logits, [&]<class T>(std::type_identity<T>) {
    const Tensor out = torch::stable::empty_like(logits);
    with_rows(begins, [&]<int Rank>(std::integral_constant<int, Rank>, const auto& division) {
      compute<function>(strided_view<const T, Rank>("logits", logits), strided_view<T, Rank>("out", out),
                        division);
    });
    return out;
  });
}

template <RowFunction function>
Tensor rows_backward(const Tensor& grad_out, const Tensor& out, const MaybeTensor& begins) {
  return with_type("out", out, [&]<class T>(std::type_identity<T>) {
    const Tensor gradient = torch::stable::empty_like(out);
    with_rows(begins, [&]<int Rank>(std::integral_constant<int, Rank>, const auto& division) {
      compute_gradient<function, T, Rank>({.out = strided_view<const T, Rank>("out", out),
                                           .dout = strided_view<const T, Rank>("grad_out", grad_out),
                                           .dlogits = strided_view<T, Rank>("gradient", gradient)},
                                          division);
    });
    return gradient;
  });
}

template Tensor rows<RowFunction::softmax>(const Tensor&, const MaybeTensor&);
template Tensor rows<RowFunction::log_softmax>(const Tensor&, const MaybeTensor&);
template Tensor rows<RowFunction::sparsemax>(const Tensor&, const MaybeTensor&);
template Tensor rows<RowFunction::entmax15>(const Tensor&, const MaybeTensor&);
template Tensor rows_backward<RowFunction::softmax>(const Tensor&, const Tensor&, const MaybeTensor&);
template Tensor rows_backward<RowFunction::log_softmax>(const Tensor&, const Tensor&, const MaybeTensor&);
template Tensor rows_backward<RowFunction::sparsemax>(const Tensor&, const Tensor&, const MaybeTensor&);
template Tensor rows_backward<RowFunction::entmax15>(const Tensor&, const Tensor&, const MaybeTensor&);

}  // namespace ssmax_torch
