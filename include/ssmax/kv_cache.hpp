/// @defgroup kv_cache Cache of keys and values (kv_cache.hpp)
/// A cache of the keys and values of past positions. decode.hpp computes attention over the cache.
///
///     KvCache<bfloat16> cache({.batch = 1, .kv_heads = 2, .width = 64, .capacity = 32'768});
///     cache.append(k_new, v_new, &rope);                        // rotated to their positions, then stored
///
/// Storage is float, double, half, bfloat16, a type of 8 bits (eight_bit.hpp), or a type of your own (storage.hpp).
/// append rounds to nearest even. KvCache<K, V> stores keys as K and values as V. Each sequence of the batch has its
/// own length.
///
/// A ring keeps the last `capacity` keys of a sequence and overwrites older keys, for sliding windows. A ring with
/// `first` also keeps the first keys of a sequence (attention sinks), for SinkWindow (mask_runs.hpp):
///
///     KvCache<float> ring({.width = 64, .capacity = 4 + 512, .ring = true, .first = 4});
///     ring.append(k_new, v_new, &rope);                         // one position
///     decode<float>({.q = q_new, .out = out}, ring, scaling, SinkWindow{4, 512}, {.rope = &rope});
///
/// A call with several queries needs window + queries - 1 keys in addition to the first keys.
#pragma once

#include <algorithm>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "detail/checks/views.hpp"
#include "detail/memory/conversion.hpp"
#include "detail/memory/pages.hpp"
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
/// Memory: batch · kv_heads · capacity · (width + value_width) elements, allocated once.
template <class K, class V = K>
class KvCache {
  static_assert(detail::KeyStorage<K> && detail::KeyStorage<V>,
                "ssmax::KvCache: storage is float, double, half, bfloat16, Int8, Fp8E4M3, Fp8E5M2, or a type "
                "with StorageTraits");
  static_assert(std::same_as<detail::ComputeType<K>, detail::ComputeType<V>>,
                "ssmax::KvCache: keys and values are computed in one type: double keys need double values");

 public:
  using Element = K;                       ///< Storage type of keys.
  using ValueElement = V;                  ///< Storage type of values.
  using Compute = detail::ComputeType<K>;  ///< Type of computation: double for double, float for the others.

  /// @cond
  // True if `append` also accepts rows in their storage type, which differs from Compute.
  static constexpr bool is_stored_unscaled =
      !(std::same_as<K, Compute> && std::same_as<V, Compute>)&&!detail::ScaledStorage<K> &&
      !detail::ScaledStorage<V>;
  /// @endcond

  /// Makes empty sequences. Throws std::invalid_argument unless kv_heads, widths and capacity are at least 1 and
  /// `first` is in [0, capacity). Throws std::invalid_argument if `first` is not 0 without `ring`, or if the number
  /// of bytes overflows. Throws std::bad_alloc if the memory is not available.
  explicit KvCache(const KvCacheOptions& options) : options_(options) {
    if (options_.value_width == 0) options_.value_width = options_.width;
    const auto at_least = [](const char* name, index_t value, index_t least) {
      if (value < least) detail::fail_value("KvCache", name, "is", value, "must be at least", least);
    };
    at_least("batch", options_.batch, 0);
    at_least("kv_heads", options_.kv_heads, 1);
    at_least("width", options_.width, 1);
    at_least("value_width", options_.value_width, 1);
    at_least("capacity", options_.capacity, 1);
    at_least("first", options_.first, 0);
    if (options_.first > 0 && !options_.ring)
      detail::fail_value("KvCache", "first", "is", options_.first, "without ring it must be", 0);
    if (options_.first >= options_.capacity) {
      detail::fail_value("KvCache", "first", "is", options_.first, "must be less than the capacity,",
                         options_.capacity);
    }
    index_t elements = 1;
    for (index_t extent : {options_.batch, options_.kv_heads, options_.capacity,
                           std::max(options_.width, options_.value_width)}) {
      if (extent > std::numeric_limits<index_t>::max() / 32 / elements) {
        detail::fail_value("KvCache", "capacity", "is", options_.capacity,
                           "too many bytes; elements before it are", elements);
      }
      elements *= std::max<index_t>(extent, 1);
    }
    const index_t rows = options_.batch * options_.kv_heads * options_.capacity;
    k_.resize(static_cast<std::size_t>(rows * options_.width));
    v_.resize(static_cast<std::size_t>(rows * options_.value_width));
    row_.resize(static_cast<std::size_t>(std::max(options_.width, options_.value_width)));
    if constexpr (detail::ScaledStorage<K>) k_scales_.resize(static_cast<std::size_t>(rows));
    if constexpr (detail::ScaledStorage<V>) v_scales_.resize(static_cast<std::size_t>(rows));
    lengths_.resize(static_cast<std::size_t>(options_.batch));
  }

