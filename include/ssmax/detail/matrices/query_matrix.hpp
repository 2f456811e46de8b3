// A matrix [batch, heads, queries, keys] of a mask or a score, read by query and key.
#pragma once

#include "../../query.hpp"
#include "../../view.hpp"
#include "../checks/matrix.hpp"
#include "../checks/views.hpp"

SSMAX_BEGIN_SHARED

template <class T>
class QueryMatrix {
 public:
  SSMAX_INLINE constexpr QueryMatrix(const View<T, 4>& view, HeadsOfMatrix heads)
      : view_(view), heads_(heads) {}

  SSMAX_INLINE constexpr const View<T, 4>& view() const { return view_; }
  SSMAX_INLINE constexpr HeadsOfMatrix heads() const { return heads_; }
  /// Returns the element of a query and a key.
  SSMAX_INLINE constexpr T& operator()(const Query& query, index_t key) const {
    return view_(query.batch, head_of(query), query.index, key);
  }
  /// Returns the row of a query, or null if the last stride is not 1.
  SSMAX_INLINE constexpr T* row(const Query& query) const {
    return view_.stride(3) == 1 ? detail::row_of(view_, query.batch, head_of(query), query.index) : nullptr;
  }
  /// Throws unless the matrix fits the queries and keys of `shape`.
  SSMAX_INLINE void check(const char* function, const char* name, const QueryShape& shape) const {
    detail::check_matrix(function, name, view_, shape, heads_);
  }

 private:
  SSMAX_INLINE constexpr index_t head_of(const Query& query) const {
    return detail::matrix_of_head(query.head, view_.extent(1));
  }

  View<T, 4> view_;
  HeadsOfMatrix heads_;
};

SSMAX_END
