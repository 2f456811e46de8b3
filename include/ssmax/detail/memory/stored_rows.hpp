// The rows of keys and values that a cache owns.
#pragma once

#include <algorithm>
#include <concepts>
#include <initializer_list>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "../../key_source.hpp"
#include "../../rope.hpp"
#include "../checks/key_storage.hpp"
#include "../checks/views.hpp"
#include "conversion.hpp"
#include "pages.hpp"

SSMAX_BEGIN_DETAIL

/// Throws if the number of bytes of rows with these extents may overflow. The message names an option.
inline void check_bytes(const char* cache, const char* name, index_t value,
                        std::initializer_list<index_t> extents) {
  index_t elements = 1;
  for (index_t extent : extents) {
    if (extent > std::numeric_limits<index_t>::max() / 32 / elements)
      fail_value(cache, name, "is", value, "too many bytes; elements before it are", elements);
    elements *= std::max<index_t>(extent, 1);
  }
}

/// Throws unless the keys `kept` of a sequence rise and lie in [length, stored).
inline void check_kept(const char* function, index_t length, Integers kept, index_t stored) {
  if (length < 0 || length > stored)
    fail_value(function, "length", "is", length, "must be within 0 and", stored);
  for (index_t least = length; index_t key : kept) {
    if (key < least) fail_value(function, "kept", "has key", key, "must rise and be at least", least);
    if (key >= stored) fail_value(function, "kept", "has key", key, "stored keys are", stored);
    least = key + 1;
  }
}

/// Throws unless the rope has the position `length + offset`, for `sequences` sequences.
template <class T>
void check_offset(const char* function, const Rope<T>& rope, index_t length, index_t offset, index_t width,
                  index_t sequences = 1) {
  if (offset > max_counted) fail_value(function, "offsets", "has", offset, "must be at most", max_counted);
  rope.check(function, "k", length + offset, 1, width, sequences);
}

/// Returns the address of a number of a view, or null if the view is left out.
template <int Rank, class... Index>
const float* number_at(const View<const float, Rank>& view, Index... at) {
  return view.data_handle() == nullptr ? nullptr : &view(at...);
}

/// Rows of keys, stored as K, and of values, stored as V. A storage type with `scale` has one float per row. Widths
/// count channels.
template <class K, class V>
class StoredRows {
 public:
  using Compute = ComputeType<K>;

  /// True if a cache also accepts rows in their storage type, which differs from Compute.
  static constexpr bool accepts_storage =
      !(std::same_as<K, Compute> && std::same_as<V, Compute>)&&!ScaledStorage<K> && !ScaledStorage<V> &&
      group_of<K> == 1 && group_of<V> == 1;

  /// True if a cache also accepts rows that are quantized.
  static constexpr bool accepts_quantized =
      ScaledStorage<K> || ScaledStorage<V> || group_of<K> != 1 || group_of<V> != 1;

  StoredRows(index_t rows, index_t width, index_t value_width)
      : width_(width),
        value_width_(value_width),
        k_(static_cast<std::size_t>(rows * elements<K>(width))),
        v_(static_cast<std::size_t>(rows * elements<V>(value_width))),
        k_scales_(static_cast<std::size_t>(ScaledStorage<K> ? rows : 0)),
        v_scales_(static_cast<std::size_t>(ScaledStorage<V> ? rows : 0)),
        scratch_(static_cast<std::size_t>(std::max(width, value_width))) {}

  /// Stores a key and its value. With a rope, rotates the key to `place`.
  template <class NewKey, class NewValue>
  void store(index_t row, const NewKey* k, const NewValue* v, const Rope<Compute>* rope, RopePlace place) {
    if (rope == nullptr) {
      store_row(k, width_, k_, k_scales_, row);
    } else {
      const Compute* wide = widened(k, width_, scratch_.data());
      rotate(rope->tables(), {wide, width_}, {scratch_.data(), width_}, 1, width_, place, false);
      store_row(static_cast<const Compute*>(scratch_.data()), width_, k_, k_scales_, row);
    }
    store_row(v, value_width_, v_, v_scales_, row);
  }

  /// Sets the factors of a key and of its value. A type without factors has a null pointer.
  void set_scales(index_t row, const float* k_scale, const float* v_scale) {
    if (k_scale != nullptr) k_scales_[static_cast<std::size_t>(row)] = *k_scale;
    if (v_scale != nullptr) v_scales_[static_cast<std::size_t>(row)] = *v_scale;
  }

  /// Copies `count` stored keys and values to other rows, or to the same.
  void copy(index_t from, index_t to, index_t count) {
    if (from == to) return;
    const index_t of_k = elements<K>(width_), of_v = elements<V>(value_width_);
    std::copy_n(k_.data() + from * of_k, count * of_k, k_.data() + to * of_k);
    std::copy_n(v_.data() + from * of_v, count * of_v, v_.data() + to * of_v);
    if (!k_scales_.empty()) std::copy_n(k_scales_.data() + from, count, k_scales_.data() + to);
    if (!v_scales_.empty()) std::copy_n(v_scales_.data() + from, count, v_scales_.data() + to);
  }

  KeyRun<K, V> run(index_t row, index_t count) const {
    const index_t of_k = elements<K>(width_), of_v = elements<V>(value_width_);
    return {.k = k_.data() + row * of_k,
            .k_stride = of_k,
            .v = v_.data() + row * of_v,
            .v_stride = of_v,
            .count = count,
            .k_scales = k_scales_.empty() ? nullptr : k_scales_.data() + row,
            .v_scales = v_scales_.empty() ? nullptr : v_scales_.data() + row};
  }
  std::pair<std::span<const K>, std::span<const V>> memory() const { return {k_, v_}; }
  /// Returns the factors of the rows. A type without factors has empty spans.
  std::pair<std::span<const float>, std::span<const float>> scales() const { return {k_scales_, v_scales_}; }

 private:
  template <class X>
  using Elements = std::vector<X, HugePages<X>>;

  /// Returns the number of elements of a row.
  template <class X>
  static index_t elements(index_t width) {
    return width / group_of<X>;
  }

  template <class U, class X>
  void store_row(const U* in, index_t n, Elements<X>& rows, [[maybe_unused]] std::vector<float>& scales,
                 index_t row) {
    X* out = rows.data() + row * elements<X>(n);
    if constexpr (std::same_as<U, X>) {
      std::copy_n(in, elements<X>(n), out);
    } else if constexpr (ScaledStorage<X>) {
      const float scale = StorageTraits<X>::scale(in, n);
      scales[static_cast<std::size_t>(row)] = scale;
      std::transform(in, in + n, scratch_.data(), [scale](Compute x) { return x / scale; });
      narrow_to(out, n, scratch_.data());
    } else {
      narrow_to(out, n, in);
    }
  }

  index_t width_, value_width_;
  Elements<K> k_;                           // [rows][elements of a key]
  Elements<V> v_;                           // [rows][elements of a value]
  std::vector<float> k_scales_, v_scales_;  // [rows], or empty
  std::vector<Compute> scratch_;            // one row
};

SSMAX_END
