// Visits the groups of rows of a call whose views may have any last stride. Drivers read contiguous rows. So rows of a
// view with another last stride than 1 are copied to scratch, and results are copied back, block by block.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <type_traits>
#include <vector>

#include "../../workspace.hpp"
#include "groups.hpp"

SSMAX_BEGIN_DETAIL

/// Bytes of the scratch of one view, and lower bound of its rows. Blocks of rows are divided as calls of an executor
/// are, at multiples of every target's vector length, so that results are bit-identical to those of contiguous rows.
inline constexpr index_t scratch_bytes = index_t{256} << 10, least_scratch_rows = 16;

/// The views [batch, head, query, key] of a call. A view that is left out is null.
template <class X, class Y, std::size_t Inputs>
struct RowViews {
  std::array<View<const X, 4>, Inputs> in;
  View<Y, 4> out;
};

/// Returns true if the keys of each row are contiguous.
template <class T>
bool has_contiguous_rows(const View<T, 4>& view) {
  return view.data_handle() == nullptr || view.extent(3) <= 1 || view.stride(3) == 1;
}

template <class X, class Y, std::size_t Inputs>
bool are_contiguous_rows(const RowViews<X, Y, Inputs>& views) {
  bool result = has_contiguous_rows(views.out);
  for (const auto& view : views.in) result = result && has_contiguous_rows(view);
  return result;
}

/// A matrix with any strides.
template <class T>
struct StridedMatrix {
  T* data;
  index_t row_stride, column_stride;

  SSMAX_INLINE T& operator()(index_t row, index_t column) const {
    return data[row * row_stride + column * column_stride];
  }
};

/// Copies a matrix, tile by tile. Reads rows of a tile and writes its columns, so that each cache line of either matrix
/// is touched once: lines at a distance of 4 KiB share few places of a first-level cache.
template <class T>
void copy_matrix(StridedMatrix<const T> from, StridedMatrix<T> to, index_t rows, index_t columns) {
  constexpr index_t side = 16;
  T tile[side][side];
  for (index_t row = 0; row < rows; row += side) {
    for (index_t column = 0; column < columns; column += side) {
      const index_t height = std::min(side, rows - row), width = std::min(side, columns - column);
      for (index_t i = 0; i < height; ++i) {
        if (width == side && from.column_stride == 1) {
          std::copy_n(&from(row + i, column), side, tile[i]);  // a few vectors
        } else {
          for (index_t j = 0; j < width; ++j) tile[i][j] = from(row + i, column + j);
        }
      }
      for (index_t j = 0; j < width; ++j) {
        T* const y = &to(row, column + j);
        if (height == side && to.row_stride == 1) {
          for (index_t i = 0; i < side; ++i) y[i] = tile[i][j];
        } else {
          for (index_t i = 0; i < height; ++i) y[i * to.row_stride] = tile[i][j];
        }
      }
    }
  }
}

/// Neighbouring rows of a head, or a part of one row, of a view with any last stride. Copies to and from scratch.
template <class T>
class RowBlock {
  using Element = std::remove_const_t<T>;

 public:
  /// Returns the block with last stride 1: in scratch, unless the view has last stride 1. Exception: returns a null
  /// view itself.
  View<T, 4> contiguous(const View<T, 4>& view, const RowGroup& first, index_t rows, index_t columns,
                        std::byte* scratch) {
    if (view.data_handle() == nullptr) return view;
    origin_ = {row_of(view, first.batch, first.head, first.query) + first.elements.begin * view.stride(3),
               {1, 1, rows, columns},
               {0, 0, view.stride(2), view.stride(3)}};
    if (has_contiguous_rows(view)) return origin_;
    scratch_ = reinterpret_cast<Element*>(scratch);
    return View<Element, 4>(scratch_, origin_.extents());
  }
  void load() {
    if (!is_copied()) return;
    const index_t rows = origin_.extent(2), keys = origin_.extent(3);
    copy_matrix<Element>({origin_.data_handle(), origin_.stride(3), origin_.stride(2)}, {scratch_, 1, keys},
                         keys, rows);
  }
  void store() {
    if (!is_copied()) return;
    const index_t rows = origin_.extent(2), keys = origin_.extent(3);
    copy_matrix<Element>({scratch_, keys, 1}, {origin_.data_handle(), origin_.stride(2), origin_.stride(3)},
                         rows, keys);
  }

