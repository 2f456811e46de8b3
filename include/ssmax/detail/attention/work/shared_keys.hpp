// Finds the sequences of a call whose first keys lie in the same memory, as sequences with common pages do. The first
// phase of the list computes these keys once for the queries of all these sequences and writes states. In the second
// phase each sequence continues from its state.
//
// Shared keys are whole key chunks. A query takes the same products and sums in the same order with and without the
// first phase, so results are bit-identical.
#pragma once

#include <algorithm>
#include <functional>
#include <tuple>

#include "../../memory/arena.hpp"
#include "../terms/problem.hpp"
#include "list.hpp"
#include "route.hpp"
#include "same_memory.hpp"

SSMAX_BEGIN_DETAIL

/// The largest number of rows of a sequence that takes part. More rows read keys once for all of them.
inline constexpr index_t most_sharing_rows = decode_rows;

/// Returns whether sequences of a call may have shared keys: whole key chunks.
template <class Compute>
bool may_share(const Problem<Compute>& problem, const Result<Compute>& result) {
  if (problem.keys.find_shared_keys() == nullptr || problem.sequences() < 2 || problem.rotates_keys() ||
      problem.dropout.p > 0 || problem.statistics != nullptr || result.state.shift.data_handle() != nullptr)
    return false;
  for (index_t b = 0; b < problem.sequences(); ++b) {
    if (problem.keys.length(b) >= key_chunk) return true;
  }
  return false;
}

/// A sequence that may share keys, with the memory of its first key.
struct SharingCandidate {
  const void* first_key;
  index_t queries, sequence;
};

/// The memory of SharedKeys. Without a block of memory, counts its bytes.
struct SharingMemory {
  SharingMemory(Arena& arena, index_t sequences)
      : candidates(arena.take<SharingCandidate>(sequences)), common(arena.take<index_t>(sequences)) {}

  SharingCandidate* candidates;
  index_t* common;  // [sequences]: keys that a sequence has in common with others
};

/// The groups of a call.
template <class Compute>
class SharedKeys {
 public:
  explicit SharedKeys(const SharingMemory& memory) : candidates_(memory.candidates), common_(memory.common) {}

  /// Writes the groups of the sequences of a list. Narrows the members of the groups to their shared keys, and the
  /// sequences of the call to their other keys. Routes the groups.
  void find(WorkList<Compute>& list, const Problem<Compute>& problem, const Result<Compute>& result,
            bool explains) {
    problem_ = &problem;
    list_ = &list;
    const std::span<Candidate> candidates = find_candidates();
    std::fill_n(common_, list.listed, index_t{0});
    for (std::size_t first = 0, end; first < candidates.size(); first = end) {
      end = first + 1;
      while (end < candidates.size() && have_same_start(candidates[first], candidates[end])) ++end;
      group(candidates.subspan(first, end - first));
    }
    for (index_t i = 0; i < list.group_count; ++i) {
      const SharingGroup& some = list.groups[i];
      const Route taken = route(problem, result, list.members[some.first], some.count, explains);
      list.members[some.first].path = taken.path;
      list.members[some.first].reason = taken.reason;
    }
    for (index_t i = 0; i < list.listed; ++i) {
      Sequence& sequence = list.sequences[i];
      sequence.stored.begin = std::max(sequence.stored.begin, common_[i]);
      sequence.has_start = common_[i] > 0;
    }
  }

 private:
  using Candidate = SharingCandidate;

  static bool have_same_start(const Candidate& a, const Candidate& b) {
    return a.first_key == b.first_key && a.queries == b.queries;
  }

  /// Lists the candidates, those with the same first key and number of queries one after another.
  std::span<Candidate> find_candidates() {
    index_t count = 0;
    for (index_t i = 0; i < list_->listed; ++i) {
      const Sequence& sequence = list_->sequences[i];
      const index_t rows = sequence.queries * problem_->heads_per_kv_head();
      if (rows > 0 && rows <= most_sharing_rows && sequence.shape.keys >= key_chunk &&
          sequence.stored.begin == 0)
        candidates_[count++] = {problem_->keys.run(sequence.batch, 0, 0).k, sequence.queries, i};
    }
    std::sort(candidates_, candidates_ + count, [](const Candidate& a, const Candidate& b) {
      if (a.first_key != b.first_key) return std::less<>()(a.first_key, b.first_key);
      return std::tie(a.queries, a.sequence) < std::tie(b.queries, b.sequence);
    });
    return {candidates_, static_cast<std::size_t>(count)};
  }

