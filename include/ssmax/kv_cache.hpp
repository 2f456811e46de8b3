/// @defgroup kv_cache Cache of keys and values (kv_cache.hpp)
/// A cache of the keys and values of past positions. attention (attention.hpp) takes the cache as `keys`.
///
///     KvCache<bfloat16> cache({.batch = 1, .kv_heads = 2, .width = 64, .capacity = 32'768});
///     cache.append(k_new, v_new, &rope);                        // rotated to their positions, then stored
///
/// Storage is float, double, half, bfloat16, a type of 8 bits or Q8_0 (eight_bit.hpp), or a type of your
/// own (storage.hpp). append rounds to nearest even. Exception: Q8_0 rounds as ggml does. KvCache<K, V> stores keys as
/// K and values as V. Each sequence of the batch has its own length.
///
/// A ring keeps the last `capacity` keys of a sequence and overwrites older keys, for sliding windows. A ring with
/// `first` also keeps the first keys of a sequence, for SlidingWindow (mask.hpp):
///
///     KvCache<float> ring({.width = 64, .capacity = 4 + 512, .ring = true, .first = 4});
///     ring.append(k_new, v_new, &rope);                         // one position
///     attention({.q = q_new, .keys = ring, .out = out, .rope = &rope}, scaling, SlidingWindow{511, 0, 4});
///
/// A call with several queries needs window + queries - 1 keys in addition to the first keys.
#pragma once

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "detail/checks/views.hpp"
#include "detail/memory/stored_rows.hpp"
#include "key_source.hpp"
#include "rope.hpp"
#include "view.hpp"

/// @addtogroup kv_cache
/// @{
SSMAX_BEGIN_DATA

/// The extents of a KvCache.
struct KvCacheOptions {
  index_t batch = 1,        ///< Number of sequences.
      kv_heads = 1;         ///< Number of heads of k and v.
  index_t width = 0;        ///< Channels of a key.
  index_t value_width = 0;  ///< Channels of a value; 0: equal to width.
  index_t capacity = 0;     ///< Maximum number of stored keys per sequence.
  bool ring = false;  ///< If true, a sequence may grow beyond the capacity: new keys overwrite the oldest.
  index_t first = 0;  ///< Keys at the start of a sequence that a ring keeps. The capacity includes them.
};

SSMAX_END

SSMAX_BEGIN_CODE

/// A cache of keys, stored as K, and values, stored as V. A source of keys (key_source.hpp).
///
/// Memory: batch · kv_heads · capacity · (width + value_width) numbers, allocated once. Types of 8 bits take a float
/// more for each row of keys, and of values.
template <class K, class V = K>
class KvCache {
  static_assert(
      detail::KeyStorage<K> && detail::KeyStorage<V>,
      "ssmax::KvCache: storage is float, double, half, bfloat16, Int8, Fp8E4M3, Fp8E5M2, Q8_0, or a type "
      "with StorageTraits");
  static_assert(std::same_as<ComputeType<K>, ComputeType<V>>,
                "ssmax::KvCache: keys and values are computed in one type: double keys need double values");

 public:
  using Element = K;                       ///< Storage type of keys.
  using ValueElement = V;                  ///< Storage type of values.
  using Compute = ComputeType<K>;          ///< Type of computation: double for double, float for the others.
  static constexpr bool owns_keys = true;  ///< A call takes a variable, not a temporary.

  /// Makes empty sequences. Throws std::invalid_argument unless kv_heads, widths and capacity are at least 1 and
  /// `first` is in [0, capacity). Throws std::invalid_argument if `first` is not 0 without `ring`, if the number of
  /// bytes overflows, or if a width is no multiple of the storage type's `group`. Throws std::bad_alloc if the memory
  /// is not available.
  explicit KvCache(const KvCacheOptions& options)
      : options_(checked(options)),
        rows_(options_.batch * options_.kv_heads * options_.capacity, options_.width, options_.value_width),
        lengths_(static_cast<std::size_t>(options_.batch)) {}

