// Defines Problem and Result: everything that the drivers of the forward pass read about one call. Defines its
// sequences, and the cursors over its rows.
#pragma once

#include <cstdint>
#include <span>

#include "../../../attention_state.hpp"
#include "../../../explain.hpp"
#include "../../../query.hpp"
#include "../../../sequence_lengths.hpp"
#include "../../../storage.hpp"
#include "../../../view.hpp"
#include "../../rope/tables.hpp"
#include "dropout.hpp"
#include "keys.hpp"
#include "statistics.hpp"
#include "tensors.hpp"

SSMAX_BEGIN_SHARED

/// The sizes of the units in which keys are summed: keys in blocks, blocks in chunks, chunks into the result.
/// Boundaries are multiples of these sizes, for any queries, threads and split of a sequence into calls. Equal
/// boundaries are necessary for bit-identical results.
///
/// | unit | keys | memory | reason |
/// |---|---|---|---|
/// | block | 128 | 24 KiB of logits for 48 queries | fits a first-level cache |
/// | chunk | 1024 | 0.5 MiB of floats at width 64, read in 16 µs | enough for a task, small enough to share threads |
inline constexpr index_t key_block = 128, key_chunk = 1024;

/// The largest number of rows (queries of a kv head) of the decode path. 17 rows fill a vector of queries. From 17
/// rows on, the FMAs of the products cost more than copying K and V into tiles.
inline constexpr index_t decode_rows = 16;

/// How keys are rotated, and to which positions a query is rotated: the mask's or, for `stored`, its own.
enum class Rotation : std::uint8_t {
  none,           // no rope
  in_call,        // the call rotates keys to the mask's positions
  stored,         // a source stored keys rotated to their places in the sequence
  stored_by_mask  // keys were rotated to the mask's positions when they were stored or sent
};

/// The public function that was called, and the place of its explanation.
struct Caller {
  const char* function = "";
  Explanation* explanation = nullptr;
};

/// One call of attention.
template <class Compute>
struct Problem {
  InputRows<Compute> q{};
  AnyKeys<Compute> keys{};
  double scale = 1;
  RopeTables<Compute> rope{};
  Rotation rotation = Rotation::none;
  bool in_cache = false;  // whether a source of the caller, or a message, holds the keys
  index_t key_position = 0;
  bool float_products = false;    // use float products even for bfloat16
  bool rounded_rotation = false;  // bf16 path: a rotated row has one part
  bool batch_invariant = false;   // results are bit-identical for any number of rows
  /// The number of queries of the sequence before the queries of q, and after them. Query::index counts all queries.
  index_t first_query = 0, queries_after = 0;
  /// The number of heads of the call after the heads of q. Query::head counts all heads. kv heads are counted from
  /// the first one of q.
  index_t heads_after = 0;
  SequenceLengths lengths{};  // of the sequences, if they have their own
  DropoutOption<Compute> dropout{};
  const StatisticsFunctions<Compute>* statistics = nullptr;  // if the result has statistics
  Caller caller{};

  SSMAX_INLINE bool has_rope() const { return rotation != Rotation::none; }
  SSMAX_INLINE bool rotates_keys() const { return rotation == Rotation::in_call; }
  SSMAX_INLINE index_t sequences() const { return lengths.is_given() ? lengths.count() : q.extent(0); }
  SSMAX_INLINE index_t first_head() const { return q.first_head(); }
  /// Returns the row of a query in a state.
  SSMAX_INLINE index_t state_row(const Query& query) const { return query.index - first_query; }
  SSMAX_INLINE index_t width() const { return q.extent(3); }
  SSMAX_INLINE index_t value_width() const { return keys.shape().value_width; }
  SSMAX_INLINE index_t kv_heads() const { return keys.shape().kv_heads; }
  SSMAX_INLINE index_t heads_per_kv_head() const {
    const index_t heads = q.extent(1), of_keys = kv_heads();
    return heads == of_keys && heads > 0 ? 1 : heads / std::max<index_t>(of_keys, 1);
  }
};

/// The outputs of a call: normalized out and lse, or a state to be merged with other states.
template <class Compute>
struct Result {
  OutputRows<Compute> out{};
  RowNumbers<Compute> lse{};
  std::span<const Compute> sinks{};  // of all heads of the call, as is the state
  bool scaled_sinks = false;         // whether sinks are logits, to be multiplied by c
  AttentionState<Compute> state{};   // if given, the members above are not
  AttentionState<Compute> start{};   // if given, the state after earlier keys
  RowStatistics<Compute> statistics{};

  SSMAX_INLINE bool continues() const { return start.shift.data_handle() != nullptr; }
};

/// One sequence of a call: a batch entry, or one of several sequences in packed rows.
struct Sequence {
  index_t batch = -1;                // its batch entry in Query, in keys and in states
  index_t entry = 0, first_row = 0;  // its rows in q, out and lse: [entry, head, first_row + i]
  index_t row_shift = 0;             // the row of a query is its index + row_shift
  index_t queries = 0;               // rows per head
  QueryShape shape{};                // the extents that mask, scaling and score see
  KeyRange stored{};                 // the keys that the call computes
  bool has_start = true;             // whether Result::start, if given, has a state for it
  Path path = Path::none;
  const char* reason = "";  // why no faster path takes the sequence
};

