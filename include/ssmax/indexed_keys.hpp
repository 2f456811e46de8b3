/// @defgroup indexed_keys Keys by index (indexed_keys.hpp)
/// Keys and values at the indices of a list, in the memory of somebody else's pool. A list has one index per token, or
/// the tokens that a selection chose for a query.
///
///     const IndexedKeys keys(k, v, indices, lengths);
///     attention({.q = q, .keys = keys, .out = out}, SSMax<float>{s}, Full{});
///
/// | argument | shape |
/// |---|---|
/// | k | [tokens, kv_heads, width] |
/// | v | [tokens, kv_heads, value_width] |
/// | indices | [batch, lists, most]: lists is 1 if all kv heads share a list, else kv_heads |
/// | lengths | [batch]: the number of indices of each list |
/// | scales | storage types with a factor per row only (eight_bit.hpp): KeyScales<2> (key_source.hpp) |
///
/// For storage types with `group` (storage.hpp), such as Q8_0, the last extent and the strides count elements.
///
/// Key i of kv head h in sequence b is token indices(b, h, i) of the pool, or indices(b, 0, i) if all kv heads share a
/// list. Strides are yours. Exception: the last stride of k and v is 1. Indices and lengths are integers of any type.
/// Indices may repeat, in any order. Entries beyond the length are not read.
///
/// n and positions count the entries of the list: a query that sees all entries has n = lengths[b]. For another n, such
/// as the length of the whole sequence, compute the multipliers and pass them by PerQuery (scaling_per_query.hpp). Keys
/// must be rotated before they are stored.
///
/// Results are bit-identical to those over a KvCache of the same keys.
///
/// The constructor checks everything in O(entries) and throws std::invalid_argument with the name of the argument.
/// Pool, factors, indices and lengths must outlive the source, and must not change while it is used.
#pragma once

#include <algorithm>
#include <concepts>
#include <span>
#include <type_traits>
#include <utility>

#include "detail/checks/key_storage.hpp"
#include "detail/checks/views.hpp"
#include "kept_span.hpp"
#include "key_source.hpp"
#include "view.hpp"

/// @addtogroup indexed_keys
/// @{
SSMAX_BEGIN_CODE

/// A source of keys by index. K and V are the storage types of keys and values.
template <class K, class V = K, std::integral Index = int, std::integral Length = Index>
class IndexedKeys {
 public:
  using Element = K;       ///< Storage type of keys.
  using ValueElement = V;  ///< Storage type of values.

  /// Refers to a pool and lists: the top of indexed_keys.hpp.
  IndexedKeys(const View<const K, 3>& k, const View<const V, 3>& v, const View<const Index, 3>& indices,
              KeptSpan<const Length> lengths, const KeyScales<2>& scales = {})
      : k_(k), v_(v), scales_(scales), indices_(indices), lengths_(lengths) {
    detail::check_view("IndexedKeys", "k", k_);
    detail::check_view("IndexedKeys", "v", v_);
    for (int i = 0; i < 2; ++i) detail::check_extent("IndexedKeys", "v", v_, i, "k", k_, i);
    detail::check_scales("IndexedKeys", "k_scales", scales_.k, "k", k_);
    detail::check_scales("IndexedKeys", "v_scales", scales_.v, "v", v_);
    detail::check_strided_view("IndexedKeys", "indices", indices_);
    detail::check_equal("IndexedKeys", "lengths", "has size", std::ssize(lengths_),
                        "must be the batch of indices", indices_.extent(0));
    if (indices_.extent(1) != 1 && indices_.extent(1) != k_.extent(1)) {
      detail::fail_value("IndexedKeys", "indices", "has lists", indices_.extent(1),
                         "must be 1 or the heads of k", k_.extent(1));
    }
    for (index_t b = 0; b < std::ssize(lengths_); ++b) check_sequence(b);
  }

