/// @defgroup key_source Sources of keys (key_source.hpp)
/// Where attention finds keys and values.
///
/// A source of keys is a type with
///
///     using Element                                   what keys and values are stored in (storage.hpp)
///     KeySourceShape shape() const                    extents of the whole
///     index_t length(batch) const                     of any integer type: positions that a sequence has had;
///                                                     n and positions come from it
///     KeyRange stored(batch) const                    those of them whose keys can still be read, the last
///                                                     ones
///     KeyStretch<Element> stretch(batch, kv_head, key) const
///                                                     one stored key, and those that lie behind it in memory
///
/// and, optionally,
///
///     using ValueElement                              what values are stored in, if that differs from Element. Then
///                                                     stretch returns KeyStretch<Element, ValueElement>
///     KeyRange forgotten(batch) const                 keys that cannot be read although they lie within
///                                                     stored(batch): a mask must not show them. stretch must return
///                                                     readable memory for them (default: no key)
///     std::pair<std::span<const Element>, std::span<const ValueElement>> memory() const
///                                                     where keys and values lie: results must not overlap it
///
/// attention (attention_source.hpp) and decode (decode.hpp) take any of them. KvCache is one, contiguous or as a
/// ring; attention makes one of its views, attention_partial one that stores a part of the keys. A source of pages would look up `key` in
/// its page table and return what is left of that page. A source must not change while a call reads it; its
/// members are called by several threads.
#pragma once

#include "detail/checks/key_source.hpp"
#include "query.hpp"
#include "storage.hpp"

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

/// `count` >= 1 keys, beginning with the one asked for: row i lies at k + i·k_stride, its value at
/// v + i·v_stride. Keys past the last one stored are not to be counted.
template <class K, class V = K>
struct KeyStretch {
  const K* k = nullptr;  ///< The key asked for.
  index_t k_stride = 0;  ///< Elements from one key to the next.
  const V* v = nullptr;  ///< Its value.
  index_t v_stride = 0;  ///< Elements from one value to the next.
  index_t count = 0;     ///< How many keys there are.
  /// Where rows carry a factor each (`StorageTraits::scale`): those of the keys, [count].
  const float *k_scales = nullptr,
              *v_scales = nullptr;  ///< Those of the values.
};

SSMAX_END

SSMAX_BEGIN_CODE

/// A type that says where keys and values lie: the top of key_source.hpp. The compiler refuses a type with `Element`
/// whose members have these names and other signatures.
template <class S>
concept KeySource = detail::is_key_source<S>() && detail::KeyStorage<detail::SourceKey<S>> &&
    detail::KeyStorage<detail::SourceValue<S>>;

SSMAX_END
/// @}
