/// @defgroup paged_kv_cache Paged cache of keys and values (paged_kv_cache.hpp)
/// A cache of keys and values in pages of one pool, for servers. Sequences come and go, and may share pages.
///
///     PagedKvCache<bfloat16> cache({.kv_heads = 2, .width = 64, .page = 16, .pages = 1000});
///     const index_t a = cache.add();                            // a new sequence
///     cache.append(k, v, sequences, &rope);                     // the tokens of a step, rotated to their positions
///     const index_t b = cache.fork(a);                          // shares the pages of a
///     attention({.q = q, .keys = cache.source(ids), .out = out}, SSMax<float>{s}, Causal{});
///
/// | argument | shape |
/// |---|---|
/// | k | [tokens, kv_heads, width] |
/// | v | [tokens, kv_heads, value_width] |
/// | sequences | [tokens]: the sequence of each token. Below 0: append skips the token (padding) |
/// | ids | [batch]: the sequence of each batch entry of a call. Sequences may repeat |
///
/// The pool has keys [pages, kv_heads, page, width] and values [pages, kv_heads, page, value_width]. P is the number of
/// keys of a page. Key i of a sequence is key i mod P of its page i / P. `source` returns PagedKeys (paged_keys.hpp).
///
/// The cache counts the sequences that use each page. The functions append and keep copy a shared page before the first
/// write (copy on write). The functions keep, truncate and remove free the pages that no sequence uses any more. Memory
/// that no sequence uses never affects a result, NaN included.
///
/// Storage types and rounding are those of KvCache (kv_cache.hpp). Results are bit-identical to those over a
/// KvCache of the same keys. Key chunks that several sequences have in common since `fork` are computed once
/// (docs/paged_attention.md).
///
/// Functions throw std::invalid_argument with the name of the argument. If too few pages are free, append and keep
/// throw PagedKvCacheFull. The cache is then unchanged.
#pragma once

#include <algorithm>
#include <concepts>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "detail/checks/views.hpp"
#include "detail/memory/stored_rows.hpp"
#include "paged_keys.hpp"
#include "rope.hpp"
#include "view.hpp"

/// @addtogroup paged_kv_cache
/// @{
SSMAX_BEGIN_DATA

/// The extents of a PagedKvCache.
struct PagedKvCacheOptions {
  index_t kv_heads = 1;     ///< Number of heads of k and v.
  index_t width = 0;        ///< Channels of a key.
  index_t value_width = 0;  ///< Channels of a value; 0: equal to width.
  index_t page = 64;        ///< Keys of a page. Smaller pages waste less memory and make shorter key runs.
  index_t pages = 0;        ///< Pages of the pool.
};

SSMAX_END

SSMAX_BEGIN_CODE

/// The error of PagedKvCache::append and keep if too few pages are free.
class PagedKvCacheFull : public std::runtime_error {
 public:
  /// Makes the error of a call. `argument` names the function and the argument that needs the pages.
  PagedKvCacheFull(const char* argument, index_t needed_pages, index_t free_pages)
      : std::runtime_error("ssmax::PagedKvCache::" + std::string(argument) + " needs pages " +
                           std::to_string(needed_pages) + ", free pages are " + std::to_string(free_pages)),
        needed(needed_pages),
        free(free_pages) {}

  index_t needed;  ///< Pages that the call needs, copies of shared pages included.
  index_t free;    ///< Pages that are free.
};

namespace detail {

[[noreturn]] SSMAX_COLD inline void fail_full(const char* argument, index_t needed, index_t free) {
  const PagedKvCacheFull error(argument, needed, free);
#if defined(__cpp_exceptions)
  throw error;
#else
  fail(error.what());
#endif
}

}  // namespace detail

/// A cache of keys, stored as K, and values, stored as V, in pages.
///
/// Memory: pages · page · kv_heads · (width + value_width) numbers, allocated once. Types of 8 bits take a float
/// more for each row of keys, and of values. Each sequence has a page table.
template <class K, class V = K>
class PagedKvCache {
  static_assert(detail::KeyStorage<K> && detail::KeyStorage<V>,
                "ssmax::PagedKvCache: storage is float, double, half, bfloat16, Int8, Fp8E4M3, Fp8E5M2, "
                "Q8_0, or a type with StorageTraits");
  static_assert(
      std::same_as<ComputeType<K>, ComputeType<V>>,
      "ssmax::PagedKvCache: keys and values are computed in one type: double keys need double values");

 public:
  using Compute = ComputeType<K>;  ///< Type of computation: double for double, float for the others.

