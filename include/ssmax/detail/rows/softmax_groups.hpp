// Computes softmax of the groups of rows that groups.hpp visits.
#pragma once

#include <concepts>
#include <type_traits>

#include "../../view.hpp"
#include "driver.hpp"
#include "fill.hpp"
#include "groups.hpp"

SSMAX_BEGIN_DETAIL

/// Collects neighbouring short rows that see different keys, and computes as many at a time as a vector has lanes.
template <class T>
class LoneRows {
 public:
  explicit LoneRows(const SoftmaxKernels<T>& kernels) : kernels_(kernels) {}

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

/// Computes softmax of the groups of one call.
template <class X, class Y, class S>
struct SoftmaxGroups {
  using T = ComputeType<X>;

  /// Computes the groups of a run of rows that one thread visits.
  struct Piece {
    const SoftmaxGroups& call;
    LoneRows<T> lone_rows;

    void operator()(const RowGroup& group) {
      const index_t columns = call.logits.extent(3);
      const X* from = &call.logits(group.batch, group.head, group.query, 0) + group.keys.begin;
      Y* to = &call.out(group.batch, group.head, group.query, 0);
      const double c = group.keys.size() == 0 ? 0.0 : static_cast<double>(call.scaling(group.row));
      if constexpr (std::same_as<std::remove_const_t<X>, T> && std::same_as<Y, T>) {
        const bool has_neighbours = group.group_rows == 1 && call.out.extent(2) > 1;
        if (has_neighbours && group.keys.size() > 0 && lone_rows.takes(group.keys.size())) {
          if (group.keys.begin > 0) fill_row(to, group.keys.begin, 0.0f);
          return lone_rows.add({from, to + group.keys.begin, group.keys.size(), columns - group.keys.end, c});
        }
      }
      if (group.keys.size() < columns) {
        for (index_t r = 0; r < group.rows; ++r)
          fill_masked(to + r * call.out.stride(2), columns, group.keys, 0.0f);
      }
      if (group.keys.size() == 0) return;
      to += group.keys.begin;
      compiled::softmax_group<std::remove_const_t<X>, Y>(call.kernels, {from, call.logits.stride(2)},
                                                         {to, call.out.stride(2)}, group.rows,
                                                         group.keys.size(), c, group.group_rows == 1);
    }

    void finish() {
      if constexpr (std::same_as<std::remove_const_t<X>, T> && std::same_as<Y, T>) lone_rows.finish();
    }
  };

  const SoftmaxKernels<T>& kernels;
  const View<X, 4>& logits;
  const View<Y, 4>& out;
  const S& scaling;

  Piece of_piece() const { return {*this, LoneRows<T>(kernels)}; }
};

SSMAX_END