 private:
  bool is_copied() const { return scratch_ != nullptr; }

  View<T, 4> origin_;
  Element* scratch_ = nullptr;
};

/// Passes the groups of one call of an executor to compute(views, group). If a view has another last stride than 1,
/// collects the groups of a block, and passes views and groups of the block. The row of a group keeps its place in the
/// call.
template <class X, class Y, std::size_t Inputs, class Compute>
class StridedGroups {
 public:
  StridedGroups(const RowViews<X, Y, Inputs>& views, const QueryShape& shape, Compute compute)
      : views_(views), compute_(compute) {
    if (are_contiguous_rows(views)) return;
    block_.emplace();
    const index_t row_bytes = std::max<index_t>(shape.keys, 1) * static_cast<index_t>(sizeof(X));
    const index_t fitting = scratch_bytes / row_bytes / least_scratch_rows * least_scratch_rows;
    block_->longest = std::min(std::max(fitting, least_scratch_rows), shape.queries);
    block_->capacity = block_->longest * shape.keys;
    // One allocation for all views: glibc would return the memory of several ones to the system after each call.
    const std::size_t bytes = static_cast<std::size_t>(block_->capacity) * std::max(sizeof(X), sizeof(Y));
    block_->bytes_of_view = (bytes + 63) / 64 * 64;
    block_->scratch = block_->memory.reserve((Inputs + 1) * block_->bytes_of_view);
  }

  SSMAX_INLINE void operator()(const RowGroup& group) {
    if (block_) return collect(group);
    compute_(views_, group);
  }

  void finish() {
    if (block_ && !block_->groups.empty()) compute_block();
    detail::finish(compute_);
  }

 private:
  /// The collected groups, and scratch of the views.
  struct Block {
    std::vector<RowGroup> groups;
    index_t size = 0, capacity = 0;  // elements of the groups, and of the scratch
    index_t longest = 0;             // upper bound of a group's rows
    std::array<RowBlock<const X>, Inputs> in;
    RowBlock<Y> out;
    Workspace memory;
    std::byte* scratch = nullptr;
    std::size_t bytes_of_view = 0;
  };

  /// Takes a copy, so that compilers keep the members of a group in registers.
  void collect(RowGroup group) {
    RowGroup part = group;
    for (index_t left = group.rows; left > 0; left -= part.rows, part.query += part.rows) {
      part.rows = std::min(left, block_->longest);
      part.row.query = group.row.query + part.query - group.query;
      const index_t size = part.rows * group.elements.size();
      if (block_->size + size > block_->capacity) compute_block();
      block_->groups.push_back(part);
      block_->size += size;
    }
  }

  void compute_block() {
    Block& block = *block_;
    const RowGroup first = block.groups.front(), &last = block.groups.back();
    const index_t rows = last.query + last.rows - first.query,
                  columns = last.elements.end - first.elements.begin;
    const auto contiguous = [&](auto& copy, const auto& view, std::size_t i) {
      return copy.contiguous(view, first, rows, columns, block.scratch + i * block.bytes_of_view);
    };
    RowViews<X, Y, Inputs> views;
    for (std::size_t i = 0; i < Inputs; ++i) {
      views.in[i] = contiguous(block.in[i], views_.in[i], i);
      block.in[i].load();
    }
    views.out = contiguous(block.out, views_.out, Inputs);
    for (RowGroup& group : block.groups) {
      group.batch = group.head = 0;
      group.query -= first.query;
      group.elements.begin -= first.elements.begin;
      group.elements.end -= first.elements.begin;
      compute_(views, group);
    }
    detail::finish(compute_);
    block.out.store();
    block.groups.clear();
    block.size = 0;
  }

  const RowViews<X, Y, Inputs>& views_;
  Compute compute_;
  std::optional<Block> block_;  // if a last stride is not 1
};

/// Calls compute(views, group) for every group of views with any last stride. Each call of the executor has its own
/// copy of `compute`, whose finish(), if it exists, is called before results are read.
template <class X, class Y, std::size_t Inputs, class Division, class E, class Compute>
void for_each_group_of(const RowViews<X, Y, Inputs>& views, const Division& rows, E& executor,
                       const Compute& compute) {
  rows.for_each_group(executor,
                      [&] { return StridedGroups<X, Y, Inputs, Compute>(views, rows.shape(), compute); });
}

SSMAX_END
