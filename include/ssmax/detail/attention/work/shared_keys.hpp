// Finds the sequences of a call whose first keys lie in the same memory, as sequences with common pages do. The driver
// (schedule.hpp) computes these keys once for the queries of all these sequences: the first pass writes states, and
// each sequence continues from its state.
//
// Shared keys are whole key chunks. A query takes the same products and sums in the same order with and without the
// first pass, so results are bit-identical.
#pragma once

#include <algorithm>

#include "../../memory/arena.hpp"
#include "../terms/sequences.hpp"
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
  SharedKeyGroups(Arena& arena, const Problem<Compute>& problem)
      : problem_(&problem),
        entries_(problem.entries()),
        counts_(arena.take<index_t>(entries_)),
        firsts_(arena.take<const void*>(entries_)),
        leaders_(arena.take<index_t>(entries_)),
        members_(arena.take<index_t>(entries_)),
        groups_(arena.take<SharingGroup>(entries_)) {
    if (counts_ != nullptr) find();
  }

  /// Returns whether sequences of a call may have shared keys.
  static bool may_share(const Problem<Compute>& problem, const Result<Compute>& result) {
    return problem.keys.shares_keys() && !problem.shared.is_searched && problem.entries() > 1 &&
           !problem.rotates_keys() && result.state.shift.data_handle() == nullptr;
  }

  bool is_empty() const { return group_count_ == 0; }
  index_t size() const { return group_count_; }
  /// Returns the largest number of queries of a sequence in a group.
  index_t most_queries() const { return most_queries_; }

  /// Returns the problem of the shared keys of a group.
  Problem<Compute> of_group(index_t i) const {
    const SharingGroup& group = groups_[i];
    const index_t leader = members_[group.first];
    Problem<Compute> result = *problem_;
    result.q.keep_rows_of_each(problem_->lengths, queries(leader));
    result.lengths = {};
    result.sequence = leader;
    const SequenceLengths& lengths = problem_->lengths;
    result.shared = {.counts = counts_,
                     .members = {members_ + group.first, static_cast<std::size_t>(group.count)},
                     .first_rows = lengths.is_packed() ? lengths.queries().data() : nullptr,
                     .sequences = sequences_,
                     .is_searched = true};
    return result;
  }
  /// Returns the problem of all other keys.
  Problem<Compute> of_other_keys() const {
    Problem<Compute> result = *problem_;
    result.shared = {.counts = counts_, .sequences = sequences_, .is_searched = true};
    return result;
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
        if (leaders_[b] == leader) members_[listed++] = b;
      }
      groups_[group_count_++] = {first, listed - first};
      most_queries_ = std::max(most_queries_, queries(leader));
    }
    sequences_ = listed;
  }

  index_t queries(index_t b) const {
    return problem_->lengths.is_given() ? problem_->lengths.query_rows(b).count : problem_->q.extent(2);
  }

  bool takes_part(index_t b) const {
    const index_t rows = queries(b) * problem_->heads_per_kv_head();
    return rows > 0 && rows <= most_sharing_rows && problem_->keys.length(b) >= key_chunk &&
           problem_->keys.stored(b).begin == 0;
  }

  /// Returns the number of first keys of two sequences that lie in the same memory, in whole key chunks.
  index_t common_keys(index_t a, index_t b) const {
    const AnyKeys<Compute>& keys = problem_->keys;
    const index_t end = std::min(keys.length(a), keys.length(b)) / key_chunk * key_chunk;
    index_t key = 0;
    while (key < end) {
      const AnyKeyRun run = keys.run(a, 0, key), other = keys.run(b, 0, key);
      if (run.k != other.k || run.v != other.v) break;
      key += std::min(run.count, other.count);
    }
    return std::min(key, end) / key_chunk * key_chunk;
  }

  const Problem<Compute>* problem_;
  index_t entries_;
  index_t* counts_;      // [entries]: shared keys of a sequence
  const void** firsts_;  // [entries]: the first key
  index_t* leaders_;     // [entries]: the first sequence of the group, or -1
  index_t* members_;     // [entries]: the sequences of all groups
  SharingGroup* groups_;
  index_t group_count_ = 0, sequences_ = 0, most_queries_ = 0;
};

/// Takes memory of states after the shared keys, [entries, heads, queries].
template <class Compute>
AttentionState<Compute> take_states(Arena& arena, const Problem<Compute>& problem, index_t queries) {
  const index_t batch = problem.entries(), heads = problem.q.end_head() + problem.heads_after,
                rows = batch * heads * queries, dv = problem.value_width();
  return {.shift = {arena.take<Compute>(rows), {batch, heads, queries}},
          .sum = {arena.take<Compute>(rows), {batch, heads, queries}},
          .o = {arena.take<Compute>(rows * dv), {batch, heads, queries, dv}}};
}

SSMAX_END
