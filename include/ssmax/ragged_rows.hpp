/// @defgroup ragged_rows Ragged rows (ragged_rows.hpp)
/// @ingroup softmax
/// Softmax and its relatives over rows of different lengths that are packed into one dimension: the edges of a graph's
/// nodes, the legal moves of positions, the tokens of experts.
///
///     const std::vector<int> begins{0, 3, 3, 7};                   // rows of 3, 0 and 4 elements
///     softmax(z, y, SSMax<float>{s}, RaggedRows(begins));          // z and y: View<…, 1> of 7 elements
///
/// RaggedRows takes the place of the mask in each function of softmax.hpp and entmax.hpp. Formulas, types, special
/// values, bounds and errors are those of both headers.
///
/// | argument | shape |
/// |---|---|
/// | begins | [rows + 1]: row r has the elements [begins[r], begins[r + 1]) |
/// | logits, out, dout, dlogits | [element] or [head, element] |
/// | out of logsumexp | [row] or [head, row] |
///
/// The last stride of each view but the result of logsumexp may have any value. For logits [element, head], the view is
/// `View<const float, 2>(z, {heads, elements}, {1, heads})`. Results are bit-identical to those of a contiguous copy.
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
#include <type_traits>

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

template <int Rank>
struct DividesRows<RaggedRows, Rank> : std::true_type {
  static_assert(Rank <= 2, "ssmax: views of ragged rows are [element] or [head, element]");
};

/// Divides views [1, 1, head, element] into groups of one row.
template <class S>
class RowDivision<S, RaggedRows> {
 public:
  static constexpr const char* name = "RaggedRows";

  /// Checks the boundaries and the scaling.
  template <class T>
  RowDivision(const char* function, const View<T, 4>& logits, const S& scaling, const RaggedRows& ragged)
      : begins_(ragged.begins), elements_(logits.extent(3)) {
    check_boundaries("RaggedRows", "begins", begins_, "row", "elements are", elements_);
    shape_ = {.heads = logits.extent(2), .queries = std::ssize(begins_) - 1};
    for (index_t r = 0; r < rows(); ++r) shape_.keys = std::max(shape_.keys, begin(r + 1) - begin(r));
    check_scaling(function, scaling, shape_);
  }

  const QueryShape& shape() const { return shape_; }
  bool collects() const { return true; }

  /// Calls of the executor have about the same number of elements.
  template <class E, class BeginCall>
  void for_each_group(E& executor, const BeginCall& begin_call) const {
    const index_t weight = shape_.heads * weight_of_head(), threads = threads_of(executor);
    if (shape_.rows() == 0) return;
    const index_t calls =
        threads == 1 ? 1 : std::clamp<index_t>(weight / min_row_call, 1, std::min(4 * threads, weight));
    const auto boundary = [&](index_t call) {
      return call == calls ? shape_.rows() : row_at(weight / calls * call + weight % calls * call / calls);
    };
    executor.run(calls, [&](index_t call) {
      auto visit = begin_call();
      index_t row = boundary(call);
      for (index_t left = boundary(call + 1) - row; left > 0;) {
        const index_t first = row % rows(), count = std::min(left, rows() - first);
        visit_rows(row / rows(), first, first + count, visit);
        finish(visit);
        left -= count;
        row += count;
      }
    });
  }

 private:
  index_t rows() const { return shape_.queries; }
  index_t begin(index_t r) const { return begins_[static_cast<std::size_t>(r)]; }
  /// A row counts as one element more than it has.
  index_t weight_of_head() const { return elements_ + rows(); }

  template <class Visit>
  void visit_rows(index_t head, index_t first, index_t last, Visit& visit) const {
    for (index_t r = first, from = begin(first), to; r < last; ++r, from = to) {
      to = begin(r + 1);
      const index_t n = to - from;
      const PlacedRow row{{.head = head, .position = std::max<index_t>(n - 1, 0), .n = n}, 0, r};
      visit(RowGroup{0, 0, head, 1, 1, {from, to}, {0, n}, row});
    }
  }

  /// Returns the first row, counted over all heads, whose predecessors weigh at least `weight`.
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

}  // namespace detail

/// Writes out = ln Σ exp(c·logits) for every row. `out` must not overlap the logits.
template <class X, class Y, int Rank, class S, class E = Serial>
requires Scaling<S> && RowMask<RaggedRows, Rank> && Executor<E>
void logsumexp(const View<X, Rank>& logits, const View<Y, Rank>& out, const S& scaling,
               const RaggedRows& rows, E&& executor = E{}) {
  detail::check_storage<X, Y>();
  detail::logsumexp_rows(detail::with_rank<4>(View<const X, Rank>(logits)), detail::with_rank<3>(out),
                         scaling, rows, executor);
}

SSMAX_END
/// @}