  /// Returns the options, with the actual value_width.
  [[nodiscard]] const KvCacheOptions& options() const { return options_; }
  /// Returns the number of positions of sequence b, overwritten ones included. Throws std::invalid_argument unless b is
  /// in [0, batch). So do stored, forgotten and run.
  [[nodiscard]] index_t length(index_t b) const {
    check_sequence("KvCache::length", b);
    return lengths_[static_cast<std::size_t>(b)];
  }
  /// Returns the range from the first to the last position of sequence b whose key is stored. With the option
  /// `first`, the range includes the positions of forgotten(b).
  [[nodiscard]] KeyRange stored(index_t b) const {
    return {options_.first > 0 ? 0 : forgotten(b).end, length(b)};
  }
  /// Returns the positions of sequence b whose keys the ring has overwritten:
  /// [first, max(first, length - (capacity - first))).
  [[nodiscard]] KeyRange forgotten(index_t b) const { return forgotten_at(length(b)); }

  /// Appends k [batch, kv_heads, new, width] and v [batch, kv_heads, new, value_width]. For sequence b, appends the
  /// first counts[b] of the new positions. If `counts` is empty, appends all of them. With a rope, rotates keys to
  /// their positions. k and v must not lie in the memory of the cache. Throws std::invalid_argument if an extent does
  /// not fit or the cache is full. Throws also if counts[b] is below 0 or above the number of new positions, and if the
  /// rope lacks a position. The cache is then unchanged.
  ///
  /// `offsets` [new] or [batch, new] are for candidates of a Tree (mask_runs.hpp): the rope rotates new key i to
  /// position length(b) + offsets[i] instead of length(b) + i. Without a rope, they have no effect.
  void append(View<const Compute, 4> k, View<const Compute, 4> v, const Rope<Compute>* rope = nullptr,
              Integers counts = {}, Integers offsets = {}) {
    append_from(k, v, rope, counts, offsets);
  }
  /// Appends keys and values in their storage type. Rotated keys are rounded again, all other rows are copied.
  void append(View<const K, 4> k, View<const V, 4> v, const Rope<Compute>* rope = nullptr,
              Integers counts = {},
              Integers offsets = {}) requires(detail::StoredRows<K, V>::accepts_storage) {
    append_from(k, v, rope, counts, offsets);
  }
  /// Appends rows that are quantized: k [batch, kv_heads, new, elements of a key] and v. The rows are copied. A type of
  /// 8 bits has factors, `k_scales` and `v_scales` [batch, kv_heads, new], with any strides. Keys must be
  /// rotated before they are quantized. Throws std::invalid_argument as the functions above do.
  void append(View<const K, 4> k, View<const V, 4> v, const View<const float, 3>& k_scales = {},
              const View<const float, 3>& v_scales = {},
              Integers counts = {}) requires(detail::StoredRows<K, V>::accepts_quantized) {
    detail::check_scales("KvCache::append", "k_scales", k_scales, "k", k);
    detail::check_scales("KvCache::append", "v_scales", v_scales, "v", v);
    append_from(k, v, nullptr, counts, {}, k_scales, v_scales);
  }

  /// Sets the length of every sequence to 0.
  void clear() { std::fill(lengths_.begin(), lengths_.end(), index_t{0}); }

  /// Removes the positions from `length` on of sequence b, for example after failed speculation. Throws
  /// std::invalid_argument unless `length` is from 0 to length(b). Throws also if `length` is below length(b) and the
  /// ring has overwritten keys of the sequence.
  void truncate(index_t b, index_t length) {
    check_sequence("KvCache::truncate", b);
    if (length < 0 || length > this->length(b)) {
      detail::fail_value("KvCache::truncate", "length", "is", length, "must be within 0 and",
                         this->length(b));
    }
    if (length < this->length(b) && forgotten(b).size() > 0) {
      detail::fail_value("KvCache::truncate", "length", "is", length,
                         "but the ring has forgotten keys before", forgotten(b).end);
    }
    lengths_[static_cast<std::size_t>(b)] = length;
  }