  /// The page tables of sequences of a PagedKvCache: the table of PagedKeys. Refers to the cache and to the ids.
  class Pages {
   public:
    /// Returns the number of batch entries.
    [[nodiscard]] index_t batch() const { return std::ssize(ids_); }
    /// Returns 1: all kv heads have the same pages.
    [[nodiscard]] index_t heads() const { return 1; }
    /// Returns the number of keys of batch entry b.
    [[nodiscard]] index_t length(index_t b) const { return sequence(b).length; }
    /// Returns the number of pages of batch entry b.
    [[nodiscard]] index_t entries(index_t b) const { return std::ssize(sequence(b).pages); }
    /// Returns page i of batch entry b.
    [[nodiscard]] index_t page(index_t b, index_t h, index_t i) const { return *entry(b, h, i); }
    /// @cond
    [[nodiscard]] const index_t* entry(index_t b, index_t, index_t i) const {
      return sequence(b).pages.data() + i;
    }
    [[nodiscard]] index_t stride() const { return 1; }
    /// @endcond

   private:
    friend class PagedKvCache;
    Pages(const PagedKvCache& cache, Integers ids) : cache_(&cache), ids_(ids) {}
    const auto& sequence(index_t b) const { return cache_->sequence(ids_[static_cast<std::size_t>(b)]); }

    const PagedKvCache* cache_;
    Integers ids_;
  };

  /// Makes a pool of free pages. Throws std::invalid_argument unless all extents are at least 1, if the number of bytes
  /// overflows, or if a width is no multiple of the storage type's `group`. Throws std::bad_alloc if the memory is not
  /// available.
  explicit PagedKvCache(const PagedKvCacheOptions& options)
      : options_(checked(options)),
        rows_(options_.pages * options_.kv_heads * options_.page, options_.width, options_.value_width),
        users_(static_cast<std::size_t>(options_.pages)),
        writers_(users_.size()) {
    for (index_t page = options_.pages; page > 0; --page) free_.push_back(page - 1);
  }

  /// Returns the options, with the actual value_width.
  [[nodiscard]] const PagedKvCacheOptions& options() const { return options_; }
  /// Returns the number of sequences.
  [[nodiscard]] index_t sequences() const { return std::ssize(sequences_) - std::ssize(removed_); }
  /// Returns the number of pages that no sequence uses.
  [[nodiscard]] index_t free_pages() const { return std::ssize(free_); }
  /// Returns the number of keys of a sequence.
  [[nodiscard]] index_t length(index_t id) const {
    check_id("PagedKvCache::length", "id", id);
    return sequence(id).length;
  }
  /// Returns the pages of a sequence, in order. The next change of the sequence invalidates the span.
  [[nodiscard]] std::span<const index_t> pages_of(index_t id) const {
    check_id("PagedKvCache::pages_of", "id", id);
    return sequence(id).pages;
  }

  /// Makes an empty sequence and returns its id. Ids of removed sequences are used again.
  [[nodiscard]] index_t add() {
    if (removed_.empty()) {
      sequences_.emplace_back();
      return std::ssize(sequences_) - 1;
    }
    const index_t id = removed_.back();
    removed_.pop_back();
    sequence(id).exists = true;
    return id;
  }

  /// Makes a sequence with the keys of sequence `id` and returns its id. Both sequences share the pages.
  [[nodiscard]] index_t fork(index_t id) {
    check_id("PagedKvCache::fork", "id", id);
    std::vector<index_t> pages = sequence(id).pages;
    const index_t result = add();
    for (index_t page : pages) ++users(page);
    sequence(result).pages = std::move(pages);
    sequence(result).length = sequence(id).length;
    return result;
  }

  /// Removes the positions of sequence `id` from `length` on. Throws std::invalid_argument unless `length` is at least
  /// 0 and at most the length of the sequence.
  void truncate(index_t id, index_t length) {
    check_id("PagedKvCache::truncate", "id", id);
    Sequence& s = sequence(id);
    if (length < 0 || length > s.length)
      detail::fail_value("PagedKvCache::truncate", "length", "is", length, "must be within 0 and", s.length);
    shorten(s, length);
  }

