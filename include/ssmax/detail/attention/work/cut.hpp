// Splits the works of a path into tasks: kv heads × query blocks and, if threads would idle, × key chunks.
//
// Each chunk's sums are computed separately and added in the order of the keys. So results are bit-identical for
// every split and every executor.
//
// Few queries read each key once. If the keys of several kv heads lie near each other, a lane computes a group of kv
// heads chunk by chunk, in the order of memory. It prepares the task of a kv head again for each chunk. If a key of one
// kv head lies next to that of another, a task of the decode path has up to 16 rows of several kv heads.
#pragma once

#include <algorithm>
#include <limits>

#include "../terms/variant.hpp"
#include "list.hpp"

SSMAX_BEGIN_DETAIL

/// The limit on the memory of states that wait for a merge. Above this limit, keys are not split.
inline constexpr index_t max_waiting_bytes = index_t{32} << 20;

/// The largest number of kv heads that a lane computes together.
inline constexpr index_t max_heads_together = 16;

/// Returns the largest divisor of `kv_heads` that is at most max_heads_together and `limit`. Returns at least 1.
inline index_t divisor_up_to(index_t kv_heads, double limit) {
  index_t heads = std::min(kv_heads, max_heads_together);
  while (heads > 1 && (kv_heads % heads != 0 || static_cast<double>(heads) > limit)) --heads;
  return std::max<index_t>(heads, 1);
}

/// The smallest number of keys of the longest sequence whose kv heads are rows of one task, if the keys are one chunk.
inline constexpr index_t min_keys_of_heads = 256;

/// The stored keys of the works of a path.
struct KeysOfPath {
  KeyRange chunks{std::numeric_limits<index_t>::max(), 0};  // chunks with stored keys of any sequence
  double all = 0, most = 0;                                 // keys of all sequences, of the longest
  Sequence first{};                                         // the first one with keys
};

/// Splits the works of a path. The tasks of other paths do not count: their costs differ too much.
template <class Compute>
class PathCut {
 public:
  PathCut(const WorkList<Compute>& list, const Problem<Compute>& problem, const Variant<Compute>& variant,
          const PhaseWorks& phase, index_t threads)
      : list_(list), problem_(problem), variant_(variant), phase_(phase), threads_(threads) {}

  /// Sets the members of `path` from `queries` on, and the blocks of its works.
  void cut(PathWorks<Compute>& path, std::span<Works> works) const {
    const QueryBlocks blocks = path.driver->blocks(path.rows);
    const KeysOfPath keys = find_keys(works);
    path.probe = {keys.first.batch, keys.first.stored.begin};
    const index_t chunks = std::max<index_t>(keys.chunks.size(), 0);
    const auto count = [&] {
      path.tasks = 0;
      for (Works& some : works) {
        some.blocks = ceil_div(some.rows, path.queries);
        path.tasks += tasks_of(some);
      }
    };
    path.queries = std::min(blocks.most, round_up(path.rows, blocks.unit));
    count();
    // Under a causal mask the last query blocks cost the most. Four tasks per thread balance the load.
    while (threads_ > 1 && path.tasks < 4 * threads_ && path.queries > blocks.unit) {
      path.queries = (path.queries / blocks.unit + 1) / 2 * blocks.unit;
      count();
    }
    path.first_chunk = keys.chunks.begin;
    path.sizes = path.driver->sizes(problem_, path.queries);
    path.split = {1, path.driver->keeps_order ? std::clamp<index_t>(path.tasks / (8 * threads_), 1, 64) : 1,
                  1};
    path.together = path.split;
    path.heads = 1;
    path.lane_bytes = path.sizes.lane_bytes;
    path.waiting_bytes = 0;
    const bool may_group =
        blocks.are_few && (chunks > 1 || keys.most >= min_keys_of_heads) && may_group_heads(keys.first);
    const bool takes_several = blocks.takes_heads && may_group && takes_several_heads(problem_);
    const index_t most_heads = takes_several ? blocks.most / std::min(path.rows, blocks.most) : 1;
    if (chunks < 2) {
      // With fewer keys, the tasks of kv heads prefetch those of the next one.
      if (most_heads > 1)
        path.heads = divisor_up_to(problem_.kv_heads(),
                                   std::min(static_cast<double>(most_heads), heads_per_lane(keys)));
      return;
    }
    const bool idle = path.tasks < 2 * threads_;
    // Groups of kv heads are split if they are few and long: the merge takes another run of the executor.
    const bool splits_groups =
        blocks.are_few && chunks >= 4 && path.tasks < 4 * threads_ * problem_.kv_heads();
    index_t most_chunks = 1;
    if (threads_ > 1 && (idle || splits_groups)) {
      const index_t bytes =
          path.queries * (problem_.value_width() + 8) * static_cast<index_t>(sizeof(Compute));
      if (chunks <= max_waiting_bytes / bytes / path.tasks) most_chunks = chunks;
      if (idle) path.split.chunks = most_chunks;
    }
    path.together = path.split;
    if (may_group) {
      path.together = group_heads(path, keys, chunks, most_chunks);
      path.heads = divisor_up_to(path.together.at_once, static_cast<double>(most_heads));
    }
    Arena lane, waiting;
    lane.take<std::byte>(static_cast<index_t>(path.sizes.lane_bytes));
    lane.take<Compute>((path.together.at_once - 1) * path.sizes.states);
    path.lane_bytes = lane.used();
    if (path.waits())
      waiting.take<Compute>(path.tasks * std::max(path.split.chunks, path.together.chunks) *
                            path.sizes.states);
    path.waiting_bytes = waiting.used();
  }