  /// Keeps the first `length` keys of sequence b and the keys `kept`, in place of all keys from `length` on. For
  /// example the accepted branch of a Tree (mask_runs.hpp). Key kept[i] becomes key length + i and is not rotated
  /// again. Throws std::invalid_argument unless `kept` rises from `length` on and each key is stored. Throws
  /// std::invalid_argument if the ring has overwritten keys of the sequence.
  void keep(index_t b, index_t length, Integers kept) {
    const char* function = "KvCache::keep";
    check_sequence(function, b);
    detail::check_kept(function, length, kept, this->length(b));
    if (forgotten(b).size() > 0) {
      detail::fail_value(function, "length", "is", length, "but the ring has forgotten keys before",
                         forgotten(b).end);
    }
    for (index_t key : kept) {
      for (index_t h = 0; h < options_.kv_heads; ++h) rows_.copy(row_of(b, h, key), row_of(b, h, length), 1);
      ++length;
    }
    lengths_[static_cast<std::size_t>(b)] = length;
  }

  /// Returns the extents, as a source of keys.
  [[nodiscard]] KeySourceShape shape() const {
    return {options_.batch, options_.kv_heads, options_.width, options_.value_width};
  }
  /// Returns the longest contiguous run of keys that starts at `key`, of sequence b and kv head h. For an overwritten
  /// key, returns the key that replaced it.
  [[nodiscard]] KeyRun<K, V> run(index_t b, index_t h, index_t key) const {
    check_sequence("KvCache::run", b);
    return rows_.run(row_of(b, h, key), std::min(options_.capacity - slot_of(key), length(b) - key));
  }
  /// Returns the memory of keys and values, as a source of keys.
  [[nodiscard]] std::pair<std::span<const K>, std::span<const V>> memory() const { return rows_.memory(); }

 private:
  /// Returns the options, with the actual value_width.
  static KvCacheOptions checked(KvCacheOptions options) {
    if (options.value_width == 0) options.value_width = options.width;
    detail::check_at_least("KvCache", "batch", options.batch, 0);
    detail::check_at_least("KvCache", "kv_heads", options.kv_heads, 1);
    detail::check_at_least("KvCache", "width", options.width, 1);
    detail::check_at_least("KvCache", "value_width", options.value_width, 1);
    detail::check_group<K>("KvCache", "width", "is", options.width);
    detail::check_group<V>("KvCache", "value_width", "is", options.value_width);
    detail::check_at_least("KvCache", "capacity", options.capacity, 1);
    detail::check_at_least("KvCache", "first", options.first, 0);
    if (options.first > 0 && !options.ring)
      detail::fail_value("KvCache", "first", "is", options.first, "without ring it must be", 0);
    if (options.first >= options.capacity) {
      detail::fail_value("KvCache", "first", "is", options.first, "must be less than the capacity,",
                         options.capacity);
    }
    detail::check_bytes(
        "KvCache", "capacity", options.capacity,
        {options.batch, options.kv_heads, options.capacity, std::max(options.width, options.value_width)});
    return options;
  }

  /// Returns the place of a key among the `capacity` places of a sequence and head. Consecutive keys have consecutive
  /// places, up to the last place.
  index_t slot_of(index_t key) const {
    const index_t first = options_.first;
    return key < first ? key : first + (key - first) % (options_.capacity - first);
  }
  /// Returns the place of a key, counted over sequences and heads.
  index_t row_of(index_t b, index_t h, index_t key) const {
    return (b * options_.kv_heads + h) * options_.capacity + slot_of(key);
  }

  /// Returns the positions that are overwritten in a sequence of `length` positions.
  KeyRange forgotten_at(index_t length) const {
    const index_t first = options_.first, last = length - (options_.capacity - first);
    return {first, options_.ring ? std::max(first, last) : first};
  }

  void check_sequence(const char* function, index_t b) const {
    if (b < 0 || b >= options_.batch)
      detail::fail_value(function, "b", "is", b, "sequences are", options_.batch);
  }

