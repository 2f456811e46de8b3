// Defines Problem and Result: everything that the drivers of the forward pass read about one call.
#pragma once

#include <cstdint>
#include <span>

#include "../../../attention_state.hpp"
#include "../../../explain.hpp"
#include "../../../query.hpp"
#include "../../../rope.hpp"
#include "../../../sequence_lengths.hpp"
#include "../../../storage.hpp"
#include "../../../view.hpp"
#include "keys.hpp"
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
  bool only_explains = false;  // a plan: the drivers return after they have explained the call
};

/// Keys at the start of sequences that lie in the same memory. The call computes them in a pass of its own, for the
/// queries of all these sequences together (work/shared_keys.hpp).
struct SharedKeys {
  const index_t* counts = nullptr;     // [entries]: the number of shared keys of a sequence. Null: no pass
  std::span<const index_t> members{};  // in the pass: the batch entries whose queries it computes
  const index_t* first_rows =
      nullptr;               // in the pass, if rows are packed: [entries], the first row of a sequence
  index_t sequences = 0;     // sequences with shared keys
  bool is_searched = false;  // whether the driver has searched for shared keys
};

/// One call of attention. A is the type that the call computes in.
template <class Compute>
struct Problem {
  InputRows<Compute> q;
  AnyKeys<Compute> keys;
  StoredProducts<Compute> stored_products{};  // used by the forward pass only
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
  /// The lengths of the sequences, if they have their own. of_sequence (sequences.hpp) returns the problem of one
  /// sequence.
  SequenceLengths lengths{};
  index_t sequence = -1;  // the only batch entry of this problem, or -1 for all
  SharedKeys shared{};
  Caller caller{};

  SSMAX_INLINE bool has_rope() const { return rotation != Rotation::none; }
  /// Returns whether the call rotates keys.
  SSMAX_INLINE bool rotates_keys() const { return rotation == Rotation::in_call; }
  SSMAX_INLINE QueryShape shape(index_t batch) const {
    return {q.extent(0), q.end_head() + heads_after, first_query + q.extent(2) + queries_after,
            keys.length(batch)};
  }
  /// Batch entries [first_entry, first_entry + entries) are computed.
  SSMAX_INLINE index_t first_entry() const { return std::max<index_t>(0, sequence); }
  SSMAX_INLINE index_t entries() const {
    if (sequence >= 0) return 1;
    return lengths.is_given() ? lengths.count() : q.extent(0);
  }
  /// Returns the first head of q.
  SSMAX_INLINE index_t first_head() const { return q.first_head(); }
  /// Returns the row of a query in every tensor with a row per query, and in q. Exception: q_row_of returns its row in
  /// q if q has packed rows of several sequences.
  SSMAX_INLINE index_t row_of(const Query& query) const { return query.index - first_query; }
  SSMAX_INLINE index_t q_row_of(const Query& query) const {
    return row_of(query) + (shared.first_rows == nullptr ? 0 : shared.first_rows[query.batch]);
  }
  SSMAX_INLINE index_t width() const { return q.extent(3); }
  SSMAX_INLINE index_t value_width() const { return keys.shape().value_width; }
  SSMAX_INLINE index_t kv_heads() const { return keys.shape().kv_heads; }
  /// Returns the number of query heads per kv head.
  SSMAX_INLINE index_t heads_per_kv_head() const { return q.extent(1) / std::max<index_t>(kv_heads(), 1); }
  /// Returns the number of rows of a batch entry: its queries of a kv head.
  SSMAX_INLINE index_t entry_rows() const { return q.extent(2) * heads_per_kv_head(); }
  /// Returns the number of rows: the queries of a kv head.
  SSMAX_INLINE index_t rows() const {
    return entry_rows() * std::max<index_t>(1, std::ssize(shared.members));
  }
  /// Returns whether a batch entry has a state in Result::start, if that is given.
  SSMAX_INLINE bool has_start(index_t batch) const {
    return shared.counts == nullptr || shared.counts[batch] > 0;
  }
  /// Returns the keys of a batch entry that are stored and that this pass computes.
  SSMAX_INLINE KeyRange stored(index_t batch) const {
    KeyRange range = keys.stored(batch);
    if (shared.counts == nullptr) return range;
    if (shared.members.empty()) {
      range.begin = std::max(range.begin, shared.counts[batch]);
    } else {
      range.end = std::min(range.end, shared.counts[batch]);
    }
    return range;
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

  SSMAX_INLINE bool continues() const { return start.shift.data_handle() != nullptr; }
};

struct QueryRow {
  Query query{};
  KeyRange keys{};              // keys that may be visible and are stored
  double multiplier = 0;        // c
  index_t n = 0, position = 0;  // arguments with which the scaling was called
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// Iterates over the queries of a kv head. The query heads of one position are neighbours, so that the rows of one
/// vector have nearly the same visible keys.
class QueryCursor {
 public:
  template <class Compute>
  QueryCursor(const Problem<Compute>& problem, index_t batch, index_t kv_head, index_t row)
      : first_head_(problem.first_head() + kv_head * problem.heads_per_kv_head()),
        last_head_(first_head_ + problem.heads_per_kv_head() - 1),
        head_(first_head_ + row % problem.heads_per_kv_head()),
        index_(problem.first_query + row / problem.heads_per_kv_head()),
        query_{.batch = batch, .shape = problem.shape(batch)} {}

  Query operator*() const {
    Query query = query_;
    query.head = head_;
    query.index = index_;
    return query;
  }
  void next() {
    if (head_++ == last_head_) {
      head_ = first_head_;
      ++index_;
    }
  }

 private:
  index_t first_head_, last_head_, head_, index_;
  Query query_;  // without head and index: copying a fresh write stalls on store forwarding
};

/// Iterates over the rows of a forward pass. In a pass of shared keys, the queries of one sequence follow those of
/// another.
template <class Compute>
class RowCursor {
 public:
  RowCursor(const Problem<Compute>& problem, index_t batch, index_t kv_head, index_t row)
      : problem_(problem),
        kv_head_(kv_head),
        cursor_(problem, batch, kv_head, row),
        stored_(problem.stored(batch)) {
    if (problem.shared.members.empty()) return;
    member_ = row / problem.entry_rows();
    enter(row % problem.entry_rows());
  }

  Query operator*() const { return *cursor_; }
  /// Returns the keys that the pass computes for the query.
  const KeyRange& stored() const { return stored_; }
  void next() {
    cursor_.next();
    if (--left_ == 0 && ++member_ < std::ssize(problem_.shared.members)) enter(0);
  }

 private:
  void enter(index_t row) {
    const index_t batch = problem_.shared.members[static_cast<std::size_t>(member_)];
    cursor_ = QueryCursor(problem_, batch, kv_head_, row);
    stored_ = problem_.stored(batch);
    left_ = problem_.entry_rows() - row;
  }

  const Problem<Compute>& problem_;
  index_t kv_head_, member_ = 0;
  index_t left_ = 0;  // rows up to the next sequence; 0 or below: no other sequence
  QueryCursor cursor_;
  KeyRange stored_;
};

SSMAX_END