  /// Keeps the first `length` keys of sequence `id` and the keys `kept`, in place of all keys from `length` on. For
  /// example the accepted branch of a Tree (mask_runs.hpp). Key kept[i] becomes key length + i and is not rotated
  /// again. Throws std::invalid_argument unless `kept` rises from `length` on and each key is stored. Throws
  /// PagedKvCacheFull if too few pages are free. The cache is then unchanged.
  void keep(index_t id, index_t length, Integers kept) {
    const char* function = "PagedKvCache::keep";
    check_id(function, "id", id);
    Sequence& s = sequence(id);
    detail::check_kept(function, length, kept, s.length);
    // 1. Find the pages to which keys move, and count the shared ones.
    const index_t end = length + std::ssize(kept);
    index_t moved = length;
    while (moved < end && kept[static_cast<std::size_t>(moved - length)] == moved) ++moved;
    const auto pages_end = static_cast<std::size_t>(pages_for(end));
    const auto first = moved < end ? static_cast<std::size_t>(moved / options_.page) : pages_end;
    const std::span<index_t> written(s.pages.data() + first, pages_end - first);
    const index_t needed = std::ranges::count_if(written, [this](index_t page) { return users(page) > 1; });
    if (needed > free_pages()) detail::fail_full("keep: kept", needed, free_pages());
    // 2. Copy the shared pages.
    for (index_t& page : written) own(page, options_.page);
    // 3. Move the keys.
    for (index_t to = moved; to < end; ++to) {
      const index_t key = kept[static_cast<std::size_t>(to - length)];
      for (index_t h = 0; h < options_.kv_heads; ++h)
        rows_.copy(row_of(page_of(s, key), h, key), row_of(page_of(s, to), h, to), 1);
    }
    truncate(id, end);
  }

  /// Removes sequence `id`. Its id is free for a new sequence.
  void remove(index_t id) {
    check_id("PagedKvCache::remove", "id", id);
    removed_.push_back(id);
    truncate(id, 0);
    sequence(id).exists = false;
  }

  /// Appends token t of k [tokens, kv_heads, width] and v [tokens, kv_heads, value_width] to sequence sequences[t], in
  /// the order of the tokens. Skips the token if sequences[t] is below 0. With a rope, rotates each key to its position
  /// in its sequence. Throws std::invalid_argument if an argument does not fit, and PagedKvCacheFull if too few pages
  /// are free. The cache is then unchanged.
  ///
  /// `offsets` [tokens] are for candidates of a Tree (mask_runs.hpp): the rope rotates token t to the position L +
  /// offsets[t]. L is the length of its sequence before the call.
  void append(View<const Compute, 3> k, View<const Compute, 3> v, Integers sequences,
              const Rope<Compute>* rope = nullptr, Integers offsets = {}) {
    append_from(k, v, sequences, rope, offsets);
  }
  /// Appends keys and values in their storage type. Rotated keys are rounded again, all other rows are copied.
  void append(View<const K, 3> k, View<const V, 3> v, Integers sequences, const Rope<Compute>* rope = nullptr,
              Integers offsets = {}) requires(detail::StoredRows<K, V>::accepts_storage) {
    append_from(k, v, sequences, rope, offsets);
  }
  /// Appends rows that are quantized: k [tokens, kv_heads, elements of a key] and v. The rows are copied. A type of 8
  /// bits has factors, `k_scales` and `v_scales` [tokens, kv_heads], with any strides. Keys must be rotated
  /// before they are quantized. Throws as the functions above do.
  void append(
      View<const K, 3> k, View<const V, 3> v, Integers sequences, const View<const float, 2>& k_scales = {},
      const View<const float, 2>& v_scales = {}) requires(detail::StoredRows<K, V>::accepts_quantized) {
    detail::check_scales("PagedKvCache::append", "k_scales", k_scales, "k", k);
    detail::check_scales("PagedKvCache::append", "v_scales", v_scales, "v", v);
    append_from(k, v, sequences, nullptr, {}, k_scales, v_scales);
  }

  /// Returns a source of the keys of these sequences, one per batch entry. Cache and ids must outlive the source.
  /// Throws std::invalid_argument if an id has no sequence.
  [[nodiscard]] PagedKeys<K, V, Pages> source(KeptIntegers ids) const& {
    for (index_t id : ids) check_id("PagedKvCache::source", "ids", id);
    const index_t pages = options_.pages, page = options_.page, heads = options_.kv_heads;
    const auto pool = [&]<class T>(std::span<const T> rows, index_t row) {
      return View<const T, 4>(rows.data(), {pages, page, heads, row},
                              {heads * page * row, row, page * row, 1});
    };
    const auto factors = [&](std::span<const float> scales) {
      if (scales.empty()) return View<const float, 3>();
      return View<const float, 3>(scales.data(), {pages, page, heads}, {heads * page, 1, page});
    };
    const auto [k, v] = rows_.memory();
    const auto [k_scales, v_scales] = rows_.scales();
    return {pool(k, options_.width / detail::group_of<K>),
            pool(v, options_.value_width / detail::group_of<V>),
            Pages(*this, ids),
            {factors(k_scales), factors(v_scales)}};
  }
  /// @cond
  // For a deleted function, the compiler prints its line.
  // clang-format off
  void source(KeptIntegers) const&& = delete;  // the source refers to the cache: give the cache a name
  // clang-format on
  /// @endcond