  /// Makes groups of the candidates with a key chunk in the same memory. Most candidates have it
  /// in common with the first one. The others are sorted by the memory of their first chunk.
  void group(std::span<Candidate> candidates) {
    if (candidates.size() < 2) return;
    const auto is_before = [](const Candidate& a, const Candidate& b) { return a.sequence < b.sequence; };
    const Candidate leader = candidates.front();
    const auto shares_with_leader = [&](const Candidate& other) {
      return other.sequence == leader.sequence || compare(leader, other, key_chunk).common == key_chunk;
    };
    const auto others = std::partition(candidates.begin(), candidates.end(), shares_with_leader);
    std::sort(candidates.begin(), others, is_before);
    add_group({candidates.begin(), others});
    std::sort(others, candidates.end(), [&](const Candidate& a, const Candidate& b) {
      const KeysCompared compared = compare(a, b, key_chunk);
      return compared.common == key_chunk ? is_before(a, b) : compared.is_less;
    });
    for (auto first = others, end = first; first != candidates.end(); first = end) {
      end = std::find_if(first + 1, candidates.end(), [&](const Candidate& other) {
        return compare(*first, other, key_chunk).common < key_chunk;
      });
      add_group({first, end});
    }
  }

  /// Adds a group with the keys that each candidate has in common with the first one, in whole key chunks.
  void add_group(std::span<const Candidate> candidates) {
    if (candidates.size() < 2) return;
    WorkList<Compute>& list = *list_;
    const index_t leader = candidates.front().sequence;
    SharingGroup& added = list.groups[list.group_count++] = {list.shared_sequences, 0};
    for (const Candidate& candidate : candidates) {
      const index_t i = candidate.sequence,
                    end = std::min(list.sequences[leader].shape.keys, list.sequences[i].shape.keys);
      if (i != leader) {
        common_[i] = compare(candidates.front(), candidate, end).common / key_chunk * key_chunk;
        common_[leader] = std::max(common_[leader], common_[i]);
      }
      list.members[added.first + added.count++] = list.sequences[i];
    }
    list.shared_sequences += added.count;
    list.shared_queries = std::max(list.shared_queries, candidates.front().queries);
    for (index_t m = added.first; m < added.first + added.count; ++m) {
      Sequence& member = list.members[m];
      member.stored.end = std::min(member.stored.end, common_[member.batch]);
    }
  }

  KeysCompared compare(const Candidate& a, const Candidate& b, index_t end) const {
    return compare_keys(problem_->keys, list_->sequences[a.sequence].batch,
                        list_->sequences[b.sequence].batch, end);
  }

  const Problem<Compute>* problem_ = nullptr;
  WorkList<Compute>* list_ = nullptr;
  Candidate* candidates_;
  index_t* common_;
};

/// Takes memory of states after the shared keys, [sequences, heads, queries].
template <class Compute>
AttentionState<Compute> take_states(Arena& arena, const Problem<Compute>& problem, index_t queries) {
  const index_t batch = problem.sequences(), heads = problem.q.end_head() + problem.heads_after,
                rows = batch * heads * queries, dv = problem.value_width();
  return {.shift = {arena.take<Compute>(rows), {batch, heads, queries}},
          .sum = {arena.take<Compute>(rows), {batch, heads, queries}},
          .o = {arena.take<Compute>(rows * dv), {batch, heads, queries, dv}}};
}

SSMAX_END

SSMAX_BEGIN_COMPILED

template <class Compute>
void find_shared_keys(shared::WorkList<Compute>& list, const shared::Problem<Compute>& problem,
                      const shared::Result<Compute>& result, bool explains, std::byte* memory) {
  detail::Arena arena(memory);
  const detail::SharingMemory taken(arena, list.listed);
  detail::SharedKeys<Compute>(taken).find(list, problem, result, explains);
}

SSMAX_END