  /// Returns the options, with the actual value_width.
  [[nodiscard]] const KvCacheOptions& options() const { return options_; }
  /// Returns the number of positions of sequence b, overwritten ones included.
  [[nodiscard]] index_t length(index_t b) const { return lengths_[static_cast<std::size_t>(b)]; }
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
  /// their positions. Throws std::invalid_argument if an extent does not fit or the cache is full. The cache is then
  /// unchanged.
  void append(View<const Compute, 4> k, View<const Compute, 4> v, const Rope<Compute>* rope = nullptr,
              std::span<const index_t> counts = {}) {
    append_from(k, v, rope, counts);
  }
  /// Appends keys and values in their storage type. Rotated keys are rounded again, all other rows are copied.
  void append(View<const K, 4> k, View<const V, 4> v, const Rope<Compute>* rope = nullptr,
              std::span<const index_t> counts = {}) requires(is_stored_unscaled) {
    append_from(k, v, rope, counts);
  }

  /// Sets the length of every sequence to 0.
  void clear() { std::fill(lengths_.begin(), lengths_.end(), index_t{0}); }

  /// Removes the positions from `length` on of sequence b, for example after failed speculation. Throws
  /// std::invalid_argument if the ring has overwritten keys of the sequence.
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

  /// Returns the extents, as a source of keys.
  [[nodiscard]] KeySourceShape shape() const {
    return {options_.batch, options_.kv_heads, options_.width, options_.value_width};
  }
  /// Returns the longest contiguous run of keys that starts at `key`, of sequence b and kv head h. For an overwritten
  /// key, returns the key that replaced it.
  [[nodiscard]] KeyRun<K, V> run(index_t b, index_t h, index_t key) const {
    const index_t row = row_of(b, h, key), in_memory = options_.capacity - slot_of(key);
    return {.k = k_.data() + row * options_.width,
            .k_stride = options_.width,
            .v = v_.data() + row * options_.value_width,
            .v_stride = options_.value_width,
            .count = std::min(in_memory, length(b) - key),
            .k_scales = scales(k_scales_, row),
            .v_scales = scales(v_scales_, row)};
  }
  /// Returns the memory of keys and values, as a source of keys.
  [[nodiscard]] std::pair<std::span<const K>, std::span<const V>> memory() const { return {k_, v_}; }

 private:
  template <class X>
  using Rows = std::vector<X, detail::HugePages<X>>;

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

  static const float* scales(const std::vector<float>& all, index_t row) {
    return all.empty() ? nullptr : all.data() + row;
  }

  void check_sequence(const char* function, index_t b) const {
    if (b < 0 || b >= options_.batch)
      detail::fail_value(function, "b", "is", b, "sequences are", options_.batch);
  }

  index_t count(std::span<const index_t> counts, index_t b, index_t all) const {
    return counts.empty() ? all : counts[static_cast<std::size_t>(b)];
  }

  template <class U>
  void check_new(const char* name, const View<const U, 4>& view, index_t width) const {
    const char* function = "KvCache::append";
    detail::check_view(function, name, view);
    const auto same = [&](int i, index_t extent, const char* what) {
      if (view.extent(i) != extent)
        detail::fail_value(function, name, what, view.extent(i), "the cache's is", extent);
    };
    same(0, options_.batch, "has batch");
    same(1, options_.kv_heads, "has heads");
    same(3, width, "has channels");
  }