  index_t count(Integers counts, index_t b, index_t all) const {
    return counts.empty() ? all : counts[static_cast<std::size_t>(b)];
  }

  template <class U>
  void check_new(const char* name, const View<const U, 4>& view, index_t width) const {
    const char* function = "KvCache::append";
    detail::check_view(function, name, view);
    const auto same = [&](int i, index_t extent, const char* what) {
      detail::check_equal(function, name, what, view.extent(i), "the cache's is", extent);
    };
    same(0, options_.batch, "has batch");
    same(1, options_.kv_heads, "has heads");
    same(3, width / detail::group_of<U>, "has channels");
  }

  template <class NewKey, class NewValue>
  void append_from(const View<const NewKey, 4>& k, const View<const NewValue, 4>& v,
                   const Rope<Compute>* rope, Integers counts, Integers offsets,
                   const View<const float, 3>& k_scales = {}, const View<const float, 3>& v_scales = {}) {
    const char* function = "KvCache::append";
    check_new("k", k, options_.width);
    check_new("v", v, options_.value_width);
    detail::check_extent(function, "v", v, 2, "k", k, 2);
    const index_t most = k.extent(2);
    if (!counts.empty() && static_cast<index_t>(counts.size()) != options_.batch) {
      detail::fail_value(function, "counts", "has extent", static_cast<index_t>(counts.size()),
                         "sequences are", options_.batch);
    }
    const index_t offsets_given = std::ssize(offsets);
    if (!offsets.empty() && offsets_given != most && offsets_given != options_.batch * most)
      detail::fail_value(function, "offsets", "has extent", offsets_given, "new positions are", most);
    const auto offset = [&](index_t b, index_t i) {
      if (offsets.empty()) return i;
      return offsets[static_cast<std::size_t>(offsets_given == most ? i : b * most + i)];
    };
    for (index_t b = 0; b < options_.batch; ++b) {
      const index_t added = count(counts, b, most);
      if (added < 0 || added > most)
        detail::fail_value(function, "counts", "has", added, "new positions are", most);
      const index_t longest = options_.ring ? detail::max_counted : options_.capacity;
      if (added > longest - length(b)) {
        detail::fail_value(function, "k", "would bring a sequence to length", length(b) + added,
                           options_.ring ? "it must be at most" : "the capacity is", longest);
      }
      if (rope == nullptr || added == 0) continue;
      if (offsets.empty()) rope->check(function, "k", length(b), added, options_.width, options_.batch);
      for (index_t i = 0; i < added && !offsets.empty(); ++i)
        detail::check_offset(function, *rope, length(b), offset(b, i), options_.width, options_.batch);
    }
    for (index_t b = 0; b < options_.batch; ++b) {
      const index_t added = count(counts, b, most);
      const index_t start = length(b), end = start + added;
      const auto store_keys = [&](index_t first, index_t last) {
        for (index_t key = first; key < last; ++key) {
          const index_t i = key - start, position = start + offset(b, i);
          for (index_t h = 0; h < options_.kv_heads; ++h) {
            rows_.store(row_of(b, h, key), &k(b, h, i, 0), &v(b, h, i, 0), rope, {position, b});
            rows_.set_scales(row_of(b, h, key), detail::number_at(k_scales, b, h, i),
                             detail::number_at(v_scales, b, h, i));
          }
        }
      };
      // Skip positions that the ring overwrites within this call.
      const KeyRange lost = forgotten_at(end);
      store_keys(start, std::min(end, lost.begin));
      store_keys(std::max(start, lost.end), end);
    }
    // A storage type of a user may throw above. The lengths are then unchanged.
    for (index_t b = 0; b < options_.batch; ++b)
      lengths_[static_cast<std::size_t>(b)] += count(counts, b, most);
  }

  KvCacheOptions options_;
  detail::StoredRows<K, V> rows_;  // [batch][kv_heads][capacity]
  std::vector<index_t> lengths_;
};

SSMAX_END
/// @}
