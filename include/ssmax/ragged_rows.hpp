/// @defgroup ragged_rows Ragged rows (ragged_rows.hpp)
/// @ingroup softmax
/// Softmax and its relatives over rows of different lengths that are packed into one dimension: the edges of a graph's
/// nodes, the legal moves of positions, the tokens of experts.
///
///     const std::vector<int> begins{0, 3, 3, 7};                   // rows of 3, 0 and 4 elements
///     softmax(z, y, SSMax<float>{s}, RaggedRows(begins));          // z and y: View<…, 1> of 7 elements
///
/// RaggedRows takes the place of the mask in each function of softmax.hpp. Formulas, types, special values and bounds
/// are those of softmax.hpp.
///
/// | argument | shape |
/// |---|---|
/// | begins | [rows + 1]: row r has the elements [begins[r], begins[r + 1]) |
/// | logits, out, dout, dlogits | [element] or [head, element] |
/// | out of logsumexp | [row] or [head, row] |
///
/// The last stride of each view is 1.
///
/// n is the number of elements of the row. The position of a row is n - 1, and its query is r. The library does not
/// call the scaling for an empty row: logsumexp of an empty row is -inf.
///
/// An executor distributes the rows among its threads, by elements. Results and gradients are bit-identical for every
/// executor, and do not depend on other rows.
///
/// Throws std::invalid_argument unless begins starts with 0, never decreases and ends with the number of elements. The
/// check takes O(rows).
#pragma once

#include <algorithm>
#include <concepts>
#include <limits>
#include <type_traits>
#include <vector>

#include "detail/checks/boundaries.hpp"
#include "softmax.hpp"

/// @addtogroup ragged_rows
/// @{
SSMAX_BEGIN_DATA

/// Divides the last dimension of a view into rows of different lengths. Takes the place of a mask.
struct RaggedRows {
  Integers begins;  ///< Boundaries of the rows, [rows + 1].

  /// Stores the span, which must outlive the object.
  SSMAX_INLINE constexpr explicit RaggedRows(KeptIntegers boundaries) : begins(boundaries) {}
};

SSMAX_END

SSMAX_BEGIN_CODE
namespace detail {

/// The rows of [head, element] views.
class RaggedCall {
 public:
  /// Checks the boundaries and the scaling.
  template <class S>
  RaggedCall(const char* function, const RaggedRows& ragged, index_t heads, index_t elements,
             const S& scaling)
      : begins_(ragged.begins), elements_(elements) {
    check_boundaries("RaggedRows", "begins", begins_, "row", "elements are", elements);
    shape_ = {.heads = heads, .queries = std::ssize(begins_) - 1};
    for (index_t r = 0; r < shape_.queries; ++r) shape_.keys = std::max(shape_.keys, begin(r + 1) - begin(r));
    check_scaling(function, scaling, shape_);
  }

  index_t heads() const { return shape_.heads; }
  index_t rows() const { return shape_.queries; }

  /// Calls visit(first, last) for runs of rows that one thread computes. Rows are counted over all heads.
  template <class E, class Visit>
  void for_each_run(E& executor, const Visit& visit) const {
    const index_t weight = heads() * weight_of_head(), threads = threads_of(executor);
    if (shape_.rows() == 0) return;
    const index_t calls =
        threads == 1 ? 1 : std::clamp<index_t>(weight / min_row_call, 1, std::min(4 * threads, weight));
    const auto boundary = [&](index_t call) {
      return row_at(weight / calls * call + weight % calls * call / calls);
    };
    executor.run(calls, [&](index_t call) {
      visit(boundary(call), call + 1 == calls ? shape_.rows() : boundary(call + 1));
    });
  }

  /// Calls visit(row, begin) for each of the rows [first, last), where `begin` is the first element of the row.
  template <class Visit>
  void for_each_row(index_t first, index_t last, const Visit& visit) const {
    for (index_t i = first; i < last; ++i) {
      const index_t r = i % rows(), n = begin(r + 1) - begin(r);
      visit(PlacedRow{{.head = i / rows(), .position = std::max<index_t>(n - 1, 0), .n = n}, 0, r}, begin(r));
    }
  }

 private:
  index_t begin(index_t r) const { return begins_[static_cast<std::size_t>(r)]; }
  /// A row counts as one element more than it has.
  index_t weight_of_head() const { return elements_ + rows(); }

