// What one call of attention has to do: its queries, where its keys come from, and what each query sees.
#pragma once

#include <span>

#include "../../../attention_state.hpp"
#include "../../../explain.hpp"
#include "../../../query.hpp"
#include "../../../rope.hpp"
#include "../../../sequence_lengths.hpp"
#include "../../../storage.hpp"
#include "../../../view.hpp"
#include "../keys/any_keys.hpp"
#include "rows.hpp"

SSMAX_BEGIN_SHARED

/// Keys are summed in blocks, blocks in chunks, chunks into the result. They are cut at the same places
/// whatever the queries, the threads and the way a sequence was cut into calls: that is what makes the bits
/// the same. 128 keys of logits for 48 queries are 24 KiB, which fit a first-level cache. 1024 keys of float
/// and width 64 are 0.5 MiB, 16 µs of reading: enough for a task, little enough to share among threads.
inline constexpr index_t key_block = 128, key_chunk = 1024;

/// The public function that was called, and where it explains the call.
struct Caller {
  const char* function = "";
  Explanation* explanation = nullptr;
  bool only_explains = false;  // a plan: the drivers return after they have explained the call
};

/// A is the type that the call computes in.
template <class A>
struct Problem {
  InputRows<A> q;
  AnyKeys<A> keys;
  StoredProducts<A> stored_products{};  // the forward pass only
  double scale = 1;
  RopeTables<A> rope{};
  bool rotate_keys = true;   // in this call; else whoever stored or sent the keys has rotated them
  bool from_source = false;  // a source of the caller's holds the keys
  index_t key_position = 0;
  bool float_products = false;  // of bfloat16 too
  /// Queries of the sequence before those of q, and after them: Query::index counts all of them.
  index_t first_query = 0, queries_after = 0;
  /// Heads of the call after those of q. Query::head counts all of them; kv heads are counted from q's first.
  index_t heads_after = 0;
  /// Of sequences with their own lengths: of_sequence (sequences.hpp) returns the problem of one of them.
  SequenceLengths lengths{};
  index_t sequence = -1;  // the batch entry that this problem is about, if it is only one
  Caller caller{};

  SSMAX_INLINE bool has_rope() const { return rope.cosine != nullptr; }
  /// Returns whether positions for the rope are the mask's. Exception: a source's rotated keys have their own order.
  SSMAX_INLINE bool mask_gives_place() const { return rotate_keys || !from_source; }
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
  /// The first head of q.
  SSMAX_INLINE index_t first_head() const { return q.first_head(); }
  /// Where a query lies in q, and in what has a row for each query.
  SSMAX_INLINE index_t row_of(const Query& query) const { return query.index - first_query; }
  SSMAX_INLINE index_t width() const { return q.extent(3); }
  SSMAX_INLINE index_t value_width() const { return keys.shape().value_width; }
  SSMAX_INLINE index_t kv_heads() const { return keys.shape().kv_heads; }
  /// Query heads of a kv head.
  SSMAX_INLINE index_t group() const { return q.extent(1) / std::max<index_t>(kv_heads(), 1); }
  /// Queries of a kv head.
  SSMAX_INLINE index_t rows() const { return q.extent(2) * group(); }
};

/// Where results go: normalized to out and lse, or as a state to be merged with others.
template <class A>
struct Result {
  OutputRows<A> out{};
  RowNumbers<A> lse{};
  std::span<const A> sinks{};  // of all heads of the call, as the state is
  bool scaled_sinks = false;   // sinks are logits, to be multiplied by c
  AttentionState<A> state{};   // if given, the rest is not
  bool continues = false;      // the state holds what keys before these gave
};

struct QueryRow {
  Query query{};
  KeyRange keys{};              // that it may see and that are stored
  double multiplier = 0;        // c
  index_t n = 0, position = 0;  // what the scaling was asked about
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// The queries of a kv head, one after the other, with its query heads as neighbours, so that rows of one
/// vector see nearly the same keys.
class QueryCursor {
 public:
  template <class A>
  QueryCursor(const Problem<A>& problem, index_t batch, index_t kv_head, index_t row)
      : first_head_(problem.first_head() + kv_head * problem.group()),
        last_head_(first_head_ + problem.group() - 1),
        head_(first_head_ + row % problem.group()),
        index_(problem.first_query + row / problem.group()),
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
  Query query_;  // without head and index: a copy of what was just written would stall on store forwarding
};

SSMAX_END
