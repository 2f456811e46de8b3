/// @defgroup mask Masks (mask.hpp)
/// Masks: which keys a query sees, and with them n, their number.
///
/// | mask | a query of batch entry b at position p sees |
/// |---|---|
/// | Full | every key |
/// | Causal | keys … p; aligned bottom-right: the last query sees the last key |
/// | Lengths | the first `visible[r]` keys of row r (ragged rows), rows counted over [batch, head, query] |
/// | SlidingWindow | keys p - left … p + right |
/// | PrefixLM | keys … p, and the first `prefix[b]` keys wherever it stands |
/// | KeyLengths | the first `lengths[b]` keys (padding) |
/// | Documents | the keys of its own document (packed sequences), all or … p; positions restart |
/// | SinkWindow | the first keys and a window (this and the next two: mask_runs.hpp) |
/// | BlockSparse | the key blocks that a bitmap shows to its query block |
/// | MatrixRuns | the keys where a matrix, read once, shows them |
/// | `a & b` | the keys that both a and b show |
/// | MaskMatrix | the keys where a matrix of bool is true (this and the next two: mask_matrix.hpp) |
/// | Finite | the keys where an additive mask is not -inf |
/// | Where | the keys that a function of the user's picks |
///
/// Spans must outlive the mask. query.hpp says what it takes to be one.
#pragma once

#include <algorithm>
#include <span>

#include "config.hpp"
#include "detail/checks/error.hpp"
#include "mask_matrix.hpp"
#include "query.hpp"

/// @addtogroup mask
/// @{
SSMAX_BEGIN_DATA

/// Every key: n = keys.
struct Full {
  /// [0, keys).
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const { return {0, query.shape.keys}; }
};

/// All rows of a head at once.
template <>
inline constexpr bool same_keys<Full> = true;

/// Keys up to the query's own position: n = max(0, p + 1).
struct Causal {
  /// [0, p + 1).
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const {
    return {0, std::max<index_t>(0, query.position() + 1)};
  }
};

/// The first visible[r] keys of row r = (batch·heads + head)·queries + query: ragged rows.
struct Lengths {
  std::span<const index_t> visible;  ///< One number per row.

  /// The span must outlive the mask.
  SSMAX_INLINE constexpr explicit Lengths(std::span<const index_t> lengths) : visible(lengths) {}
  /// [0, visible[r]). Values outside [0, keys] are cut to it: the check is O(1) and cannot look at them all.
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const {
    const auto row = (query.batch * query.shape.heads + query.head) * query.shape.queries + query.index;
    return {0, std::clamp<index_t>(visible[static_cast<std::size_t>(row)], 0, query.shape.keys)};
  }
  /// Throws std::invalid_argument unless there is one number per row.
  SSMAX_INLINE void check(const QueryShape& shape) const {
    if (static_cast<index_t>(visible.size()) != shape.rows()) {
      detail::fail_value("Lengths", "visible", "has extent", static_cast<index_t>(visible.size()), "rows are",
                         shape.rows());
    }
  }
};

/// Keys p - left … p + right of a query at position p, as far as they exist. Both are at least 0 (else
/// std::invalid_argument). `std::numeric_limits<index_t>::max()` leaves that side unbounded. A model's "window of w
/// tokens" counts the token itself: left = w - 1.
struct SlidingWindow {
  index_t left;   ///< Keys before the query's own position.
  index_t right;  ///< Keys behind it.

  /// left and right.
  SSMAX_INLINE constexpr explicit SlidingWindow(index_t keys_before, index_t keys_after = 0)
      : left(keys_before), right(keys_after) {}
  /// [p - left, p + right + 1), cut to [0, keys). Neither end is computed where it could overflow.
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const {
    const index_t position = query.position();
    const index_t last = query.shape.keys - 1;
    return {left < position ? position - left : 0,
            right < last - position ? std::max<index_t>(0, position + right + 1) : query.shape.keys};
  }
  /// Throws std::invalid_argument if left or right is negative.
  SSMAX_INLINE void check(const QueryShape&) const {
    if (left < 0) detail::fail_value("SlidingWindow", "left", "is", left, "must be at least", 0);
    if (right < 0) detail::fail_value("SlidingWindow", "right", "is", right, "must be at least", 0);
  }
};

/// Causal, but the first prefix[b] keys of batch entry b are seen by all of its queries. One value per batch
/// entry, cut to [0, keys].
struct PrefixLM {
  std::span<const index_t> prefix;  ///< One number per batch entry.

