/// @defgroup mask Masks (mask.hpp)
/// Masks. A mask defines which keys are visible to a query, and n, the number of visible keys.
///
/// | mask | keys that are visible to a query at position p in batch entry b |
/// |---|---|
/// | Full | every key |
/// | Causal | keys up to p; aligned bottom-right: the last query attends to the last key |
/// | CausalTopLeft | query i of the call sees keys up to i; aligned top-left: query 0 attends to key 0 |
/// | Lengths | the first `visible[r]` keys, for row r (softmax of ragged rows) |
/// | SlidingWindow | keys p - left to p + right; with a third argument also the first keys |
/// | Chunks | keys of p's chunk of `size` keys, up to p |
/// | PrefixLM | keys up to p, and the first `prefix[b]` keys for every p |
/// | KeyLengths | the first `lengths[b]` keys (padding) |
/// | LeftPadding | keys `padding[b]` to p; positions begin after the padding |
/// | Documents | the keys of the query's document (packed sequences), all or up to p; positions restart |
/// | BlockSparse | the key blocks that a bitmap selects for the query block (mask_runs.hpp) |
/// | MatrixRuns | the same keys as MatrixMask; the constructor reads the matrix once (mask_runs.hpp) |
/// | Tree | committed keys, and the branch of a candidate of speculative decoding (mask_runs.hpp) |
/// | `a & b` | the keys that are visible under both a and b |
/// | MatrixMask | the keys where a matrix of bool is true, or an additive mask is not -inf |
/// | Where | the keys for which your function returns true |
///
/// Spans must outlive the mask. query.hpp defines the concept, for a mask of your own.

/// @defgroup mask_matrix Masks for any set of keys (mask.hpp)
/// @ingroup mask
/// Masks for any set of visible keys. MatrixMask reads a matrix, `Where` calls your function.
///
/// These masks count n key by key, which takes as long as reading the matrix. If most keys are masked, join a mask
/// that limits the range first: `Causal{} & Where(f)` calls f for the keys up to the query only.
///
/// Matrices are [batch, heads, queries, keys] with last stride 1 or 0. To use one matrix for all heads, pass a view
/// with the number of heads and stride 0 for heads. HeadsOfMatrix::modulo takes fewer matrices than heads.
#pragma once

#include <algorithm>
#include <span>

#include "config.hpp"
#include "detail/checks/boundaries.hpp"
#include "detail/checks/error.hpp"
#include "detail/matrices/masks.hpp"
#include "query.hpp"
#include "view.hpp"

/// @addtogroup mask
/// @{
SSMAX_BEGIN_DATA

/// A mask under which every key is visible: n = keys.
struct Full {
  /// Returns [0, keys).
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const { return {0, query.shape.keys}; }
};

/// All queries of a head see the same keys.
template <>
inline constexpr bool same_keys<Full> = true;

/// A mask under which the keys up to the query's own position p are visible: n = max(0, p + 1).
struct Causal {
  /// Returns [0, p + 1).
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const {
    return {0, std::max<index_t>(0, query.position() + 1)};
  }
};

/// The causal mask of PyTorch's `is_causal=True`, aligned top-left: query i of the call sees keys 0 to i, n = min(i +
/// 1, keys). The position of query i is i, also for a mask joined by & and for the rope over a source. Causal shows the
/// same keys if there are as many queries as keys.
struct CausalTopLeft {
  /// The keys of a source have the positions of this mask: their places in the sequence.
  static constexpr bool rotated_to_positions = true;

  /// Returns [0, min(i + 1, keys)).
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const {
    return {0, std::min(query.index + 1, query.shape.keys)};
  }
  /// Returns i.
  SSMAX_INLINE constexpr index_t query_position(const Query& query) const { return query.index; }
  /// Returns the query with a shift, so that position() is i.
  SSMAX_INLINE constexpr Query aligned(const Query& query) const {
    Query result = query;
    result.shift += query.index - query.position();
    return result;
  }
};

/// A mask for softmax of ragged rows: the first visible[r] keys are visible to row r = (batch·heads + head)·queries +
/// query. Attention accepts it, but sequences need one number only: see KeyLengths and the option `lengths`.
struct Lengths {
  /// Attention refuses this mask together with the option `lengths`.
  static constexpr bool refuses_lengths = true;

  Integers visible;  ///< One number per row.