struct QueryRow {
  Query query{};
  KeyRange keys{};        // keys that may be visible and are stored
  double multiplier = 0;  // c
  index_t n = 0;          // with which the scaling was called
  const Sequence* sequence = nullptr;

  /// The query lies at [entry(), query.head, row()] in q, out and lse.
  SSMAX_INLINE index_t entry() const { return sequence->entry; }
  SSMAX_INLINE index_t row() const { return query.index + sequence->row_shift; }
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// Returns n / unit, rounded up.
SSMAX_INLINE constexpr index_t ceil_div(index_t n, index_t unit) { return (n + unit - 1) / unit; }
/// Returns the smallest multiple of `unit` that is at least n.
SSMAX_INLINE constexpr index_t round_up(index_t n, index_t unit) { return ceil_div(n, unit) * unit; }

/// Returns a sequence of a call, without its path.
template <class Compute>
Sequence sequence_of(const Problem<Compute>& problem, index_t batch) {
  const InputRows<Compute>& q = problem.q;
  const SequenceRows rows =
      problem.lengths.is_given() ? problem.lengths.query_rows(batch) : SequenceRows{batch, 0, q.extent(2)};
  return {.batch = batch,
          .entry = rows.entry,
          .first_row = rows.first,
          .row_shift = rows.first - problem.first_query,
          .queries = rows.count,
          .shape = {problem.sequences(), q.end_head() + problem.heads_after,
                    problem.first_query + rows.count + problem.queries_after, problem.keys.length(batch)},
          .stored = problem.keys.stored(batch)};
}

/// Returns the extents of a call whose sequences all have the length of the longest one.
template <class Compute>
QueryShape longest_shape(const Problem<Compute>& problem) {
  QueryShape longest{problem.sequences(), problem.q.end_head() + problem.heads_after, 0, 0};
  for (index_t b = 0; b < longest.batch; ++b) {
    const QueryShape shape = sequence_of(problem, b).shape;
    longest.queries = std::max(longest.queries, shape.queries);
    longest.keys = std::max(longest.keys, shape.keys);
  }
  return longest;
}

/// Iterates over the queries of a kv head of a sequence. The query heads of one position are neighbours, so that the
/// rows of one vector have nearly the same visible keys.
class QueryCursor {
 public:
  template <class Compute>
  QueryCursor(const Problem<Compute>& problem, const Sequence& sequence, index_t kv_head, index_t row)
      : first_head_(problem.first_head() + kv_head * problem.heads_per_kv_head()),
        last_head_(first_head_ + problem.heads_per_kv_head() - 1),
        sequence_(&sequence) {
    const index_t heads = problem.heads_per_kv_head();
    const index_t index = row < heads ? 0 : row / heads;  // a division takes longer than the branch
    head_ = first_head_ + row - index * heads;
    index_ = problem.first_query + index;
  }

  /// Reads the sequence: copying a fresh write stalls on store forwarding.
  Query operator*() const {
    return {.batch = sequence_->batch, .head = head_, .index = index_, .shape = sequence_->shape};
  }
  /// Returns where the query lies in q, out and lse.
  index_t entry() const { return sequence_->entry; }
  index_t head() const { return head_; }
  index_t row() const { return index_ + sequence_->row_shift; }
  const Sequence* sequence() const { return sequence_; }
  void next() {
    if (head_++ == last_head_) {
      head_ = first_head_;
      ++index_;
    }
  }

 private:
  index_t first_head_, last_head_, head_ = 0, index_ = 0;
  const Sequence* sequence_;
};

/// Iterates over the rows of a task: the queries of one sequence or, if a task computes several sequences, those of
/// one after another.
template <class Compute>
class RowCursor {
 public:
  RowCursor(const Problem<Compute>& problem, std::span<const Sequence> sequences, index_t kv_head,
            index_t row)
      : problem_(problem),
        kv_head_(kv_head),
        sequence_(&sequences.front()),
        last_(&sequences.back()),
        cursor_(problem, sequences.front(), kv_head, row) {
    if (sequence_ == last_) return;
    const index_t rows = problem.heads_per_kv_head() * sequence_->queries;
    sequence_ += row / rows;
    enter(row % rows);
  }

  /// Returns the row of the query: what it sees, and where it lies.
  template <class V>
  QueryRow row(const V& variant) const {
    QueryRow result = variant.row(*cursor_, sequence_->stored);
    result.sequence = sequence_;
    return result;
  }
  /// Returns the row of the query if it sees what `other` sees.
  QueryRow row_like(const QueryRow& other) const {
    QueryRow result = other;
    result.query = *cursor_;
    result.sequence = sequence_;
    return result;
  }
  void next() {
    cursor_.next();
    if (--left_ != 0 || sequence_ == last_) return;
    ++sequence_;
    enter(0);
  }

 private:
  void enter(index_t row) {
    cursor_ = QueryCursor(problem_, *sequence_, kv_head_, row);
    left_ = problem_.heads_per_kv_head() * sequence_->queries - row;
  }

  const Problem<Compute>& problem_;
  index_t kv_head_;
  index_t left_ = 0;  // rows up to the next sequence; 0 or below: there is no other sequence
  const Sequence *sequence_, *last_;
  QueryCursor cursor_;
};

SSMAX_END
