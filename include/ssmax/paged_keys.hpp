/// @defgroup paged_keys Pages of keys (paged_keys.hpp)
/// Keys and values in the pages of somebody else's pool: the memory and the page tables of a server, without a copy.
///
///     const PagedKeys keys(k, v, PageTable(table, lengths));
///     attention({.q = q, .keys = keys, .out = out}, SSMax<float>{s}, Causal{});
///
/// | argument | shape |
/// |---|---|
/// | k | [pages, keys of a page, kv_heads, width] |
/// | v | [pages, keys of a page, kv_heads, value_width] |
/// | table | [batch, most pages of a sequence], or [batch, kv_heads, most pages]: pages per kv head; any strides |
/// | lengths | [batch]: the number of keys of each sequence |
/// | scales | storage types with a factor per row only (eight_bit.hpp): KeyScales (key_source.hpp) |
/// | channel_scales | the same storage types: ChannelScales (key_source.hpp) |
///
/// For storage types with `group` (storage.hpp), such as Q8_0, the last extent and the strides count elements.
///
/// P is the number of keys of a page. Key i of sequence b is key i mod P of page table(b, i / P). The last stride of k
/// and v is 1. You choose the other strides:
///
/// | pool | views |
/// |---|---|
/// | [pages, P, kv_heads, d], as in FlashAttention | contiguous |
/// | [pages, 2, P, kv_heads, d], k and v | strides {2·P·kv_heads·d, kv_heads·d, d, 1}; v begins P·kv_heads·d later |
/// | [pages, kv_heads, P, d], as in OpenVINO | strides {kv_heads·P·d, d, P·d, 1} |
///
/// With P = 1 an entry of the table is the index of a token, for instance of one that a selection chose for a query.
/// The indices may repeat, in any order. n and positions count the entries: a query that sees all of them has n =
/// lengths[b]. PerQuery (scaling.hpp) takes multipliers by another n, such as the length of the whole
/// sequence.
///
/// A table may also be in compressed rows: `PageTable(pages, begins, lengths)`, where entries
/// [begins[b], begins[b + 1]) of `pages` belong to sequence b.
///
/// A negative entry is a page that the pool no longer holds, for instance one outside a window. A mask must not show
/// its keys. Negative entries lie at the start of a sequence, or in one gap. A table with the pages of each kv head has
/// no negative entries. Entries beyond the length are not read.
/// Keys that no query sees never affect a result, NaN included.
///
/// Pages that are neighbours in the table and in memory make one run of keys, of at most 1024 keys. Factors must be
/// neighbours as well. Results are bit-identical to those over a KvCache of the same keys. Keys of pages that several
/// sequences begin with are computed once (docs/paged_attention.md).
///
/// With `channel_scales`, the keys of a page share one factor per channel, and so may the values:
///
///     const PagedKeys keys(k, v, PageTable(table, lengths), {.v = v_factors}, {.k = k_channel_factors});
///
/// A number is element · factor of the row · factor of the channel, multiplied in this order. With factors per channel,
/// the factors per row may be left out. Each page then makes a run of its own.
///
/// The constructor checks everything in O(pages of the sequences) and throws std::invalid_argument with the name of
/// the argument. It allocates only if an entry is negative. Pool, factors, table and lengths must outlive the source,
/// and must not change while it is used.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "detail/checks/key_storage.hpp"
#include "detail/checks/views.hpp"
#include "key_source.hpp"
#include "view.hpp"

/// @addtogroup paged_keys
/// @{
SSMAX_BEGIN_CODE

