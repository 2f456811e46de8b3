/// @defgroup sequence_lengths Sequences of different lengths (sequence_lengths.hpp)
/// @ingroup attention
/// One call for sequences that have their own numbers of queries and keys.
///
///     const std::vector<index_t> cumulative{0, 5, 5, 42};  // three sequences, of 5, 0 and 37 tokens
///     attention({.q = q, .k = k, .v = v, .out = out, .lengths = SequenceLengths::packed(cumulative)}, scaling,
///               Causal{}, pool);
///
/// | layout | shape of q | queries of sequence b |
/// |---|---|---|
/// | padded | [sequences, heads, rows, d] | rows [0, queries[b]) of batch entry b |
/// | packed | [1, heads, all queries, d] | rows [cumulative_queries[b], cumulative_queries[b + 1]) |
///
/// k and v have the same layout, with `keys` and `cumulative_keys`. `heads_view` makes the packed views of
/// [tokens, heads·d]. out, lse, dout and dq have the rows of q, dk and dv the rows of k. Rows of the padding are
/// neither read nor written.
///
/// A call over a source of keys (key_source.hpp) takes lengths of queries alone. The source has the lengths of keys:
///
///     const std::vector<index_t> cumulative{0, 200, 201};  // a prompt chunk and a decoded token, for two sequences
///     attention({.q = q, .keys = cache, .out = out, .lengths = SequenceLengths::packed_queries(cumulative)},
///               scaling, Causal{}, pool);
///
/// Each sequence is a batch entry:
///
/// - Query::batch is b, QueryShape::batch the number of sequences.
/// - Query::index counts from 0 in the sequence. QueryShape::queries and keys are numbers of the sequence.
/// - Causal masks are aligned bottom-right in the sequence. Positions and n begin at the sequence's first key.
/// - Results of a sequence are bit-identical to a call with this sequence alone. It also takes the same path.
///
/// Numbers per query (PerQuery, Bias, MatrixMask) have the extents [sequences, heads, queries of the longest
/// sequence, keys of the longest sequence], in both layouts. Element (b, head, i, j) belongs to query i and key j of
/// sequence b. A policy's check receives these extents. The masks `Lengths` and `Documents` describe calls without
/// lengths: together with lengths, both throw std::invalid_argument.
///
/// Choose between lengths and the mask `Documents`, which also takes packed rows, by this table:
///
/// | | lengths | Documents |
/// |---|---|---|
/// | key chunks begin | at the first key of each sequence | at multiples of 1024 of the whole call |
/// | bits of a sequence | those of a call with it alone | depend on where it begins |
/// | n, positions, RoPE | begin anew in each sequence | begin anew in each document |
/// | numbers per query | [sequences, heads, longest] | [batch, heads, all rows] |
/// | over MPI, in parts | no | yes |
/// | over a source of keys | yes | only positions that the source has |
///
/// The explanation of a call describes the path that ran last. attention allocates once for the list
/// of its sequences and once for its computation, attention_backward once. With a workspace that is large
/// enough, both allocate no memory.
#pragma once

#include "config.hpp"
#include "query.hpp"
#include "view.hpp"

/// @addtogroup sequence_lengths
/// @{
SSMAX_BEGIN_DATA

namespace shared {

/// Rows [first, first + count) of one batch entry of a tensor.
struct SequenceRows {
  index_t entry = 0, first = 0, count = 0;
};

}  // namespace shared

/// The numbers of queries and keys of the sequences of a call. The spans must outlive the call.
class SequenceLengths {
 public:
  /// No lengths: every batch entry has all rows of the tensors.
  SSMAX_INLINE constexpr SequenceLengths() = default;

  /// Batch entry b has `queries[b]` queries and `keys[b]` keys.
  [[nodiscard]] SSMAX_INLINE static constexpr SequenceLengths padded(KeptIntegers queries,
                                                                     KeptIntegers keys) {
    return {Layout::padded, queries, keys};
  }
  /// Batch entry b has `lengths[b]` queries and as many keys.
  [[nodiscard]] SSMAX_INLINE static constexpr SequenceLengths padded(KeptIntegers lengths) {
    return padded(lengths, lengths);
  }
  /// Sequence b has queries [cumulative_queries[b], cumulative_queries[b + 1]) and keys
  /// [cumulative_keys[b], cumulative_keys[b + 1]). Both spans begin with 0 and end with the number of rows.
  [[nodiscard]] SSMAX_INLINE static constexpr SequenceLengths packed(KeptIntegers cumulative_queries,
                                                                     KeptIntegers cumulative_keys) {
    return {Layout::packed, cumulative_queries, cumulative_keys};
  }
  /// The same for sequences that have as many keys as queries.
  [[nodiscard]] SSMAX_INLINE static constexpr SequenceLengths packed(KeptIntegers cumulative) {
    return packed(cumulative, cumulative);
  }

  /// For calls over a source of keys, which has the lengths of keys: batch entry b has `queries[b]` queries.
  [[nodiscard]] SSMAX_INLINE static constexpr SequenceLengths padded_queries(KeptIntegers queries) {
    return {Layout::padded, queries, {}};
  }
  /// The same for packed queries: sequence b has queries [cumulative_queries[b], cumulative_queries[b + 1]).
  [[nodiscard]] SSMAX_INLINE static constexpr SequenceLengths packed_queries(
      KeptIntegers cumulative_queries) {
    return {Layout::packed, cumulative_queries, {}};
  }

  /// Returns true if lengths are given.
  SSMAX_INLINE constexpr bool is_given() const { return layout_ != Layout::none; }
  /// Returns true if the lengths are cumulative.
  SSMAX_INLINE constexpr bool is_packed() const { return layout_ == Layout::packed; }
  /// Returns the number of sequences.
  SSMAX_INLINE constexpr index_t count() const {
    return static_cast<index_t>(queries_.size()) - (is_packed() ? 1 : 0);
  }
  /// The span of queries that the lengths were made of.
  SSMAX_INLINE constexpr Integers queries() const { return queries_; }
  /// The span of keys that the lengths were made of. Empty for padded_queries and packed_queries.
  SSMAX_INLINE constexpr Integers keys() const { return keys_; }

  /// @cond
  /// Where the rows of a sequence lie in q, and in k and v.
  SSMAX_INLINE shared::SequenceRows query_rows(index_t sequence) const { return rows_of(queries_, sequence); }
  SSMAX_INLINE shared::SequenceRows key_rows(index_t sequence) const { return rows_of(keys_, sequence); }
  /// Returns lengths of the same layout in other memory.
  SSMAX_INLINE constexpr SequenceLengths in(Integers queries, Integers keys) const {
    return {layout_, queries, keys};
  }
  /// @endcond

 private:
  enum class Layout { none, padded, packed };

  SSMAX_INLINE constexpr SequenceLengths(Layout layout, Integers queries, Integers keys)
      : layout_(layout), queries_(queries), keys_(keys) {}

  SSMAX_INLINE shared::SequenceRows rows_of(Integers numbers, index_t sequence) const {
    const auto at = static_cast<std::size_t>(sequence);
    if (layout_ == Layout::padded) return {sequence, 0, numbers[at]};
    return {0, numbers[at], numbers[at + 1] - numbers[at]};
  }

  Layout layout_ = Layout::none;
  Integers queries_, keys_;
};

SSMAX_END
/// @}