  /// Returns the first row whose predecessors weigh at least `weight`.
  index_t row_at(index_t weight) const {
    index_t first = 0, end = rows();
    const index_t head = weight / weight_of_head(), of_head = weight % weight_of_head();
    while (first < end) {
      const index_t middle = first + (end - first) / 2;
      if (begin(middle) + middle < of_head) {
        first = middle + 1;
      } else {
        end = middle;
      }
    }
    return head * rows() + first;
  }

  Integers begins_;
  index_t elements_;
  QueryShape shape_{};
};

/// Returns the first element of a head of a view [1, 1, head, element].
template <class T>
T* head_of(const View<T, 4>& view, index_t head) {
  return row_of(view, 0, 0, head);
}

/// Checks a view and returns it with rank 4.
template <class T, int Rank>
View<T, 4> ragged_view(const char* function, const char* name, const View<T, Rank>& view) {
  static_assert(Rank <= 2, "ssmax: views of ragged rows are [element] or [head, element]");
  check_view(function, name, view);
  return with_rank<4>(view);
}

/// Checks the arguments, then computes the gradient of each row with `gradient`.
template <class T, int Rank, class S, class E, class Gradient>
void ragged_backward(const char* function, const RowsBackward<T, Rank>& rows, const S& scaling,
                     const RaggedRows& ragged, E& executor, const Gradient& gradient) {
  constexpr bool wants_gradients = LearnableScaling<S>;
  ragged_view(function, "out", rows.out);
  ragged_view(function, "dout", rows.dout);
  ragged_view(function, "logits", rows.logits);
  ragged_view(function, "dlogits", rows.dlogits);
  const GradientViews<T> views = check_gradient_views<wants_gradients>(function, rows);
  const RaggedCall call(function, ragged, views.out.extent(2), views.out.extent(3), scaling);
  // As in backward_rows: the caller's thread calls scaling.accumulate for the rows in their order.
  std::vector<double> dc_of_rows;
  if (wants_gradients && threads_of(executor) > 1)
    dc_of_rows.resize(static_cast<std::size_t>(call.heads() * call.rows()));
  using C = ComputeType<T>;
  const SoftmaxGradientKernels<C> tables{kernels<RowKernels<C>>(), kernels<DotKernels<C>>(),
                                         kernels<RowGradientKernels<C>>()};
  call.for_each_run(executor, [&](index_t first, index_t last) {
    call.for_each_row(first, last, [&](const PlacedRow& row, index_t begin) {
      if (row.n == 0) return;
      const GradientRows<T> work{.out = head_of(views.in[0], row.head) + begin,
                                 .dout = head_of(views.in[1], row.head) + begin,
                                 .logits = wants_gradients ? head_of(views.in[2], row.head) + begin : nullptr,
                                 .dlogits = head_of(views.out, row.head) + begin,
                                 .rows = 1,
                                 .n = row.n};
      const double dc = gradient(tables, work, static_cast<double>(scaling(row)), nullptr);
      if constexpr (wants_gradients) {
        if (dc_of_rows.empty()) {
          scaling.accumulate(row, dc);
        } else {
          dc_of_rows[static_cast<std::size_t>(row.head * call.rows() + row.query)] = dc;
        }
      }
    });
  });
  if constexpr (wants_gradients) {
    call.for_each_row(0, std::ssize(dc_of_rows), [&](const PlacedRow& row, index_t) {
      if (row.n == 0) return;
      scaling.accumulate(row, dc_of_rows[static_cast<std::size_t>(row.head * call.rows() + row.query)]);
    });
  }
}

}  // namespace detail

/// Writes out = softmax(c·logits) for every row.
template <class X, class Y, int Rank, class S, class E = Serial>
requires Scaling<S> && Executor<E>
void softmax(const View<X, Rank>& logits, const View<Y, Rank>& out, const S& scaling, const RaggedRows& rows,
             E&& executor = E{}) {
  using T = detail::ComputeType<X>;
  using In = std::remove_const_t<X>;
  constexpr bool shares_vectors = std::same_as<In, T> && std::same_as<Y, T>;
  detail::check_storage<X, Y>();
  const auto in = detail::ragged_view("softmax", "logits", View<const X, Rank>(logits));
  const auto to = detail::ragged_view("softmax", "out", out);
  detail::check_row_views("softmax", in, to);
  const detail::RaggedCall call("softmax", rows, in.extent(2), in.extent(3), scaling);
  const detail::SoftmaxKernels<T> tables{detail::kernels<detail::RowKernels<T>>(),
                                         detail::kernels<detail::ShortRowKernels<T>>()};
  call.for_each_run(executor, [&](index_t first, index_t last) {
    detail::LoneRows<T> short_rows(tables);
    call.for_each_row(first, last, [&](const PlacedRow& row, index_t begin) {
      if (row.n == 0) return;
      const In* from = detail::head_of(in, row.head) + begin;
      Y* result = detail::head_of(to, row.head) + begin;
      const auto c = static_cast<double>(scaling(row));
      if constexpr (shares_vectors) {
        if (short_rows.takes(row.n)) return short_rows.add({from, result, row.n, 0, c});
      }
      compiled::softmax_group<In, Y>(tables, {from, 0}, {result, 0}, 1, row.n, c, true);
    });
    if constexpr (shares_vectors) short_rows.finish();
  });
}