/// The pages of each sequence, in your memory: integers of any type.
template <std::integral Index, std::integral Length = Index>
class PageTable {
 public:
  /// A table [batch, most pages of a sequence].
  PageTable(const View<const Index, 2>& table, KeptSpan<const Length> lengths)
      : PageTable(View<const Index, 3>(table.data_handle(), {table.extent(0), 1, table.extent(1)},
                                       {table.stride(0), 0, table.stride(1)}),
                  lengths) {}
  /// A table [batch, kv_heads, most pages of a sequence]: each kv head has pages of its own.
  PageTable(const View<const Index, 3>& table, KeptSpan<const Length> lengths)
      : table_(table), lengths_(lengths) {
    detail::check_strided_view("PageTable", "table", table_);
    detail::check_equal("PageTable", "lengths", "has size", std::ssize(lengths_),
                        "must be the number of rows of table", table_.extent(0));
  }
  /// A table in compressed rows: sequence b has entries [begins[b], begins[b + 1]) of `pages`.
  PageTable(KeptSpan<const Index> pages, KeptSpan<const Index> begins, KeptSpan<const Length> lengths)
      : table_(pages.data(), {1, 1, std::ssize(pages)}), begins_(begins), lengths_(lengths) {
    if (std::ssize(begins_) != std::ssize(lengths_) + 1) {
      detail::fail_value("PageTable", "begins", "has size", std::ssize(begins_),
                         "must be one more than the size of lengths", std::ssize(lengths_));
    }
    for (std::size_t b = 0; b < lengths_.size(); ++b) {
      const auto begin = static_cast<index_t>(begins_[b]), end = static_cast<index_t>(begins_[b + 1]);
      if (begin < 0 || end < begin)
        detail::fail_value("PageTable", "begins", "has entry", end, "must be at least the one before",
                           std::max<index_t>(begin, 0));
      if (end > std::ssize(pages))
        detail::fail_value("PageTable", "begins", "has entry", end, "must be at most the size of pages",
                           std::ssize(pages));
    }
  }

  /// Returns the number of sequences.
  [[nodiscard]] index_t batch() const { return std::ssize(lengths_); }
  /// Returns the number of kv heads with pages of their own, or 1 if all kv heads have the same pages.
  [[nodiscard]] index_t heads() const { return table_.extent(1); }
  /// Returns the number of keys of a sequence.
  [[nodiscard]] index_t length(index_t b) const {
    return static_cast<index_t>(lengths_[static_cast<std::size_t>(b)]);
  }
  /// Returns the number of entries of a sequence.
  [[nodiscard]] index_t entries(index_t b) const {
    return begins_.empty() ? table_.extent(2) : begin_of(b + 1) - begin_of(b);
  }
  /// Returns entry i of a sequence and a kv head. Below 0: the pool no longer holds the page.
  [[nodiscard]] index_t page(index_t b, index_t h, index_t i) const {
    return static_cast<index_t>(*entry(b, h, i));
  }
  /// @cond
  /// Returns the address of entry i. The next one is stride() later.
  [[nodiscard]] const Index* entry(index_t b, index_t h, index_t i) const {
    return begins_.empty() ? &table_(b, heads() == 1 ? 0 : h, i) : &table_(0, 0, begin_of(b) + i);
  }
  [[nodiscard]] index_t stride() const { return table_.stride(2); }
  /// @endcond

 private:
  index_t begin_of(index_t b) const { return static_cast<index_t>(begins_[static_cast<std::size_t>(b)]); }

  View<const Index, 3> table_;     // compressed: [1, 1, all entries]
  std::span<const Index> begins_;  // empty unless compressed
  std::span<const Length> lengths_;
};

/// @cond
template <class Index, int Rank, class Lengths>
PageTable(const View<Index, Rank>&, const Lengths&)
    -> PageTable<std::remove_const_t<Index>, shared::ElementOf<const Lengths>>;
template <class Pages, class Lengths>
PageTable(const Pages&, const Pages&, const Lengths&)
    -> PageTable<shared::ElementOf<const Pages>, shared::ElementOf<const Lengths>>;
/// @endcond

/// A source of keys in pages. K and V are the storage types of keys and values. Table is a PageTable, or the tables of
/// a PagedKvCache.
template <class K, class V = K, class Table = PageTable<int>>
class PagedKeys {
 public:
  using Element = K;                        ///< Storage type of keys.
  using ValueElement = V;                   ///< Storage type of values.
  static constexpr bool owns_keys = false;  ///< The arguments of a call hold a copy.

  /// Refers to a pool and a table: the top of paged_keys.hpp.
  PagedKeys(const View<const K, 4>& k, const View<const V, 4>& v, const Table& table,
            const KeyScales& scales = {}, const ChannelScales& channel_scales = {})
      : k_(k), v_(v), scales_(scales), channel_scales_(channel_scales), table_(table) {
    detail::check_view("PagedKeys", "k", k_);
    detail::check_view("PagedKeys", "v", v_);
    for (int i = 0; i < 3; ++i) detail::check_extent("PagedKeys", "v", v_, i, "k", k_, i);
    detail::check_scales("PagedKeys", "k_scales", scales_.k, "k", k_, channel_scales_.k);
    detail::check_scales("PagedKeys", "v_scales", scales_.v, "v", v_, channel_scales_.v);
    detail::check_channel_scales("PagedKeys", "k_channel_scales", channel_scales_.k, "k", k_);
    detail::check_channel_scales("PagedKeys", "v_channel_scales", channel_scales_.v, "v", v_);
    has_channel_scales_ = detail::is_given(channel_scales_.k) || detail::is_given(channel_scales_.v);
    if (table_.heads() != 1 && table_.heads() != k_.extent(2))
      detail::fail_value("PagedKeys", "table", "has kv heads", table_.heads(),
                         "must be 1 or the kv heads of k", k_.extent(2));
    for (index_t b = 0; b < table_.batch(); ++b) check_sequence(b);
  }

