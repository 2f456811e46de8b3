// Finds the sequences of a call whose first keys lie in the same memory, as sequences with common pages do. The driver
// (sequence_run.hpp) computes these keys once for the queries of all these sequences: a phase per group writes states,
// and in the last phase each sequence continues from its state.
//
// Shared keys are whole key chunks. A query takes the same products and sums in the same order with and without the
// first phase, so results are bit-identical.
#pragma once

#include <algorithm>

#include "../../memory/arena.hpp"
#include "../terms/problem.hpp"
#include "route.hpp"

SSMAX_BEGIN_DETAIL

/// The largest number of rows of a sequence that takes part. More rows read keys once for all of them.
inline constexpr index_t most_sharing_rows = decode_rows;

/// Sequences whose first keys lie in the same memory. All have the same number of queries.
struct SharingGroup {
  index_t first = 0, count = 0;  // its sequences are members[first, first + count)
};

/// The groups of a call.
template <class Compute>
class SharedKeyGroups {
 public:
  /// Takes memory and finds the groups. Without a block of memory, counts its bytes.
  SharedKeyGroups(Arena& arena, const Problem<Compute>& problem, std::span<const Sequence> sequences)
      : problem_(&problem),
        all_(sequences),
        entries_(problem.sequences()),
        counts_(arena.take<index_t>(entries_)),
        firsts_(arena.take<const void*>(entries_)),
        leaders_(arena.take<index_t>(entries_)),
        members_(arena.take<Sequence>(entries_)),
        groups_(arena.take<SharingGroup>(entries_)) {
    if (counts_ != nullptr) find();
  }

  /// Returns whether sequences of a call may have shared keys.
  static bool may_share(const Problem<Compute>& problem, const Result<Compute>& result) {
    return problem.keys.shares_keys() && problem.sequences() > 1 && !problem.rotates_keys() &&
           result.state.shift.data_handle() == nullptr;
  }

  bool is_empty() const { return group_count_ == 0; }
  index_t size() const { return group_count_; }
  /// Returns the number of sequences with shared keys.
  index_t shared_sequences() const { return shared_sequences_; }
  /// Returns the largest number of queries of a sequence in a group.
  index_t most_queries() const { return most_queries_; }
  /// Returns the sequences of a group.
  std::span<const Sequence> sequences(index_t i) const {
    return {members_ + groups_[i].first, static_cast<std::size_t>(groups_[i].count)};
  }

  /// Narrows the sequences of the groups to their shared keys, and the sequences of the call to their other keys.
  /// Routes the groups.
  void narrow(std::span<Sequence> sequences, const Result<Compute>& result, bool explains) {
    for (index_t i = 0; i < group_count_; ++i) {
      const SharingGroup& group = groups_[i];
      const Route route = detail::route(*problem_, result, members_[group.first], group.count, explains);
      for (index_t m = group.first; m < group.first + group.count; ++m) {
        Sequence& member = members_[m];
        member.stored.end = std::min(member.stored.end, counts_[member.batch]);
        member.path = route.path;
        member.reason = route.reason;
      }
    }
    for (Sequence& sequence : sequences) {
      const index_t count = counts_[sequence.batch];
      sequence.stored.begin = std::max(sequence.stored.begin, count);
      sequence.has_start = count > 0;
    }
  }

 private:
  /// Compares each sequence with the first sequence of each group, page by page.
  void find() {
    std::fill_n(counts_, entries_, index_t{0});
    for (index_t b = 0; b < entries_; ++b) {
      leaders_[b] = -1;
      if (!takes_part(b)) continue;
      firsts_[b] = problem_->keys.run(b, 0, 0).k;
      leaders_[b] = b;
      for (index_t other = 0; other < b; ++other) {
        if (leaders_[other] != other || firsts_[other] != firsts_[b] || queries(other) != queries(b))
          continue;
        const index_t count = common_keys(other, b);
        if (count == 0) continue;
        leaders_[b] = other;
        counts_[b] = count;
        counts_[other] = std::max(counts_[other], count);
        break;
      }
    }
    index_t listed = 0;
    for (index_t leader = 0; leader < entries_; ++leader) {
      if (counts_[leader] == 0 || leaders_[leader] != leader) continue;
      const index_t first = listed;
      for (index_t b = leader; b < entries_; ++b) {
        if (leaders_[b] == leader) members_[listed++] = sequence(b);
      }
      groups_[group_count_++] = {first, listed - first};
      most_queries_ = std::max(most_queries_, queries(leader));
    }
    shared_sequences_ = listed;
  }

  const Sequence& sequence(index_t b) const { return all_[static_cast<std::size_t>(b)]; }
  index_t queries(index_t b) const { return sequence(b).queries; }

  bool takes_part(index_t b) const {
    const index_t rows = queries(b) * problem_->heads_per_kv_head();
    return rows > 0 && rows <= most_sharing_rows && sequence(b).shape.keys >= key_chunk &&
           sequence(b).stored.begin == 0;
  }

  /// Returns the number of first keys of two sequences that lie in the same memory, in whole key chunks.
  index_t common_keys(index_t a, index_t b) const {
    const AnyKeys<Compute>& keys = problem_->keys;
    const index_t end = std::min(sequence(a).shape.keys, sequence(b).shape.keys) / key_chunk * key_chunk;
    index_t key = 0;
    while (key < end) {
      const AnyKeyRun run = keys.run(a, 0, key), other = keys.run(b, 0, key);
      if (run.k != other.k || run.v != other.v) break;
      key += std::min(run.count, other.count);
    }
    return std::min(key, end) / key_chunk * key_chunk;
  }

  const Problem<Compute>* problem_;
  std::span<const Sequence> all_;
  index_t entries_;
  index_t* counts_;      // [entries]: shared keys of a sequence
  const void** firsts_;  // [entries]: the first key
  index_t* leaders_;     // [entries]: the first sequence of the group, or -1
  Sequence* members_;    // [entries]: the sequences of all groups
  SharingGroup* groups_;
  index_t group_count_ = 0, shared_sequences_ = 0, most_queries_ = 0;
};

/// Takes memory of states after the shared keys, [entries, heads, queries].
template <class Compute>
AttentionState<Compute> take_states(Arena& arena, const Problem<Compute>& problem, index_t queries) {
  const index_t batch = problem.sequences(), heads = problem.q.end_head() + problem.heads_after,
                rows = batch * heads * queries, dv = problem.value_width();
  return {.shift = {arena.take<Compute>(rows), {batch, heads, queries}},
          .sum = {arena.take<Compute>(rows), {batch, heads, queries}},
          .o = {arena.take<Compute>(rows * dv), {batch, heads, queries, dv}}};
}

SSMAX_END