/// Writes out = log softmax(c·logits) for every row.
template <class X, class Y, int Rank, class S, class E = Serial>
requires Scaling<S> && Executor<E>
void log_softmax(const View<X, Rank>& logits, const View<Y, Rank>& out, const S& scaling,
                 const RaggedRows& rows, E&& executor = E{}) {
  using T = detail::ComputeType<X>;
  detail::check_storage<X, Y>();
  const auto in = detail::ragged_view("log_softmax", "logits", View<const X, Rank>(logits));
  const auto to = detail::ragged_view("log_softmax", "out", out);
  detail::check_row_views("log_softmax", in, to);
  const detail::RaggedCall call("log_softmax", rows, in.extent(2), in.extent(3), scaling);
  const auto& kernels = detail::kernels<detail::RowKernels<T>>();
  call.for_each_run(executor, [&](index_t first, index_t last) {
    call.for_each_row(first, last, [&](const PlacedRow& row, index_t begin) {
      if (row.n == 0) return;
      compiled::log_softmax_row(kernels, detail::head_of(in, row.head) + begin, row.n,
                                static_cast<double>(scaling(row)), detail::head_of(to, row.head) + begin);
    });
  });
}

/// Writes out = ln Σ exp(c·logits) for every row. `out` must not overlap the logits.
template <class X, class Y, int Rank, class S, class E = Serial>
requires Scaling<S> && Executor<E>
void logsumexp(const View<X, Rank>& logits, const View<Y, Rank>& out, const S& scaling,
               const RaggedRows& rows, E&& executor = E{}) {
  using T = detail::ComputeType<X>;
  detail::check_storage<X, Y>();
  const auto in = detail::ragged_view("logsumexp", "logits", View<const X, Rank>(logits));
  const auto to = detail::ragged_view("logsumexp", "out", out);
  detail::check_output("logsumexp", "out", to);
  detail::check_equal("logsumexp", "out", "has head count", to.extent(2), "logits have", in.extent(2));
  detail::check_equal("logsumexp", "out", "has extent", to.extent(3), "rows are",
                      std::ssize(rows.begins) - 1);
  detail::check_no_overlap("logsumexp", "out", to, "logits", in);
  const detail::RaggedCall call("logsumexp", rows, in.extent(2), in.extent(3), scaling);
  const auto& kernels = detail::kernels<detail::RowKernels<T>>();
  call.for_each_run(executor, [&](index_t first, index_t last) {
    call.for_each_row(first, last, [&](const PlacedRow& row, index_t begin) {
      double value = -std::numeric_limits<double>::infinity();
      if (row.n > 0) {
        value = compiled::logsumexp_row(kernels, detail::head_of(in, row.head) + begin, row.n,
                                        static_cast<double>(scaling(row)));
      }
      to(0, 0, row.head, row.query) = static_cast<Y>(static_cast<T>(value));
    });
  });
}

/// Writes the gradients of softmax over ragged rows, as softmax_backward of softmax.hpp does for each row.
template <class T, int Rank, class S, class E = Serial>
requires Scaling<S> && Executor<E>
void softmax_backward(const RowsBackward<T, Rank>& arguments, const S& scaling, const RaggedRows& rows,
                      E&& executor = E{}) {
  detail::check_storage<T, T>();
  detail::ragged_backward("softmax_backward", arguments, scaling, rows, executor,
                          compiled::softmax_gradient<T>);
}

/// Writes the gradients of log_softmax over ragged rows, as log_softmax_backward of softmax.hpp does for each row.
template <class T, int Rank, class S, class E = Serial>
requires Scaling<S> && Executor<E>
void log_softmax_backward(const RowsBackward<T, Rank>& arguments, const S& scaling, const RaggedRows& rows,
                          E&& executor = E{}) {
  detail::check_storage<T, T>();
  detail::ragged_backward("log_softmax_backward", arguments, scaling, rows, executor,
                          compiled::log_softmax_gradient<T>);
}

SSMAX_END
/// @}
