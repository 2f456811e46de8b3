/// @defgroup key_source Sources of keys (key_source.hpp)
/// A source of keys holds the keys and values of a call: a cache, pages, memory of your own.
///
/// A source is a type with the members
///
///     using Element                                   the storage type of keys and values (storage.hpp)
///     KeySourceShape shape() const                    returns the extents
///     index_t length(batch) const                     returns the number of positions of a sequence, of any integer
///                                                     type. n and positions count them
///     KeyRange stored(batch) const                    returns the positions whose keys are stored: [first, length)
///     KeyRun<Element> run(batch, kv_head, key) const  returns the longest contiguous run of stored keys that starts at
///                                                     `key`
///
/// Optional members:
///
///     using ValueElement                              the storage type of values, if it differs from Element. `run`
///                                                     then returns KeyRun<Element, ValueElement>
///     KeyRange forgotten(batch) const                 returns positions within stored(batch) whose keys are no longer
///                                                     stored. A mask must not show them. `run` must return readable
///                                                     memory for them (default: no position)
///     bool shares_keys() const                        returns whether several sequences may have keys in the same
///                                                     memory, as sequences with common pages do. If two
///                                                     sequences have a key in the same memory for kv head 0,
///                                                     they have it for all kv heads (default: false)
///     std::uint64_t layout() const                    returns a number. If it is not 0, all sources with this number
///                                                     must have the same lengths, stored keys and shared keys.
///                                                     Plan::bind then does not compare them (default: 0)
///     static constexpr bool owns_keys                 true: a call refuses a temporary. false: the arguments of a call
///                                                     hold a copy, also of a variable (default: a copy of a temporary)
///     std::pair<std::span<const Element>, std::span<const ValueElement>> memory() const
///                                                     returns the memory of keys and values. Calls throw if a result
///                                                     overlaps it
///
/// attention (attention.hpp) and Plan (plan.hpp) take a source as the argument `keys` (attention_arguments.hpp).
/// KvCache (kv_cache.hpp) and PagedKeys (paged_keys.hpp), also those of a PagedKvCache, are sources. The
/// example custom_key_source.cpp defines a source: `run` looks up the page of `key` in the page table and returns the
/// rest of that page. A source must not change during a call. Several threads call its members.
#pragma once

#include "detail/members/key_source.hpp"
#include "query.hpp"
#include "storage.hpp"
#include "view.hpp"

/// @addtogroup key_source
/// @{
SSMAX_BEGIN_DATA

/// The extents of a source of keys.
struct KeySourceShape {
  index_t batch = 0,    ///< Sequences.
      kv_heads = 0;     ///< Heads of keys and values.
  index_t width = 0,    ///< Channels of a key, in one head.
      value_width = 0;  ///< Channels of a value, in one head.
};

/// `count` contiguous keys: key i lies at k + i·k_stride, its value at v + i·v_stride. `count` is at least 1 and
/// must not exceed the number of stored keys.
template <class K, class V = K>
struct KeyRun {
  const K* k = nullptr;  ///< The first key.
  index_t k_stride = 0;  ///< Elements from one key to the next.
  const V* v = nullptr;  ///< Its value.
  index_t v_stride = 0;  ///< Elements from one value to the next.
  index_t count = 0;     ///< The number of keys.
  /// For storage types with a factor per row (`StorageTraits::scale`): the factor of the first key.
  const float *k_scales = nullptr,
              *v_scales = nullptr;  ///< The factor of its value.
  /// Floats from the factor of one key to the factor of the next. 0: one factor for all keys of the run.
  index_t k_scales_stride = 1,
          v_scales_stride = 1;  ///< Floats from the factor of one value to the factor of the next.
  /// For the same storage types: the factors of the channels of all keys of the run, `width` floats. A number is
  /// element · factor of the row · factor of the channel. Null: no factors per channel. If factors per channel are
  /// given, the factors per row may be null: then each of them is 1.
  const float *k_channel_scales = nullptr,
              *v_channel_scales =
                  nullptr;  ///< The factors of the channels of its values, `value_width` floats.
};

/// The factors of keys and values in the pool of PagedKeys, for storage types with a factor per row: [pages, keys of a
/// page, kv_heads]. Strides are yours. P is the number of keys of a page:
///
/// | the pool has | strides |
/// |---|---|
/// | one factor per key and kv head, contiguous | {P·kv_heads, kv_heads, 1} |
/// | one factor per key | {P, 1, 0} |
/// | one factor per kv head | {0, 0, 1} |
/// | one factor per tensor: per_tensor | {0, 0, 0} |
///
/// If the type of the keys, or of the values, has no factors, leave the view out. The source refers to the factors, so
/// the factors must outlive the source.
struct KeyScales {
  View<const float, 3> k{},  ///< The factors of the keys.
      v{};                   ///< The factors of the values.

  /// Returns views with the factor *k_scale for all rows of k and *v_scale for all rows of v. A null pointer omits
  /// the view.
  template <class K, class V>
  SSMAX_INLINE static constexpr KeyScales per_tensor(const View<K, 4>& k, const float* k_scale,
                                                     const View<V, 4>& v, const float* v_scale) {
    return {same_for_all(k, k_scale), same_for_all(v, v_scale)};
  }

 private:
  template <class X>
  SSMAX_INLINE static constexpr View<const float, 3> same_for_all(const View<X, 4>& rows,
                                                                  const float* scale) {
    if (scale == nullptr) return {};
    return {scale, {rows.extent(0), rows.extent(1), rows.extent(2)}, {}};
  }
};

/// The factors of the channels of keys and values in somebody else's pages, for storage types with a factor per row:
/// one per page, kv head and channel. The last stride is 1, the other strides are yours. A view that is left out has no
/// factors. The source refers to the factors, so the factors must outlive the source.
struct ChannelScales {
  View<const float, 3> k{},  ///< The factors of the keys, [pages, kv_heads, width].
      v{};                   ///< The factors of the values, [pages, kv_heads, value_width].
};

SSMAX_END

SSMAX_BEGIN_CODE

/// A type with the members of a source of keys: the top of key_source.hpp. A type with `Element` and a member of
/// one of these names with another signature is a compile error.
template <class S>
concept KeySource = detail::is_key_source<S>() && detail::KeyStorage<detail::SourceKey<S>> &&
    detail::KeyStorage<detail::SourceValue<S>>;

SSMAX_END
/// @}