  /// Stores the span, which must outlive the mask.
  SSMAX_INLINE constexpr explicit Lengths(KeptIntegers lengths) : visible(lengths) {}
  /// Returns [0, visible[r]). Clamps the value to [0, keys], because a check of all values would not be O(1).
  SSMAX_INLINE KeyRange keys(const Query& query) const {
    const auto row = (query.batch * query.shape.heads + query.head) * query.shape.queries + query.index;
    return {0, std::clamp<index_t>(visible[static_cast<std::size_t>(row)], 0, query.shape.keys)};
  }
  /// Throws std::invalid_argument unless there is one number per row.
  SSMAX_INLINE void check(const QueryShape& shape) const {
    detail::check_equal("Lengths", "visible", "has extent", std::ssize(visible), "rows are", shape.rows());
  }
};

/// A mask with a window: a query at position p attends to keys p - left to p + right.
/// `std::numeric_limits<index_t>::max()` leaves that side unbounded. For a model's "window of w tokens", which
/// includes the token itself, set left = w - 1.
///
/// `SlidingWindow(left, right, first)` also shows the first `first` keys of the sequence, up to key p + right.
/// KeepsFirst is true for this form only, because a mask with runs takes other paths than a mask with one range.
template <bool KeepsFirst = false>
struct SlidingWindow {
  index_t left;       ///< Keys before the query's own position.
  index_t right;      ///< Keys after the query's own position.
  index_t first = 0;  ///< Keys at the start of the sequence that stay visible; 0 unless KeepsFirst.

  /// Sets left, right and first, all at least 0.
  SSMAX_INLINE constexpr explicit SlidingWindow(index_t keys_before, index_t keys_after = 0,
                                                index_t first_keys = 0)
      : left(keys_before), right(keys_after), first(first_keys) {}
  /// Returns [p - left, p + right + 1), clamped to [0, keys). Exception: if KeepsFirst, the range begins with key 0.
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const {
    const KeyRange seen = window(query);
    return {KeepsFirst ? 0 : seen.begin, seen.end};
  }
  /// Returns true if the key is one of the first keys or in the window.
  SSMAX_INLINE constexpr bool sees(const Query& query, index_t key) const requires KeepsFirst {
    const KeyRange seen = window(query);
    return key < seen.end && (key < first || key >= seen.begin);
  }
  /// Returns the visible first keys from `from` on or, after them, the window.
  SSMAX_INLINE constexpr KeyRange run(const Query& query, index_t from) const requires KeepsFirst {
    const KeyRange seen = window(query);
    if (from < first && seen.begin > from) return {from, std::min(first, seen.end)};
    return {std::max(from, seen.begin), seen.end};
  }
  /// Returns n.
  SSMAX_INLINE constexpr index_t count(const Query& query) const requires KeepsFirst {
    const KeyRange seen = window(query);
    return seen.end - std::max<index_t>(0, seen.begin - first);
  }
  /// Returns true if both queries have the same position.
  SSMAX_INLINE constexpr bool same_runs(const Query& query, const Query& other) const requires KeepsFirst {
    return query.position() == other.position();
  }
  /// Throws std::invalid_argument if left, right or first is negative, or first is not 0 without KeepsFirst.
  SSMAX_INLINE void check(const QueryShape&) const {
    detail::check_at_least("SlidingWindow", "left", left, 0);
    detail::check_at_least("SlidingWindow", "right", right, 0);
    detail::check_at_least("SlidingWindow", "first", first, 0);
    if constexpr (!KeepsFirst)
      detail::check_equal("SlidingWindow<false>", "first", "is", first, "must be", 0);
  }

 private:
  /// Returns the keys of the window. The comparisons avoid an overflow.
  SSMAX_INLINE constexpr KeyRange window(const Query& query) const {
    const index_t position = query.position();
    const index_t after = std::min(right, query.shape.keys - 1 - position);
    return {left < position ? position - left : 0, std::max<index_t>(0, position + after + 1)};
  }
};

/// Deduces KeepsFirst from the number of arguments.
SlidingWindow(index_t, index_t, index_t)->SlidingWindow<true>;

/// A causal mask in chunks, as in Llama 4 (`attention_chunk_size` of its configuration, 8192): a query at position p
/// sees the keys of its own chunk up to p, n = p % size + 1. Chunks begin at multiples of `size` keys from the first
/// key of the sequence, also over a cache and in `Chunks & Documents`. Positions do not restart.
struct Chunks {
  index_t size;  ///< Keys per chunk, at least 1.

