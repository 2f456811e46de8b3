// Defines the tensors of a call [batch, heads, row, channel]. The drivers do not depend on storage types: they load
// and store rows in the type Compute that they compute in.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include "../../../storage.hpp"
#include "../../../view.hpp"
#include "../../checks/views.hpp"
#include "../../members/key_source.hpp"
#include "../../memory/conversion.hpp"

SSMAX_BEGIN_SHARED

/// The kind of a tensor's storage type.
enum class ElementKind {
  compute,    // Compute: rows are read and written in place
  bfloat16,   // rows may be operands of the bf16 path
  quantized,  // rows of 8 bits with factors: dequantized, they may be operands of the bf16 path
  other
};

template <class Compute, class T>
inline constexpr ElementKind element_kind = std::same_as<T, Compute>      ? ElementKind::compute
                                            : std::same_as<T, bfloat16>   ? ElementKind::bfloat16
                                            : detail::QuantizedStorage<T> ? ElementKind::quantized
                                                                          : ElementKind::other;

SSMAX_END

SSMAX_BEGIN_DETAIL

/// A storage type of rows that are computed in A.
template <class T, class A>
concept StoredFor = Storage<T> && std::same_as<ComputeType<T>, A>;

/// Returns n numbers of a row of T: in place if T is Compute, else converted in scratch.
template <class Compute, class T>
const Compute* load_numbers(const void* row, index_t n, Compute* scratch) {
  return widened(static_cast<const T*>(row), n, scratch);
}
template <class Compute, class T>
void store_numbers(const Compute* numbers, index_t n, void* row) {
  narrow_to(static_cast<T*>(row), n, numbers);
}

SSMAX_END

SSMAX_BEGIN_SHARED

/// Rows of some heads of a tensor. `head` counts all heads of the call, as in Query::head: callers do not subtract
/// first_head.
class Rows {
 public:
  SSMAX_INLINE constexpr Rows() = default;
  template <class T>
  SSMAX_INLINE constexpr Rows(const View<T, 4>& view, ElementKind kind)
      : data_(view.data_handle()), size_(sizeof(T)), kind_(kind) {
    for (int i = 0; i < 4; ++i) {
      extents_[i] = view.extent(i);
      strides_[i] = view.stride(i);
    }
  }

  /// Returns the tensor as checks read it.
  SSMAX_INLINE operator detail::AnyView() const { return {data_, extents_, strides_, 4, size_}; }

  SSMAX_INLINE constexpr ElementKind kind() const { return kind_; }
  SSMAX_INLINE constexpr index_t extent(int i) const { return extents_[i]; }
  SSMAX_INLINE constexpr index_t stride(int i) const { return strides_[i]; }
  SSMAX_INLINE constexpr index_t first_head() const { return first_head_; }
  SSMAX_INLINE constexpr index_t end_head() const { return first_head_ + extents_[1]; }
  SSMAX_INLINE constexpr bool is_given() const { return data_ != nullptr; }
  SSMAX_INLINE constexpr index_t element_bytes() const { return size_; }
  /// Returns whether the elements have the storage type of another tensor. Your own types differ by their sizes alone.
  SSMAX_INLINE constexpr bool has_type_of(const Rows& other) const {
    return kind_ == other.kind_ && size_ == other.size_;
  }
  SSMAX_INLINE constexpr void set_first_head(index_t head) { first_head_ = head; }
  /// Refers to contiguous elements of the same type at another address.
  SSMAX_INLINE constexpr void place(const void* data, const std::array<index_t, 4>& extents) {
    data_ = data;
    first_head_ = 0;
    index_t stride = 1;
    for (int i = 4; i-- > 0; stride *= extents_[i]) {
      extents_[i] = extents[static_cast<std::size_t>(i)];
      strides_[i] = stride;
    }
  }
  /// Replaces a null address by one that is not null, for checks that read no element.
  SSMAX_INLINE void point_to_any() {
    if (data_ == nullptr) data_ = this;
  }
  /// Sets the strides of a tensor without elements to 0: adding a stride to a null pointer is undefined.
  SSMAX_INLINE void make_addressable() {
    if (extents_[0] * extents_[1] * extents_[2] * extents_[3] == 0)
      strides_[0] = strides_[1] = strides_[2] = strides_[3] = 0;
  }
  /// Keeps indices [first, first + count) of a dimension. first_head stays unchanged. A tensor that is left out stays
  /// so.
  SSMAX_INLINE void keep(int dimension, index_t first, index_t count) {
    if (data_ != nullptr) data_ = static_cast<const char*>(data_) + first * strides_[dimension] * size_;
    extents_[dimension] = std::min(extents_[dimension], count);
    make_addressable();
  }
  /// Prefetches the first numbers of a row. The row need not exist.
  SSMAX_INLINE void prefetch(index_t batch, index_t head, index_t i) const {
    const auto address =
        reinterpret_cast<std::uintptr_t>(data_) + static_cast<std::uintptr_t>(offset(batch, head, i));
    __builtin_prefetch(reinterpret_cast<const void*>(address));
  }

