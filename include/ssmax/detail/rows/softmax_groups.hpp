// Computes softmax of the groups of rows that groups.hpp visits.
#pragma once

#include <concepts>
#include <type_traits>

#include "../../view.hpp"
#include "driver.hpp"
#include "fill.hpp"
#include "groups.hpp"
#include "strided.hpp"

SSMAX_BEGIN_DETAIL

/// Collects neighbouring short rows that see different keys, and computes as many at a time as a vector has lanes.
template <class T>
class LoneRows {
 public:
  explicit LoneRows(const SoftmaxKernels<T>& kernels) : kernels_(kernels) {}
  /// A copy is empty.
  LoneRows(const LoneRows& other) : kernels_(other.kernels_) {}

  /// Returns true if rows of n elements are collected.
  bool takes(index_t n) const { return n <= kernels_.short_rows.longest && kernels_.rows.width > 1; }

  void add(const LoneRow<T>& row) {
    rows_[count_++] = row;
    if (count_ == kernels_.rows.width) finish();
  }

  void finish() {
    if (count_ > 0) compiled::softmax_lone_rows(kernels_, rows_, count_);
    count_ = 0;
  }

 private:
  const SoftmaxKernels<T>& kernels_;
  index_t count_ = 0;
  LoneRow<T> rows_[max_lone_rows];
};

/// Computes softmax of the groups of one call of an executor.
template <class X, class Y, class S>
class SoftmaxGroups {
  using T = ComputeType<X>;
  static constexpr bool shares_vectors = std::same_as<X, T> && std::same_as<Y, T>;

 public:
  /// `collects`: short groups of one row are collected.
  SoftmaxGroups(const SoftmaxKernels<T>& kernels, const S& scaling, bool collects)
      : kernels_(kernels), scaling_(scaling), collects_(collects), lone_rows_(kernels) {}

  SSMAX_INLINE void operator()(const RowViews<X, Y, 1>& views, const RowGroup& group) {
    const View<const X, 4>& logits = views.in[0];
    const View<Y, 4>& out = views.out;
    const index_t columns = group.elements.size();
    const X* from = group.first(logits) + group.keys.begin;
    Y* to = group.first(out);
    const double c = group.keys.size() == 0 ? 0.0 : static_cast<double>(scaling_(group.row));
    if constexpr (shares_vectors) {
      const bool is_lone = group.group_rows == 1 && collects_;
      if (is_lone && group.keys.size() > 0 && lone_rows_.takes(group.keys.size())) {
        if (group.keys.begin > 0) fill_row(to, group.keys.begin, 0.0f);
        return lone_rows_.add({from, to + group.keys.begin, group.keys.size(), columns - group.keys.end, c});
      }
    }
    if (group.keys.size() < columns) {
      for (index_t r = 0; r < group.rows; ++r) fill_masked(to + r * out.stride(2), columns, group.keys, 0.0f);
    }
    if (group.keys.size() == 0) return;
    to += group.keys.begin;
    compiled::softmax_group<X, Y>(kernels_, {from, logits.stride(2)}, {to, out.stride(2)}, group.rows,
                                  group.keys.size(), c, group.group_rows == 1);
  }

  void finish() {
    if constexpr (shares_vectors) lone_rows_.finish();
  }

 private:
  const SoftmaxKernels<T>& kernels_;
  const S& scaling_;
  bool collects_;
  LoneRows<T> lone_rows_;
};

SSMAX_END