  /// Sets size.
  SSMAX_INLINE constexpr explicit Chunks(index_t keys_per_chunk) : size(keys_per_chunk) {}
  /// Returns [p - p % size, p + 1). Exception: returns an empty range for p below 0.
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const {
    const index_t position = query.position();
    if (position < 0) return {};
    return {position - position % size, position + 1};
  }
  /// Throws std::invalid_argument if size is below 1.
  SSMAX_INLINE void check(const QueryShape&) const { detail::check_at_least("Chunks", "size", size, 1); }
};

/// A causal mask with a prefix: the first prefix[b] keys are visible to all queries of batch entry b. The mask clamps
/// prefix[b] to [0, keys].
struct PrefixLM {
  Integers prefix;  ///< One number per batch entry.

  /// Stores the span, which must outlive the mask.
  SSMAX_INLINE constexpr explicit PrefixLM(KeptIntegers lengths) : prefix(lengths) {}
  /// Returns [0, max(p + 1, prefix[b])).
  SSMAX_INLINE KeyRange keys(const Query& query) const {
    const index_t seen_by_all = prefix[static_cast<std::size_t>(query.batch)];
    return {0, std::max(Causal{}.keys(query).end, std::min(seen_by_all, query.shape.keys))};
  }
  /// Throws std::invalid_argument unless there is one number per batch entry.
  SSMAX_INLINE void check(const QueryShape& shape) const {
    detail::check_equal("PrefixLM", "prefix", "has extent", std::ssize(prefix), "batch entries are",
                        shape.batch);
  }
};

/// A mask for padding after the tokens: the first lengths[b] keys of batch entry b are visible. The mask clamps
/// lengths[b] to [0, keys]. Positions count rows of padding, too: `KeyLengths & Causal` is right if queries and keys
/// have the same padding. The option `lengths` (sequence_lengths.hpp) does not compute padded queries. For padding
/// before the tokens, see LeftPadding.
struct KeyLengths {
  Integers lengths;  ///< One number per batch entry.

  /// Stores the span, which must outlive the mask.
  SSMAX_INLINE constexpr explicit KeyLengths(KeptIntegers keys_per_entry) : lengths(keys_per_entry) {}
  /// Returns [0, lengths[b]).
  SSMAX_INLINE KeyRange keys(const Query& query) const {
    const index_t length = lengths[static_cast<std::size_t>(query.batch)];
    return {0, std::clamp<index_t>(length, 0, query.shape.keys)};
  }
  /// Throws std::invalid_argument unless there is one number per batch entry.
  SSMAX_INLINE void check(const QueryShape& shape) const {
    detail::check_equal("KeyLengths", "lengths", "has extent", std::ssize(lengths), "batch entries are",
                        shape.batch);
  }
};

/// A causal mask for sequences with padding before their tokens, as tokenizers pad prompts on the left. The first
/// padding[b] rows of batch entry b are padding. The position of a row is p - padding[b], for scalings, scores and the
/// rope; rows of padding have position 0 and see no key. The mask clamps padding[b] to [0, keys].
///
/// Exception: over a source, the rope rotates queries to positions that count the padding, as it rotated the keys. The
/// result differs by rounding, because RoPE depends on distances.
struct LeftPadding {
  Integers padding;  ///< One number per batch entry.

  /// Stores the span, which must outlive the mask.
  SSMAX_INLINE constexpr explicit LeftPadding(KeptIntegers rows_per_entry) : padding(rows_per_entry) {}
  /// Returns [padding[b], p + 1). Exception: returns an empty range for a row of padding.
  SSMAX_INLINE KeyRange keys(const Query& query) const {
    const index_t first = first_of(query);
    return {first, std::max(first, query.position() + 1)};
  }
  /// Returns max(p - padding[b], 0).
  SSMAX_INLINE index_t query_position(const Query& query) const {
    return key_position(query, query.position());
  }
  /// Returns max(key - padding[b], 0).
  SSMAX_INLINE index_t key_position(const Query& query, index_t key) const {
    return std::max<index_t>(key - first_of(query), 0);
  }
  /// Throws std::invalid_argument unless there is one number per batch entry.
  SSMAX_INLINE void check(const QueryShape& shape) const {
    detail::check_equal("LeftPadding", "padding", "has extent", std::ssize(padding), "batch entries are",
                        shape.batch);
  }