 private:
  struct Sequence {
    std::vector<index_t> pages;
    index_t length = 0;
    index_t added = 0;  // tokens of the present call of append
    index_t start = 0;  // length before the present call of append
    bool exists = true;
  };

  /// Returns the options, with the actual value_width.
  static PagedKvCacheOptions checked(PagedKvCacheOptions options) {
    if (options.value_width == 0) options.value_width = options.width;
    detail::check_at_least("PagedKvCache", "kv_heads", options.kv_heads, 1);
    detail::check_at_least("PagedKvCache", "width", options.width, 1);
    detail::check_at_least("PagedKvCache", "value_width", options.value_width, 1);
    detail::check_group<K>("PagedKvCache", "width", "is", options.width);
    detail::check_group<V>("PagedKvCache", "value_width", "is", options.value_width);
    detail::check_at_least("PagedKvCache", "page", options.page, 1);
    detail::check_at_least("PagedKvCache", "pages", options.pages, 1);
    detail::check_bytes(
        "PagedKvCache", "pages", options.pages,
        {options.kv_heads, options.page, std::max(options.width, options.value_width), options.pages});
    return options;
  }

  Sequence& sequence(index_t id) { return sequences_[static_cast<std::size_t>(id)]; }
  const Sequence& sequence(index_t id) const { return sequences_[static_cast<std::size_t>(id)]; }
  /// The number of sequences that use a page.
  index_t& users(index_t page) { return users_[static_cast<std::size_t>(page)]; }

  index_t pages_for(index_t length) const { return (length + options_.page - 1) / options_.page; }
  /// Returns whether the next key of a sequence is in its last page.
  bool ends_within_page(const Sequence& s) const { return s.length % options_.page > 0; }
  index_t row_of(index_t page, index_t h, index_t key) const {
    return (page * options_.kv_heads + h) * options_.page + key % options_.page;
  }

  index_t page_of(const Sequence& s, index_t key) const {
    return s.pages[static_cast<std::size_t>(key / options_.page)];
  }

  void check_id(const char* function, const char* name, index_t id) const {
    if (id < 0 || id >= std::ssize(sequences_))
      detail::fail_value(function, name, "names sequence", id, "must be at least 0 and below",
                         std::ssize(sequences_));
    if (!sequence(id).exists)
      detail::fail_value(function, name, "names removed sequence", id, "sequences are", sequences());
  }

  template <class U>
  void check_new(const char* name, const View<const U, 3>& view, index_t width, index_t tokens) const {
    const char* function = "PagedKvCache::append";
    detail::check_view(function, name, view);
    const auto same = [&](int i, const char* what, const char* expected, index_t extent) {
      detail::check_equal(function, name, what, view.extent(i), expected, extent);
    };
    same(0, "has tokens", "sequences has", tokens);
    same(1, "has heads", "the cache's is", options_.kv_heads);
    same(2, "has channels", "the cache's is", width / detail::group_of<U>);
  }

