// Runs a call on the short_keys path.
#pragma once

#include <algorithm>
#include <atomic>

#include "../../memory/slot.hpp"
#include "../forward/short.hpp"
#include "explain.hpp"
#include "path_sequences.hpp"

SSMAX_BEGIN_DETAIL

/// A call on the short_keys path. A task is a run of at most 64 neighbouring tiles, which may belong to several kv
/// heads. The members are those of TaskRun (task_run.hpp).
template <class Compute>
class ShortRun {
 public:
  explicit ShortRun(const PathCall<Compute>& call)
      : call_(call),
        tiles_((call.problem.rows() + size_ - 1) / size_),
        all_(call.problem.kv_heads() *
             (call.sequences ? call.sequences.blocks(size_) : call.problem.entries() * tiles_)),
        share_(std::clamp<index_t>(all_ / (8 * call.threads), 1, 64)) {
    Arena count;
    const Memory counted(count, call.problem.width(), call.problem.value_width());
    lane_bytes_ = count.used();
  }

  const PathCall<Compute>& call() const { return call_; }
  index_t pieces() const { return (all_ + share_ - 1) / share_; }
  std::size_t lane_bytes() const { return lane_bytes_; }
  std::size_t common_bytes() const { return call_.sequences.queue_bytes(); }

  void explain(Explanation& e) const {
    e.query_block = size_;
    e.key_block = key_block;
    e.tile_lanes = size_;
    e.tasks = pieces();
  }

  void bind(std::byte* common) { queue_ = call_.sequences.queue(common, size_, call_.problem.kv_heads()); }

  void run(std::byte* scratch) {
    const Problem<Compute>& problem = call_.problem;
    const index_t tasks = pieces();
    index_t i = next_++;
    if (i >= tasks) return;
    Arena arena(scratch);
    const Memory own(arena, problem.width(), problem.value_width());
    Slot<SequenceCall<Compute>> sequence;
    Slot<ShortTask<Compute>> task;
    if (!call_.sequences) task.emplace(problem, call_.variant, call_.result, own);
    for (; i < tasks; i = next_++) {
      for (index_t g = i * share_; g < std::min(all_, (i + 1) * share_); ++g) {
        if (!call_.sequences) {
          task->attend(problem.first_entry() * problem.kv_heads() + g / tiles_, g % tiles_, tiles_);
          continue;
        }
        const SequenceQueue::Place at = queue_[g];
        if (!sequence || sequence->problem.sequence != at.sequence) {
          sequence.emplace(problem, call_.result, at.sequence);
          task.emplace(sequence->problem, call_.variant, sequence->result, own);
        }
        const index_t own_tiles = (sequence->problem.rows() + size_ - 1) / size_;
        task->attend(at.sequence * problem.kv_heads() + at.task / own_tiles, at.task % own_tiles, own_tiles);
      }
    }
  }

  bool next_pass() { return false; }

 private:
  using Memory = ShortScratch<Compute>;

  const PathCall<Compute>& call_;
  const index_t size_ = Memory::tile_size();
  index_t tiles_;  // per kv head, without sequence lengths
  index_t all_;    // tiles of all kv heads
  index_t share_;  // tiles of a task
  std::size_t lane_bytes_ = 0;
  SequenceQueue queue_;
  std::atomic<index_t> next_{0};
};

SSMAX_END