  /// Returns batch, kv heads and widths.
  [[nodiscard]] KeySourceShape shape() const {
    return {table_.batch(), k_.extent(2), k_.extent(3) * detail::group_of<K>,
            v_.extent(3) * detail::group_of<V>};
  }
  /// Returns the number of keys that sequence b has had.
  [[nodiscard]] index_t length(index_t b) const { return table_.length(b); }
  /// Returns the positions whose keys are stored. Exception: positions in forgotten(b).
  [[nodiscard]] KeyRange stored(index_t b) const {
    const KeyRange gone = missing(b);
    return {gone.begin == 0 ? gone.end : 0, length(b)};
  }
  /// Returns whether calls look for pages that several sequences begin with.
  [[nodiscard]] bool shares_keys() const { return table_.heads() == 1; }
  /// Returns positions in a gap of the table.
  [[nodiscard]] KeyRange forgotten(index_t b) const {
    const KeyRange gone = missing(b);
    return gone.begin == 0 ? KeyRange{gone.end, gone.end} : gone;
  }
  /// Returns a run of keys that starts at `key`, of sequence b and kv head h.
  [[nodiscard]] KeyRun<K, V> run(index_t b, index_t h, index_t key) const {
    const index_t size = page_size(), at = key % size, last = std::min(length(b), key + longest_run);
    auto entry = table_.entry(b, h, key / size);
    const index_t page = std::max<index_t>(static_cast<index_t>(*entry), 0);
    index_t end = key - at + size;
    if (joins_pages()) {
      for (index_t next = page + 1; end < last; ++next, end += size) {
        entry += table_.stride();
        if (static_cast<index_t>(*entry) != next) break;
      }
    }
    return {.k = detail::row_of(k_, page, at, h),
            .k_stride = k_.stride(1),
            .v = detail::row_of(v_, page, at, h),
            .v_stride = v_.stride(1),
            .count = std::min(end, length(b)) - key,
            .k_scales = scale_of(scales_.k, page, at, h),
            .v_scales = scale_of(scales_.v, page, at, h),
            .k_scales_stride = scales_.k.stride(1),
            .v_scales_stride = scales_.v.stride(1),
            .k_channel_scales = channel_scales_of(channel_scales_.k, page, h),
            .v_channel_scales = channel_scales_of(channel_scales_.v, page, h)};
  }
  /// Returns the memory of the pool.
  [[nodiscard]] std::pair<std::span<const K>, std::span<const V>> memory() const {
    return {detail::memory_of(k_), detail::memory_of(v_)};
  }

  /// Returns the same keys with a number for their layout (KeySource::layout): layers with one table have one number.
  [[nodiscard]] PagedKeys with_layout(std::uint64_t number) const {
    PagedKeys result = *this;
    result.layout_ = number;
    return result;
  }
  /// Returns the number of the layout. 0: it is not known.
  [[nodiscard]] std::uint64_t layout() const { return layout_; }

 private:
  friend detail::SourceRows;

  static constexpr index_t longest_run = 1024;

  /// Writes the addresses of `count` keys and values from position `first` on.
  void find_rows(index_t b, index_t h, index_t first, index_t count, detail::RowLists to) const {
    const index_t size = page_size(), k_stride = k_.stride(1), v_stride = v_.stride(1);
    if (size == 1) {
      const K* const k = detail::row_of(k_, 0, 0, h);
      const V* const v = detail::row_of(v_, 0, 0, h);
      const auto entries = table_.entry(b, h, first);
      for (index_t i = 0; i < count; ++i) {
        const index_t page = std::max<index_t>(static_cast<index_t>(entries[i * table_.stride()]), 0);
        to.k[i] = reinterpret_cast<const std::byte*>(k + page * k_.stride(0));
        to.v[i] = reinterpret_cast<const std::byte*>(v + page * v_.stride(0));
      }
      return;
    }
    index_t entry = first / size, at = first % size;
    for (index_t i = 0; i < count; ++entry, at = 0) {
      const index_t page = std::max<index_t>(table_.page(b, h, entry), 0),
                    end = std::min(count, i + size - at);
      const K* k = detail::row_of(k_, page, at, h);
      const V* v = detail::row_of(v_, page, at, h);
      for (; i < end; ++i, k += k_stride, v += v_stride) {
        to.k[i] = reinterpret_cast<const std::byte*>(k);
        to.v[i] = reinterpret_cast<const std::byte*>(v);
      }
    }
  }
  detail::HeadDistance head_distance() const {
    return {table_.heads() == 1, detail::bytes_of<K>(k_.stride(2)), detail::bytes_of<V>(v_.stride(2))};
  }