  /// Returns batch, kv heads and widths.
  [[nodiscard]] KeySourceShape shape() const {
    return {std::ssize(lengths_), k_.extent(1), k_.extent(2) * detail::group_of<K>,
            v_.extent(2) * detail::group_of<V>};
  }
  /// Returns the number of entries of the lists of sequence b.
  [[nodiscard]] index_t length(index_t b) const {
    return static_cast<index_t>(lengths_[static_cast<std::size_t>(b)]);
  }
  /// Returns all entries of the lists of sequence b.
  [[nodiscard]] KeyRange stored(index_t b) const { return {0, length(b)}; }
  /// Returns a run of keys that starts at entry `key` of kv head h in sequence b. Indices that follow one another make
  /// one run.
  [[nodiscard]] KeyRun<K, V> run(index_t b, index_t h, index_t key) const {
    const Index* entry = &indices_(b, shares_list() ? 0 : h, key);
    const auto token = static_cast<index_t>(*entry);
    const index_t most = std::min(length(b) - key, longest_run), step = indices_.stride(2);
    index_t count = 1;
    while (count < most && static_cast<index_t>(entry[count * step]) == token + count) ++count;
    return {.k = k_.data_handle() + token * k_.stride(0) + h * k_.stride(1),
            .k_stride = k_.stride(0),
            .v = v_.data_handle() + token * v_.stride(0) + h * v_.stride(1),
            .v_stride = v_.stride(0),
            .count = count,
            .k_scales = scale_of(scales_.k, token, h),
            .v_scales = scale_of(scales_.v, token, h),
            .k_scales_stride = scales_.k.stride(0),
            .v_scales_stride = scales_.v.stride(0)};
  }
  /// Returns the memory of the pool.
  [[nodiscard]] std::pair<std::span<const K>, std::span<const V>> memory() const {
    return {detail::memory_of(k_), detail::memory_of(v_)};
  }

 private:
  friend detail::SourceRows;

  static constexpr index_t longest_run = 512;  // no kernel reads more keys at once

  bool shares_list() const { return indices_.extent(1) == 1; }

  /// Writes the addresses of `count` keys and values from entry `first` on.
  void find_rows(index_t b, index_t h, index_t first, index_t count, detail::RowLists to) const {
    const Index* const entries = &indices_(b, shares_list() ? 0 : h, first);
    const K* const k = k_.data_handle() + h * k_.stride(1);
    const V* const v = v_.data_handle() + h * v_.stride(1);
    const index_t step = indices_.stride(2), k_stride = k_.stride(0), v_stride = v_.stride(0);
    for (index_t i = 0; i < count; ++i) {
      const auto token = static_cast<index_t>(entries[i * step]);
      to.k[i] = reinterpret_cast<const std::byte*>(k + token * k_stride);
      to.v[i] = reinterpret_cast<const std::byte*>(v + token * v_stride);
    }
  }
  detail::HeadDistance head_distance() const {
    return {shares_list(), detail::bytes_of<K>(k_.stride(1)), detail::bytes_of<V>(v_.stride(1))};
  }

  /// Returns the factor of a row. A view that is not given has no factors: null.
  static const float* scale_of(const View<const float, 2>& scales, index_t token, index_t h) {
    return scales.data_handle() + token * scales.stride(0) + h * scales.stride(1);
  }

  void check_sequence(index_t b) const {
    const index_t n = length(b);
    if (n < 0) detail::fail_value("IndexedKeys", "lengths", "has entry", n, "must be at least", 0);
    if (n > indices_.extent(2)) {
      detail::fail_value("IndexedKeys", "lengths", "has entry", n, "must be at most the entries of a list",
                         indices_.extent(2));
    }
    for (index_t list = 0; list < indices_.extent(1); ++list) {
      for (index_t i = 0; i < n; ++i) {
        const auto token = static_cast<index_t>(indices_(b, list, i));
        if (token < 0 || token >= k_.extent(0)) {
          detail::fail_value("IndexedKeys", "indices", "has entry", token,
                             "must be at least 0 and below the tokens of k", k_.extent(0));
        }
      }
    }
  }

  View<const K, 3> k_;
  View<const V, 3> v_;
  KeyScales<2> scales_;
  View<const Index, 3> indices_;
  std::span<const Length> lengths_;
};

template <class K, class V, class Index, class Lengths>
IndexedKeys(const View<K, 3>&, const View<V, 3>&, const View<Index, 3>&, const Lengths&,
            const KeyScales<2>& = {})
    -> IndexedKeys<std::remove_const_t<K>, std::remove_const_t<V>, std::remove_const_t<Index>,
                   shared::ElementOf<const Lengths>>;

SSMAX_END
/// @}
