// Rows of some heads of a call.
#pragma once

#include "../../../view.hpp"
#include "../../checks/views.hpp"

SSMAX_BEGIN_SHARED

/// A view [batch, heads, …] of heads [first_head, first_head + extent(1)) of a call. operator() and row_of take a
/// head's number among all heads of the call, as Query has it: no reader subtracts first_head.
template <class T, int Rank>
class HeadRows {
 public:
  SSMAX_INLINE constexpr HeadRows() = default;
  SSMAX_INLINE constexpr HeadRows(const View<T, Rank>& rows, index_t first_head = 0)
      : rows_(rows), first_head_(first_head) {}

  SSMAX_INLINE constexpr index_t first_head() const { return first_head_; }
  /// Behind the last head.
  SSMAX_INLINE constexpr index_t end_head() const { return first_head_ + rows_.extent(1); }
  /// The same rows with heads counted from 0.
  SSMAX_INLINE constexpr const View<T, Rank>& view() const { return rows_; }
  SSMAX_INLINE constexpr index_t extent(int i) const { return rows_.extent(i); }
  SSMAX_INLINE constexpr index_t stride(int i) const { return rows_.stride(i); }
  SSMAX_INLINE constexpr T* data_handle() const { return rows_.data_handle(); }

  SSMAX_INLINE constexpr T& operator()(index_t batch, index_t head, index_t row) const requires(Rank == 3) {
    return rows_(batch, head - first_head_, row);
  }

 private:
  View<T, Rank> rows_{};
  index_t first_head_ = 0;
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// Returns the first element of a row.
template <class T>
T* row_of(const HeadRows<T, 4>& rows, index_t batch, index_t head, index_t row) {
  return row_of(rows.view(), batch, head - rows.first_head(), row);
}

SSMAX_END