  index_t page_size() const { return k_.extent(1); }
  /// Returns whether page p + 1 follows page p in memory, and so do the factors. Returns false with factors per
  /// channel.
  bool joins_pages() const {
    if (has_channel_scales_) return false;
    const auto joins = [this](const auto& view) { return view.stride(0) == page_size() * view.stride(1); };
    return joins(k_) && joins(v_) && joins(scales_.k) && joins(scales_.v);
  }
  /// Returns the factor of a row. A view that is not given has no factors: null.
  static const float* scale_of(const View<const float, 3>& scales, index_t page, index_t at, index_t h) {
    return scales.data_handle() + page * scales.stride(0) + at * scales.stride(1) + h * scales.stride(2);
  }
  /// Returns the factors of a page's channels, or null.
  static const float* channel_scales_of(const View<const float, 3>& scales, index_t page, index_t h) {
    return scales.data_handle() + page * scales.stride(0) + h * scales.stride(1);
  }
  KeyRange missing(index_t b) const {
    return missing_ == nullptr ? KeyRange{} : (*missing_)[static_cast<std::size_t>(b)];
  }

  /// Checks the length and the entries of a sequence, and finds its missing pages.
  void check_sequence(index_t b) {
    const index_t length = table_.length(b), size = page_size();
    if (length < 0) detail::fail_value("PagedKeys", "lengths", "has entry", length, "must be at least", 0);
    if (length > detail::max_counted)
      detail::fail_value("PagedKeys", "lengths", "has entry", length, "must be at most", detail::max_counted);
    if (length > 0 && size == 0)
      detail::fail_value("PagedKeys", "k", "has extent 0 in dimension 1 but a length is", length, "must be",
                         0);
    const index_t pages = length > 0 ? (length - 1) / size + 1 : 0;
    if (pages > table_.entries(b)) {
      detail::fail_value("PagedKeys", "lengths", "needs pages", pages, "the table has entries",
                         table_.entries(b));
    }
    KeyRange gap{0, 0};
    for (index_t h = 0; h < table_.heads() && pages > 0; ++h) {
      const auto entries = table_.entry(b, h, 0);
      for (index_t i = 0; i < pages; ++i) {
        const auto page = static_cast<index_t>(entries[i * table_.stride()]);
        if (page >= k_.extent(0))
          detail::fail_value("PagedKeys", "table", "has entry", page, "must be below the pages of k",
                             k_.extent(0));
        if (page >= 0) continue;
        if (table_.heads() > 1)
          detail::fail_value("PagedKeys", "table", "has pages of each kv head and entry", page,
                             "must be at least", 0);
        if (gap.size() > 0 && gap.end != i * size)
          detail::fail_value("PagedKeys", "table", "has a second gap at entry", i,
                             "may have one that ends at", gap.end / size);
        if (gap.size() == 0) gap.begin = i * size;
        gap.end = std::min((i + 1) * size, length);
      }
    }
    if (gap.size() == 0) return;
    const auto batch = static_cast<std::size_t>(table_.batch());
    if (missing_ == nullptr) missing_ = std::make_shared<std::vector<KeyRange>>(batch);
    (*missing_)[static_cast<std::size_t>(b)] = gap;
  }

  View<const K, 4> k_;
  View<const V, 4> v_;
  KeyScales scales_;
  ChannelScales channel_scales_;
  std::uint64_t layout_ = 0;
  bool has_channel_scales_ = false;
  Table table_;
  std::shared_ptr<std::vector<KeyRange>> missing_;  // [batch], or null; copies share it
};

template <class K, class V, class Table>
PagedKeys(const View<K, 4>&, const View<V, 4>&, const Table&, const KeyScales& = {},
          const ChannelScales& = {}) -> PagedKeys<std::remove_const_t<K>, std::remove_const_t<V>, Table>;

SSMAX_END
/// @}