  template <class NewKey, class NewValue>
  void append_from(const View<const NewKey, 3>& k, const View<const NewValue, 3>& v, Integers sequences,
                   const Rope<Compute>* rope, Integers offsets, const View<const float, 2>& k_scales = {},
                   const View<const float, 2>& v_scales = {}) {
    const char* function = "PagedKvCache::append";
    const index_t tokens = std::ssize(sequences);
    check_new("k", k, options_.width, tokens);
    check_new("v", v, options_.value_width, tokens);
    for (index_t id : sequences) {
      if (id >= 0) check_id(function, "sequences", id);
    }
    if (!offsets.empty() && std::ssize(offsets) != tokens)
      detail::fail_value(function, "offsets", "has extent", std::ssize(offsets), "sequences has", tokens);
    if (rope != nullptr && rope->sequences() != 1) {
      detail::fail_format("ssmax::%s: rope has positions of %td sequences, those of a paged cache share 1",
                          function, rope->sequences());
    }
    // 1. Count the tokens of each sequence, and the pages that the call needs.
    for (Sequence& s : sequences_) {
      s.added = 0;
      s.start = s.length;
    }
    for (index_t id : sequences) {
      if (id >= 0) ++sequence(id).added;
    }
    index_t needed = 0;
    for (Sequence& s : sequences_) {
      if (s.added == 0) continue;
      if (rope != nullptr && offsets.empty()) rope->check(function, "k", s.length, s.added, options_.width);
      needed += pages_for(s.length + s.added) - std::ssize(s.pages);
    }
    for (index_t token = 0; rope != nullptr && token < std::ssize(offsets); ++token) {
      const auto t = static_cast<std::size_t>(token);
      if (sequences[t] < 0) continue;
      detail::check_offset(function, *rope, sequence(sequences[t]).length, offsets[t], options_.width);
    }
    needed += copies();
    if (needed > free_pages()) detail::fail_full("append: k", needed, free_pages());
    // 2. Allocate the memory of the page tables.
    for (Sequence& s : sequences_) {
      const auto pages = static_cast<std::size_t>(pages_for(s.length + s.added));
      if (pages > s.pages.capacity()) s.pages.reserve(std::max(pages, 2 * s.pages.size()));
    }
    // 3. Store the tokens. The storage type of a user may throw.
    UndoneAppend undone{this};
    for (index_t token = 0; token < tokens; ++token) {
      const auto t = static_cast<std::size_t>(token);
      if (sequences[t] < 0) continue;
      Sequence& s = sequence(sequences[t]);
      const index_t position = offsets.empty() ? s.length : s.start + offsets[t];
      prepare_page(s);
      for (index_t h = 0; h < options_.kv_heads; ++h) {
        const index_t row = row_of(s.pages.back(), h, s.length);
        rows_.store(row, &k(token, h, 0), &v(token, h, 0), rope, {position});
        rows_.set_scales(row, detail::number_at(k_scales, token, h), detail::number_at(v_scales, token, h));
      }
      ++s.length;
    }
    undone.cache = nullptr;
  }

  /// Gives the sequences their lengths and pages back if storing a token throws.
  struct UndoneAppend {
    PagedKvCache* cache;  // null after success

    ~UndoneAppend() {
      if (cache == nullptr) return;
      for (Sequence& s : cache->sequences_) {
        if (s.added > 0) cache->shorten(s, s.start);
      }
    }
  };

  void shorten(Sequence& s, index_t length) {
    s.length = length;
    while (std::ssize(s.pages) > pages_for(length)) {
      release(s.pages.back());
      s.pages.pop_back();
    }
  }

  /// Returns the number of shared pages that the call copies. If all users of a page append to it, the last of them
  /// keeps the page.
  index_t copies() {
    index_t result = 0;
    const auto for_each_writer = [&](const auto& f) {
      for (const Sequence& s : sequences_) {
        if (s.added > 0 && ends_within_page(s)) f(s.pages.back());
      }
    };
    for_each_writer([&](index_t page) {
      if (++writers_[static_cast<std::size_t>(page)] < users(page)) ++result;
    });
    for_each_writer([&](index_t page) { writers_[static_cast<std::size_t>(page)] = 0; });
    return result;
  }

  /// Adds a page for the next key of a sequence, or copies a shared page.
  void prepare_page(Sequence& s) {
    if (ends_within_page(s)) return own(s.pages.back(), s.length % options_.page);
    s.pages.push_back(take_page());
  }
  /// Replaces a shared page by a copy of its first `count` keys.
  void own(index_t& page, index_t count) {
    if (users(page) == 1) return;
    const index_t shared = std::exchange(page, take_page());
    for (index_t h = 0; h < options_.kv_heads; ++h)
      rows_.copy(row_of(shared, h, 0), row_of(page, h, 0), count);
    release(shared);
  }
  index_t take_page() {
    const index_t page = free_.back();
    free_.pop_back();
    users(page) = 1;
    return page;
  }
  void release(index_t page) {
    if (--users(page) == 0) free_.push_back(page);
  }

  PagedKvCacheOptions options_;
  detail::StoredRows<K, V> rows_;  // [pages][kv_heads][page]
  std::vector<index_t> users_;     // [pages]: the number of sequences that use the page
  std::vector<index_t> writers_;   // [pages]: 0 between calls
  std::vector<index_t> free_;      // pages, the next one last
  std::vector<Sequence> sequences_;
  std::vector<index_t> removed_;  // ids without a sequence, the next one last
};

SSMAX_END
/// @}