  template <class NewKey, class NewValue>
  void append_from(const View<const NewKey, 4>& k, const View<const NewValue, 4>& v,
                   const Rope<Compute>* rope, std::span<const index_t> counts) {
    const char* function = "KvCache::append";
    check_new("k", k, options_.width);
    check_new("v", v, options_.value_width);
    detail::check_extent(function, "v", v, 2, "k", k, 2);
    const index_t most = k.extent(2);
    if (!counts.empty() && static_cast<index_t>(counts.size()) != options_.batch) {
      detail::fail_value(function, "counts", "has extent", static_cast<index_t>(counts.size()),
                         "sequences are", options_.batch);
    }
    for (index_t b = 0; b < options_.batch; ++b) {
      const index_t added = count(counts, b, most);
      if (added < 0 || added > most)
        detail::fail_value(function, "counts", "has", added, "new positions are", most);
      const index_t longest = options_.ring ? detail::max_counted : options_.capacity;
      if (added > longest - length(b)) {
        detail::fail_value(function, "k", "would bring a sequence to length", length(b) + added,
                           options_.ring ? "it must be at most" : "the capacity is", longest);
      }
      if (rope != nullptr && added > 0) rope->check(function, "k", length(b), added, options_.width);
    }
    for (index_t b = 0; b < options_.batch; ++b) {
      const index_t added = count(counts, b, most);
      const index_t start = length(b), end = start + added;
      const auto store_positions = [&](index_t first, index_t last) {
        for (index_t position = first; position < last; ++position) {
          for (index_t h = 0; h < options_.kv_heads; ++h)
            store(b, h, position, &k(b, h, position - start, 0), &v(b, h, position - start, 0), rope);
        }
      };
      // Skip positions that the ring overwrites within this call.
      const KeyRange lost = forgotten_at(end);
      store_positions(start, std::min(end, lost.begin));
      store_positions(std::max(start, lost.end), end);
      lengths_[static_cast<std::size_t>(b)] += added;
    }
  }

  template <class NewKey, class NewValue>
  void store(index_t b, index_t h, index_t position, const NewKey* k, const NewValue* v,
             const Rope<Compute>* rope) {
    const index_t row = row_of(b, h, position);
    if (rope == nullptr) {
      store_row(k, options_.width, k_, k_scales_, row);
    } else {
      const Compute* wide = detail::widened(k, options_.width, row_.data());
      detail::rotate(rope->tables(), wide, options_.width, row_.data(), options_.width, 1, options_.width,
                     position, false);
      store_row(static_cast<const Compute*>(row_.data()), options_.width, k_, k_scales_, row);
    }
    store_row(v, options_.value_width, v_, v_scales_, row);
  }

  template <class U, class X>
  void store_row(const U* in, index_t n, Rows<X>& rows, [[maybe_unused]] std::vector<float>& scales,
                 index_t row) {
    X* out = rows.data() + row * n;
    if constexpr (std::same_as<U, X>) {
      std::copy_n(in, n, out);
    } else if constexpr (detail::ScaledStorage<X>) {
      const float scale = StorageTraits<X>::scale(in, n);
      scales[static_cast<std::size_t>(row)] = scale;
      std::transform(in, in + n, row_.data(), [scale](Compute x) { return x / scale; });
      detail::narrow_to(out, n, row_.data());
    } else {
      detail::narrow_to(out, n, in);
    }
  }

  KvCacheOptions options_;
  Rows<K> k_;                               // [batch][kv_heads][capacity][width]
  Rows<V> v_;                               // [batch][kv_heads][capacity][value_width]
  std::vector<float> k_scales_, v_scales_;  // [batch][kv_heads][capacity], if each row has a scale
  std::vector<Compute> row_;
  std::vector<index_t> lengths_;
};

SSMAX_END
/// @}