 private:
  SSMAX_INLINE index_t first_of(const Query& query) const {
    return std::clamp<index_t>(padding[static_cast<std::size_t>(query.batch)], 0, query.shape.keys);
  }
};

/// A mask for several documents that are packed into one sequence. A query attends to keys of its own document only.
/// n and positions restart in each document. Document i holds the queries [cumulative_queries[i],
/// cumulative_queries[i + 1]) and the keys [cumulative_keys[i], cumulative_keys[i + 1]) of every batch entry.
/// Positions are aligned bottom-right within the document. A document may have 0 queries or 0 keys. Exception: with a
/// rope, a document has at least as many keys as queries. Otherwise its first query would have a position below 0.
class Documents {
 public:
  /// Attention refuses this mask together with the option `lengths`.
  static constexpr bool refuses_lengths = true;

  /// Queries and keys have the same boundaries. The span must outlive the mask.
  SSMAX_INLINE constexpr Documents(KeptIntegers cumulative, bool causal)
      : Documents(cumulative, cumulative, causal) {}
  /// Queries and keys have different boundaries. The spans must outlive the mask.
  SSMAX_INLINE constexpr Documents(KeptIntegers cumulative_queries, KeptIntegers cumulative_keys, bool causal)
      : queries_(cumulative_queries), keys_(cumulative_keys), causal_(causal) {}

  /// Returns the keys of the query's document. Exception: if causal, returns those up to the query's position.
  SSMAX_INLINE KeyRange keys(const Query& query) const {
    const Place place = place_of(query);
    return {place.keys.begin, causal_ ? std::max(place.keys.begin, place.at + 1) : place.keys.end};
  }
  /// Returns the position of the query, counted from the first key of its document.
  SSMAX_INLINE index_t query_position(const Query& query) const {
    const Place place = place_of(query);
    return place.at - place.keys.begin;
  }
  /// Returns the position of the key, counted from the first key of its document.
  SSMAX_INLINE index_t key_position(const Query&, index_t key) const {
    return key - keys_[document_of(keys_, key)];
  }
  /// Returns the query with a shift, so that position() is bottom-right within its document.
  SSMAX_INLINE Query aligned(const Query& query) const {
    if (queries_.bytes().data() == keys_.bytes().data()) return query;
    Query result = query;
    result.shift += place_of(query).at - query.position();
    return result;
  }

  /// Throws std::invalid_argument unless both spans have equal extents of at least 1, begin with 0 and never
  /// decrease. The last elements must be the number of queries and of keys. O(documents).
  SSMAX_INLINE void check(const QueryShape& shape) const {
    detail::check_equal("Documents", "cumulative_queries", "has extent", std::ssize(queries_),
                        "cumulative_keys has", std::ssize(keys_));
    detail::check_boundaries("Documents", "cumulative_queries", queries_, "document", "queries are",
                             shape.queries);
    detail::check_boundaries("Documents", "cumulative_keys", keys_, "document", "keys are", shape.keys);
  }

 private:
  /// The place of a query: the keys of its document, and the key at its position.
  struct Place {
    KeyRange keys;
    index_t at;
  };

  SSMAX_INLINE Place place_of(const Query& query) const {
    const std::size_t document = document_of(queries_, query.index);
    const index_t queries_after = queries_[document + 1] - 1 - query.index;
    const KeyRange keys{keys_[document], keys_[document + 1]};
    return {keys, keys.end - 1 - queries_after};
  }
  /// Returns the last document that begins at or before `index`. Earlier ones with the same beginning are empty.
  SSMAX_INLINE static std::size_t document_of(Integers cumulative, index_t index) {
    std::size_t first = 0, end = cumulative.size();
    while (first < end) {
      const std::size_t middle = first + (end - first) / 2;
      if (cumulative[middle] <= index) {
        first = middle + 1;
      } else {
        end = middle;
      }
    }
    return first - 1;
  }
  Integers queries_, keys_;
  bool causal_;
};

/// A mask that joins two masks: a key is visible if it is visible under both. Positions are those of the mask that
/// defines positions. At most one of the two may define positions. `SlidingWindow & Documents` is a window within
/// each document.
template <Mask A, Mask B>
class Both {
  static_assert(!(detail::defines_positions<A> && detail::defines_positions<B>),
                "ssmax: of two masks joined by &, only one may define positions");