  bool are_together() const { return phase_.are_together; }
  /// Returns the number of tasks of works.
  index_t tasks_of(const Works& works) const {
    return (phase_.are_together ? 1 : works.count) * works.blocks * problem_.kv_heads();
  }

 private:
  KeysOfPath find_keys(std::span<const Works> works) const {
    KeysOfPath keys;
    for (const Works& some : works) {
      for_each_sequence(list_, problem_, phase_, some, [&](const Sequence& sequence) {
        const KeyRange stored = sequence.stored;
        if (stored.size() <= 0) return;
        keys.chunks = {std::min(keys.chunks.begin, stored.begin / key_chunk),
                       std::max(keys.chunks.end, (stored.end - 1) / key_chunk + 1)};
        if (keys.all == 0) keys.first = sequence;
        keys.all += static_cast<double>(stored.size());
        keys.most = std::max(keys.most, static_cast<double>(stored.size()));
      });
    }
    return keys;
  }

  /// Returns whether kv heads may be computed together. A task of a group is prepared again for each chunk. So kv heads
  /// are not grouped if the mask has runs or a predicate, or if the first query sees less than half of its keys.
  bool may_group_heads(const Sequence& sequence) const {
    if (variant_.has_runs || variant_.has_predicate) return false;
    const KeyRange stored = sequence.stored;
    return 2 * variant_.row(*QueryCursor(problem_, sequence, 0, 0), stored).keys.size() >= stored.size();
  }

  /// Chooses the kv heads that a lane computes together, and whether their key chunks are separate pieces, for keys
  /// whose kv heads lie near each other. Measured: docs/measured.md.
  Split group_heads(const PathWorks<Compute>& path, const KeysOfPath& keys, index_t chunks,
                    index_t most_chunks) const {
    Split split = path.split;
    // A thread takes four groups or more.
    const index_t kv_heads = problem_.kv_heads();
    const auto parts = static_cast<double>(4 * threads_);
    if (threads_ == 1) {
      split.at_once = divisor_up_to(kv_heads, max_heads_together);
    } else if (most_chunks > 1) {
      split.at_once =
          divisor_up_to(kv_heads, static_cast<double>(path.tasks) * static_cast<double>(chunks) / parts);
      if (split.at_once > 1) split.chunks = most_chunks;
    } else {
      split.at_once = divisor_up_to(kv_heads, heads_per_lane(keys));
    }
    return split;
  }

  /// Returns how many kv heads a lane may compute together, so that a thread takes four groups or more.
  double heads_per_lane(const KeysOfPath& keys) const {
    if (threads_ == 1) return static_cast<double>(max_heads_together);
    return static_cast<double>(problem_.kv_heads()) * keys.all /
           (keys.most * static_cast<double>(4 * threads_));
  }

  const WorkList<Compute>& list_;
  const Problem<Compute>& problem_;
  const Variant<Compute>& variant_;
  const PhaseWorks& phase_;
  const index_t threads_;
};

SSMAX_END