  /// The span must outlive the mask.
  SSMAX_INLINE constexpr explicit PrefixLM(std::span<const index_t> lengths) : prefix(lengths) {}
  /// [0, max(p + 1, prefix[b])).
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const {
    const index_t seen_by_all = prefix[static_cast<std::size_t>(query.batch)];
    return {0, std::clamp<index_t>(seen_by_all, Causal{}.keys(query).end, query.shape.keys)};
  }
  /// Throws std::invalid_argument unless there is one number per batch entry.
  SSMAX_INLINE void check(const QueryShape& shape) const {
    if (static_cast<index_t>(prefix.size()) != shape.batch) {
      detail::fail_value("PrefixLM", "prefix", "has extent", static_cast<index_t>(prefix.size()),
                         "batch entries are", shape.batch);
    }
  }
};

/// The first lengths[b] keys of batch entry b; the others are padding. One value per batch entry, cut to
/// [0, keys]. Positions stay aligned with the padded keys: `KeyLengths & Causal` fits queries padded alike.
struct KeyLengths {
  std::span<const index_t> lengths;  ///< One number per batch entry.

  /// The span must outlive the mask.
  SSMAX_INLINE constexpr explicit KeyLengths(std::span<const index_t> keys_per_entry)
      : lengths(keys_per_entry) {}
  /// [0, lengths[b]).
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const {
    const index_t length = lengths[static_cast<std::size_t>(query.batch)];
    return {0, std::clamp<index_t>(length, 0, query.shape.keys)};
  }
  /// Throws std::invalid_argument unless there is one number per batch entry.
  SSMAX_INLINE void check(const QueryShape& shape) const {
    if (static_cast<index_t>(lengths.size()) != shape.batch) {
      detail::fail_value("KeyLengths", "lengths", "has extent", static_cast<index_t>(lengths.size()),
                         "batch entries are", shape.batch);
    }
  }
};

/// Several documents packed into one sequence: a query sees keys of its own document only, and n and
/// positions start anew in each. Document i has the queries and keys [cumulative[i], cumulative[i + 1]) of
/// every batch entry or, where they differ, queries [cumulative_queries[i], …) and keys
/// [cumulative_keys[i], …), aligned bottom-right within the document. A document may lack queries or keys
/// (but not keys alone where there is a rope: its queries would stand before the first position).
class Documents {
 public:
  /// Queries and keys in the same places. The spans must outlive the mask.
  SSMAX_INLINE constexpr Documents(std::span<const index_t> cumulative, bool causal)
      : Documents(cumulative, cumulative, causal) {}
  /// Queries and keys in places of their own. The spans must outlive the mask.
  SSMAX_INLINE constexpr Documents(std::span<const index_t> cumulative_queries,
                                   std::span<const index_t> cumulative_keys, bool causal)
      : queries_(cumulative_queries), keys_(cumulative_keys), causal_(causal) {}

  /// Those of the query's document or, if causal, those up to its own position.
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const {
    const Place place = place_of(query);
    return {place.keys.begin, causal_ ? std::max(place.keys.begin, place.at + 1) : place.keys.end};
  }
  /// Counted from the first key of the query's document.
  SSMAX_INLINE constexpr index_t query_position(const Query& query) const {
    const Place place = place_of(query);
    return place.at - place.keys.begin;
  }
  /// Counted from the first key of the key's document.
  SSMAX_INLINE constexpr index_t key_position(const Query&, index_t key) const {
    return key - keys_[document_of(keys_, key)];
  }
  /// The query, so that position() is the key it stands at: bottom-right within its document.
  SSMAX_INLINE constexpr Query aligned(const Query& query) const {
    if (queries_.data() == keys_.data()) return query;
    Query result = query;
    result.shift += place_of(query).at - query.position();
    return result;
  }

  /// Throws unless both spans have one element more than there are documents, begin with 0, do not fall, and
  /// end with the number of queries and of keys. O(documents).
  SSMAX_INLINE void check(const QueryShape& shape) const {
    if (queries_.size() != keys_.size()) {
      detail::fail_value("Documents", "cumulative_queries", "has extent",
                         static_cast<index_t>(queries_.size()), "cumulative_keys has",
                         static_cast<index_t>(keys_.size()));
    }
    check_span("cumulative_queries", queries_, "queries are", shape.queries);
    check_span("cumulative_keys", keys_, "keys are", shape.keys);
  }

 private:
  /// Where a query stands: the keys of its document, and the key at its position.
  struct Place {
    KeyRange keys;
    index_t at;
  };

