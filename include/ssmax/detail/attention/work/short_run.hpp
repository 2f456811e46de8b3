// Runs a call on the short_keys path.
#pragma once

#include <algorithm>
#include <atomic>

#include "../forward/short.hpp"
#include "explain.hpp"
#include "phase.hpp"

SSMAX_BEGIN_DETAIL

/// A call on the short_keys path. A task is a run of at most 64 neighbouring tiles, which may belong to several kv
/// heads. The members are those of TaskRun (task_run.hpp).
template <class Compute>
class ShortRun {
 public:
  explicit ShortRun(const PathCall<Compute>& call)
      : call_(call),
        all_(call.phase.problem.kv_heads() * call.blocks(size_)),
        share_(std::clamp<index_t>(all_ / (8 * call.threads), 1, 64)) {
    Arena count;
    const Memory counted(count, call.phase.problem.width(), call.phase.problem.value_width());
    lane_bytes_ = count.used();
  }

  const PathCall<Compute>& call() const { return call_; }
  index_t pieces() const { return (all_ + share_ - 1) / share_; }
  std::size_t lane_bytes() const { return lane_bytes_; }
  std::size_t common_bytes() const { return call_.queue_bytes(); }

  void explain(Explanation& e) const {
    e.query_block = size_;
    e.key_block = key_block;
    e.tile_lanes = size_;
    e.tasks = pieces();
  }

  void bind(std::byte* common) { queue_ = call_.queue(common, size_); }

  void run(std::byte* scratch) {
    const Problem<Compute>& problem = call_.phase.problem;
    const index_t tasks = pieces(), kv_heads = problem.kv_heads();
    index_t i = next_++;
    if (i >= tasks) return;
    Arena arena(scratch);
    const Memory own(arena, problem.width(), problem.value_width());
    ShortTask<Compute> task(problem, call_.phase.variant, call_.phase.result, own);
    const auto attend = [&](const Sequence& sequence, index_t at) {
      const index_t tiles = call_.blocks_of(sequence, size_);
      task.attend(sequence, at / tiles % kv_heads, at % tiles, tiles);
    };
    Sequence entry{};
    const index_t tiles_of_entry = all_ / std::max<index_t>(problem.sequences(), 1);
    for (; i < tasks; i = next_++) {
      for (index_t tile = i * share_; tile < std::min(all_, (i + 1) * share_); ++tile) {
        if (call_.is_queued()) {
          const SequenceQueue::Place at = queue_[tile];
          attend(call_.together(at.sequence).front(), at.task);
          continue;
        }
        if (const index_t batch = tile / tiles_of_entry; batch != entry.batch)
          entry = sequence_of(problem, batch);
        attend(entry, tile % tiles_of_entry);
      }
    }
  }

  bool next_pass() { return false; }

 private:
  using Memory = ShortScratch<Compute>;

  const PathCall<Compute> call_;
  const index_t size_ = Memory::tile_size();
  index_t all_;    // tiles of all kv heads
  index_t share_;  // tiles of a task
  std::size_t lane_bytes_ = 0;
  SequenceQueue queue_;
  std::atomic<index_t> next_{0};
};

SSMAX_END