 public:
  /// True if the keys of a source were rotated to the positions of the mask that defines positions.
  static constexpr bool rotated_to_positions =
      detail::rotated_to_positions<A> || detail::rotated_to_positions<B>;
  /// True if attention refuses one of the masks together with the option `lengths`.
  static constexpr bool refuses_lengths = detail::refuses_lengths<A> || detail::refuses_lengths<B>;

  /// Copies both masks. `a & b` calls this constructor.
  SSMAX_INLINE constexpr Both(const A& a, const B& b) : a_(a), b_(b) {}

  /// Returns the intersection of both ranges.
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const {
    const Query stood = stand(query);
    const KeyRange a = a_.keys(stood), b = b_.keys(stood);
    const index_t begin = std::max(a.begin, b.begin);
    return {begin, std::max(begin, std::min(a.end, b.end))};
  }
  /// Returns true if the key is visible under both masks.
  SSMAX_INLINE constexpr bool sees(const Query& query, index_t key) const
      requires(detail::has_predicate<A> || detail::has_predicate<B>) {
    const Query stood = stand(query);
    return detail::sees(a_, stood, key) && detail::sees(b_, stood, key);
  }
  /// Returns the next run of keys that is visible under both masks.
  SSMAX_INLINE constexpr KeyRange run(const Query& query, index_t from) const
      requires((detail::has_run<A> ||
                detail::has_run<B>)&&detail::has_known_runs<A>&& detail::has_known_runs<B>) {
    const Query stood = stand(query);
    for (;;) {
      const KeyRange a = detail::next_run(a_, stood, from);
      if (a.size() <= 0) return a;
      const KeyRange b = detail::next_run(b_, stood, a.begin);
      if (b.size() <= 0 || b.begin < a.end) return {b.begin, std::min(a.end, b.end)};
      from = b.begin;
    }
  }
  /// Returns true if both masks have the same runs for the two queries.
  SSMAX_INLINE constexpr bool same_runs(const Query& query, const Query& other) const
      requires((detail::has_run<A> ||
                detail::has_run<B>)&&detail::has_known_runs<A>&& detail::has_known_runs<B>) {
    const Query stood = stand(query), stood_other = stand(other);
    return detail::same_runs(a_, stood, stood_other) && detail::same_runs(b_, stood, stood_other);
  }
  /// Returns the position by the mask that defines positions.
  SSMAX_INLINE constexpr index_t query_position(const Query& query) const
      requires(detail::has_query_position<A> || detail::has_query_position<B>) {
    return detail::has_query_position<A> ? detail::query_position(a_, query)
                                         : detail::query_position(b_, query);
  }
  /// Returns the position by the mask that defines positions.
  SSMAX_INLINE constexpr index_t key_position(const Query& query, index_t key) const
      requires(detail::has_key_position<A> || detail::has_key_position<B>) {
    return detail::has_key_position<A> ? detail::key_position(a_, query, key)
                                       : detail::key_position(b_, query, key);
  }
  /// Returns the query with the shifts of both masks.
  SSMAX_INLINE constexpr Query aligned(const Query& query) const
      requires(detail::has_alignment<A> || detail::has_alignment<B>) {
    return stand(query);
  }
  /// Throws std::invalid_argument if the check of either mask throws.
  SSMAX_INLINE void check(const QueryShape& shape) const {
    detail::check_mask(a_, shape);
    detail::check_mask(b_, shape);
  }

 private:
  SSMAX_INLINE constexpr Query stand(const Query& query) const {
    return detail::aligned(a_, detail::aligned(b_, query));
  }

  A a_;
  B b_;
};

/// The same keys for all queries of a head, if both masks declare it.
template <Mask A, Mask B>
inline constexpr bool same_keys<Both<A, B>> = same_keys<A>&& same_keys<B>;

/// Returns a mask with the keys that are visible under both masks. (For two masks in your own namespace, lookup does
/// not find this operator: write `Both(a, b)`.)
template <Mask A, Mask B>
[[nodiscard]] SSMAX_INLINE constexpr Both<A, B> operator&(const A& a, const B& b) {
  return {a, b};
}

/// Returns the mask of a type that is also a policy of another kind, as a type that is a mask alone.
template <Mask M>
[[nodiscard]] SSMAX_INLINE constexpr Both<Full, M> as_mask(const M& mask) {
  return {Full{}, mask};
}

SSMAX_END
/// @}