  SSMAX_INLINE constexpr Place place_of(const Query& query) const {
    const std::size_t document = document_of(queries_, query.index);
    const index_t queries_after = queries_[document + 1] - 1 - query.index;
    const KeyRange keys{keys_[document], keys_[document + 1]};
    return {keys, keys.end - 1 - queries_after};
  }
  /// The last document that begins at or before `index`: those before it with the same beginning are empty.
  SSMAX_INLINE static constexpr std::size_t document_of(std::span<const index_t> cumulative, index_t index) {
    const auto next = std::upper_bound(cumulative.begin(), cumulative.end(), index);
    return static_cast<std::size_t>(next - cumulative.begin() - 1);
  }
  SSMAX_INLINE static void check_span(const char* name, std::span<const index_t> cumulative,
                                      const char* extent_name, index_t extent) {
    if (cumulative.empty()) detail::fail_value("Documents", name, "has extent", 0, "must be at least", 1);
    if (cumulative.front() != 0) {
      detail::fail_value("Documents", name, "begins with", cumulative.front(), "must begin with", 0);
    }
    for (std::size_t i = 1; i < cumulative.size(); ++i) {
      if (cumulative[i] < cumulative[i - 1]) {
        detail::fail_format("ssmax::Documents: %s falls from %td to %td in document %zu", name,
                            cumulative[i - 1], cumulative[i], i - 1);
      }
    }
    if (cumulative.back() != extent) {
      detail::fail_value("Documents", name, "ends with", cumulative.back(), extent_name, extent);
    }
  }

  std::span<const index_t> queries_, keys_;
  bool causal_;
};

/// The keys that both masks show. Positions are those of the mask that defines them (two that do are
/// refused): `SlidingWindow & Documents` is a window within each document.
template <Mask A, Mask B>
class Both {
  static_assert(!(detail::defines_positions<A> && detail::defines_positions<B>),
                "ssmax: of two masks joined by &, only one may define positions");

 public:
  /// `a & b` is this.
  SSMAX_INLINE constexpr Both(const A& a, const B& b) : a_(a), b_(b) {}

  /// Where the ranges of both meet.
  SSMAX_INLINE constexpr KeyRange keys(const Query& query) const {
    const Query stood = stand(query);
    const KeyRange a = a_.keys(stood), b = b_.keys(stood);
    const index_t begin = std::max(a.begin, b.begin);
    return {begin, std::max(begin, std::min(a.end, b.end))};
  }
  /// Whether both see the key.
  SSMAX_INLINE constexpr bool sees(const Query& query, index_t key) const
      requires(detail::has_predicate<A> || detail::has_predicate<B>) {
    const Query stood = stand(query);
    return detail::sees(a_, stood, key) && detail::sees(b_, stood, key);
  }
  /// Returns the next keys that runs of both masks have in common.
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
  /// Whether both masks show two queries the same runs.
  SSMAX_INLINE constexpr bool same_runs(const Query& query, const Query& other) const
      requires((detail::has_run<A> ||
                detail::has_run<B>)&&detail::has_known_runs<A>&& detail::has_known_runs<B>) {
    const Query stood = stand(query), stood_other = stand(other);
    return detail::same_runs(a_, stood, stood_other) && detail::same_runs(b_, stood, stood_other);
  }
  /// That of the mask that defines positions.
  SSMAX_INLINE constexpr index_t query_position(const Query& query) const
      requires(detail::has_query_position<A> || detail::has_query_position<B>) {
    if constexpr (detail::has_query_position<A>) {
      return a_.query_position(query);
    } else {
      return b_.query_position(query);
    }
  }
  /// That of the mask that defines positions.
  SSMAX_INLINE constexpr index_t key_position(const Query& query, index_t key) const
      requires(detail::has_key_position<A> || detail::has_key_position<B>) {
    if constexpr (detail::has_key_position<A>) {
      return a_.key_position(query, key);
    } else {
      return b_.key_position(query, key);
    }
  }
  /// The query as both masks move it.
  SSMAX_INLINE constexpr Query aligned(const Query& query) const
      requires(detail::has_alignment<A> || detail::has_alignment<B>) {
    return stand(query);
  }
  /// The checks of both.
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

/// All rows of a head at once, where both masks ask for it.
template <Mask A, Mask B>
inline constexpr bool same_keys<Both<A, B>> = same_keys<A>&& same_keys<B>;

/// The keys that both masks show. (For two masks of one's own, which do not find this: `Both(a, b)`.)
template <Mask A, Mask B>
[[nodiscard]] SSMAX_INLINE constexpr Both<A, B> operator&(const A& a, const B& b) {
  return {a, b};
}

SSMAX_END
/// @}