  /// Returns the address of a row.
  SSMAX_INLINE const void* row(index_t batch, index_t head, index_t i) const {
    return static_cast<const char*>(data_) + offset(batch, head, i);
  }

 private:
  /// Returns the number of bytes before a row.
  SSMAX_INLINE index_t offset(index_t batch, index_t head, index_t i) const {
    return (batch * strides_[0] + (head - first_head_) * strides_[1] + i * strides_[2]) * size_;
  }

  const void* data_ = nullptr;
  index_t first_head_ = 0, size_ = 0;
  ElementKind kind_ = ElementKind::compute;
  index_t extents_[4]{}, strides_[4]{};
};

/// A tensor that is read.
template <class Compute>
class InputRows : public Rows {
 public:
  SSMAX_INLINE constexpr InputRows() = default;
  template <class T>
  SSMAX_INLINE constexpr InputRows(const View<const T, 4>& view)
      : Rows(view, element_kind<Compute, T>), load_(detail::load_numbers<Compute, T>) {}

  /// Returns a row: in place if the rows are stored as Compute, else converted in scratch.
  SSMAX_INLINE const Compute* load(index_t batch, index_t head, index_t i, Compute* scratch) const {
    const void* at = row(batch, head, i);
    return kind() == ElementKind::compute ? static_cast<const Compute*>(at) : load_(at, extent(3), scratch);
  }
  /// Returns a row of Operand. Requires that the rows are stored as Operand.
  template <class Operand>
  SSMAX_INLINE const Operand* stored_as(index_t batch, index_t head, index_t i) const {
    return static_cast<const Operand*>(row(batch, head, i));
  }

 private:
  const Compute* (*load_)(const void* row, index_t n, Compute* scratch) = nullptr;
};

/// A tensor that is written.
template <class Compute>
class OutputRows : public Rows {
 public:
  SSMAX_INLINE constexpr OutputRows() = default;
  template <class T>
  SSMAX_INLINE constexpr OutputRows(const View<T, 4>& view)
      : Rows(view, element_kind<Compute, T>),
        load_(detail::load_numbers<Compute, T>),
        store_(detail::store_numbers<Compute, T>) {}

  /// Returns a row in scratch. Requires that the rows are not stored as Compute.
  SSMAX_INLINE const Compute* load(index_t batch, index_t head, index_t i, Compute* scratch) const {
    return load_(row(batch, head, i), extent(3), scratch);
  }

  /// Returns where to compute a row: in place if the rows are stored as Compute, else in scratch. Requires a call of
  /// `store` afterwards.
  SSMAX_INLINE Compute* stage(index_t batch, index_t head, index_t i, Compute* scratch) const {
    return kind() == ElementKind::compute ? in_place(batch, head, i) : scratch;
  }
  SSMAX_INLINE void store(index_t batch, index_t head, index_t i, const Compute* staged) const {
    if (kind() != ElementKind::compute) store_(staged, extent(3), const_cast<void*>(row(batch, head, i)));
  }
  /// Returns a row. Requires that the rows are stored as Compute.
  SSMAX_INLINE Compute* in_place(index_t batch, index_t head, index_t i) const {
    return static_cast<Compute*>(const_cast<void*>(row(batch, head, i)));
  }

 private:
  const Compute* (*load_)(const void* row, index_t n, Compute* scratch) = nullptr;
  void (*store_)(const Compute* staged, index_t n, void* row) = nullptr;
};

/// One number per row: a view [batch, heads, row] of some heads of the call.
template <class T>
class RowNumbers {
 public:
  SSMAX_INLINE constexpr RowNumbers() = default;
  SSMAX_INLINE constexpr RowNumbers(const View<T, 3>& numbers, index_t first_head = 0)
      : numbers_(numbers), first_head_(first_head) {}

  SSMAX_INLINE constexpr bool is_given() const { return numbers_.data_handle() != nullptr; }
  SSMAX_INLINE constexpr const View<T, 3>& view() const { return numbers_; }
  SSMAX_INLINE constexpr T& operator()(index_t batch, index_t head, index_t row) const {
    return numbers_(batch, head - first_head_, row);
  }

 private:
  View<T, 3> numbers_{};
  index_t first_head_ = 0;
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// Returns rows that loops may address.
template <class R>
requires std::derived_from<R, Rows> R addressable(R rows) {
  rows.make_addressable();
  return rows;
}
/// Returns the rows as those of the heads from `first` on of a call.
template <class R>
R from_head(R rows, index_t first) {
  rows.set_first_head(first);
  return rows;
}

SSMAX_END
