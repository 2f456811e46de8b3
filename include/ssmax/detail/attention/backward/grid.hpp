// Splits the backward pass of a call, or of one of its sequences, into tasks. Two tasks never add to the same sum at
// the same time, so additions are not atomic.
//
// The work of a kv head is a grid: query blocks × key blocks. Pairs in one row of the grid add to the same dq, pairs
// in one column to the same dk and dv. Pairs of an antidiagonal share neither row nor column. Each sum adds its
// pairs in rising order, on any thread: results are bit-identical for every executor.
//
// | threads | sharing of the score's gradients | kv heads | tasks |
// |---|---|---|---|
// | 1 | all | all | each kv head is one task |
// | several | one_head | at most a tenth of the threads idle | each kv head is one task |
// | several | one_head | otherwise | pairs of an antidiagonal, of as many kv heads as fill the threads |
// | several | heads | all | pairs of an antidiagonal of one kv head |
//
// Sharing::any limits the call to one thread. Antidiagonals are computed one after the other.
#pragma once

#include <atomic>

#include "../terms/any_executor.hpp"
#include "task.hpp"

SSMAX_BEGIN_DETAIL

/// The split of a call into tasks.
struct BackwardCut {
  index_t threads;   // threads with memory of their own
  index_t at_once;   // kv heads whose sums are in memory at the same time
  bool whole_heads;  // whether each kv head is one task

  BackwardCut(index_t heads, index_t query_blocks, index_t key_blocks, Sharing sharing, index_t max_threads)
      : threads(sharing == Sharing::any ? 1 : max_threads) {
    const index_t rounds = (heads + threads - 1) / threads;
    const bool balanced = heads >= 9 * (rounds * threads - heads);  // at most a tenth of the threads idle
    whole_heads = threads == 1 || (balanced && sharing == Sharing::one_head);
    const index_t diagonals = std::max<index_t>(1, query_blocks + key_blocks - 1);
    // `pairs` is the average length of an antidiagonal. `at_once` kv heads together give 8 pairs per thread: under a
    // causal mask, half of the pairs are empty.
    const double all_pairs = static_cast<double>(query_blocks) * static_cast<double>(key_blocks);
    const auto pairs = std::max<index_t>(1, static_cast<index_t>(all_pairs / static_cast<double>(diagonals)));
    at_once = whole_heads                 ? std::min(threads, heads)
              : sharing == Sharing::heads ? 1
                                          : std::min(heads, (8 * threads + pairs - 1) / pairs);
  }
};

/// Returns whether a sequence has neither queries nor keys.
inline bool is_empty(const BackwardSequence& sequence) { return sequence.rows + sequence.keys == 0; }

/// Takes one thread's memory from the arena.
template <class Operand, class Compute>
BackwardScratch<Compute, Operand> take_scratch(Arena& arena, const Problem<Compute>& forward,
                                               const GradientVariant<Compute>& variant) {
  const index_t unit = kernels<PrefillKernels<Compute, Operand>>().depth, dv = forward.value_width();
  return BackwardScratch<Compute, Operand>(arena, forward.width(), dv, product_depth<Operand>(forward, unit),
                                           (dv + unit - 1) / unit * unit, 1 + variant.parameters(),
                                           Multipliers(forward.scale, variant).has_score);
}

/// The backward pass of `entries` sequences of the same size, from `sequence` on: its split into tasks, and the memory
/// that it needs. Operand is the type of the products' operands, see BackwardTask.
template <class Operand, class Compute>
class BackwardRun {
 public:
  using Task = BackwardTask<Compute, Operand>;

  BackwardRun(const BackwardProblem<Compute>& problem, const GradientVariant<Compute>& variant,
              const BackwardSequence& sequence, index_t entries, Sharing sharing, index_t threads)
      : problem_(problem),
        variant_(variant),
        sequence_(sequence),
        heads_(entries * problem.forward.kv_heads()),
        queries_(query_blocks(sequence)),
        keys_(key_blocks(sequence)),
        cut_(heads_, queries_, keys_, sharing, threads),
        lanes_(std::min(cut_.threads,
                        cut_.whole_heads ? heads_ : cut_.at_once * std::min(queries_ + keys_, cut_.threads))),
        counted_(take_scratch<Operand>(count_, problem.forward, variant)) {
    Arena count_sums;
    HeadSums<Compute, Operand>(count_sums, problem, sequence, counted_);
    head_bytes_ = count_sums.used();
  }
  BackwardRun(const BackwardRun&) = delete;
  BackwardRun& operator=(const BackwardRun&) = delete;

  index_t lanes() const { return lanes_; }
  index_t tasks() const { return cut_.whole_heads ? heads_ : heads_ * queries_ * keys_; }
  index_t tile_lanes() const { return counted_.tile_lanes; }
  std::size_t lane_bytes() const { return count_.used(); }
  std::size_t head_bytes() const { return head_bytes_; }
  std::size_t bytes() const {
    return add_bytes(multiply_bytes(static_cast<std::size_t>(lanes_), lane_bytes()),
                     multiply_bytes(static_cast<std::size_t>(cut_.at_once), head_bytes_));
  }

  /// Runs all tasks. Requires memory of bytes().
  void run(std::byte* memory, const CallSums& sums, const AnyExecutor& executor) const {
    std::byte* const head_memory = memory + static_cast<std::size_t>(lanes_) * lane_bytes();
    const index_t kv_heads = problem_.forward.kv_heads();
    // Calls f(task, lane, i) for i below n. Each thread has a task and memory of its own.
    const auto run = [&](index_t n, const auto& f) {
      std::atomic<index_t> next{0};
      executor.run(std::min(lanes_, n), [&](index_t lane) {
        Arena arena(memory + static_cast<std::size_t>(lane) * lane_bytes());
        const BackwardScratch<Compute, Operand> lane_memory =
            take_scratch<Operand>(arena, problem_.forward, variant_);
        Task task(problem_, variant_, lane_memory, sums);
        for (index_t i = next++; i < n; i = next++) f(task, lane, i);
      });
    };
    // Enters a kv head, counted over sequences, with the sums of a slot.
    const auto enter = [&](Task& task, index_t head, index_t slot) {
      Arena arena(head_memory + static_cast<std::size_t>(slot) * head_bytes_);
      task.enter(sequence_.batch + head / kv_heads, head % kv_heads,
                 HeadSums<Compute, Operand>(arena, problem_, sequence_, counted_));
    };

    if (cut_.whole_heads) {
      run(heads_, [&](Task& task, index_t lane, index_t head) {
        enter(task, head, lane);
        compute_head(task, queries_, keys_);
      });
      return;
    }
    for (index_t first = 0; first < heads_; first += cut_.at_once) {
      const index_t slots = std::min(cut_.at_once, heads_ - first);
      const auto run_slots = [&](index_t pairs, const auto& f) {
        run(slots * pairs, [&](Task& task, index_t, index_t i) {
          enter(task, first + i % slots, i % slots);
          f(task, i / slots);
        });
      };
      run_slots(queries_ + keys_, [&](Task& task, index_t i) {
        if (i < queries_) return task.survey(i);
        task.prepare_keys(i - queries_);
      });
      for (index_t diagonal = 0; diagonal < queries_ + keys_ - 1; ++diagonal) {
        const index_t lowest = std::max<index_t>(0, diagonal - queries_ + 1);
        run_slots(std::min(diagonal + 1, keys_) - lowest,
                  [&](Task& task, index_t i) { task.attend(diagonal - (lowest + i), lowest + i); });
      }
      run_slots(queries_ + keys_, [&](Task& task, index_t i) {
        if (i < queries_) return task.finish_queries(i);
        task.finish_keys(i - queries_);
      });
    }
  }

  /// Computes the kv head that the task has entered.
  static void compute_head(Task& task, index_t queries, index_t keys) {
    for (index_t j = 0; j < keys; ++j) task.prepare_keys(j);
    for (index_t i = 0; i < queries; ++i) {
      task.survey(i);
      for (index_t j = 0; j < keys; ++j) task.attend(i, j);
      task.finish_queries(i);
    }
    for (index_t j = 0; j < keys; ++j) task.finish_keys(j);
  }

 private:
  const BackwardProblem<Compute>& problem_;
  const GradientVariant<Compute>& variant_;
  const BackwardSequence sequence_;
  const index_t heads_, queries_, keys_;  // queries_, keys_: blocks
  const BackwardCut cut_;
  const index_t lanes_;  // threads with memory of their own
  Arena count_;
  const BackwardScratch<Compute, Operand> counted_;
  std::size_t head_bytes_ = 0;
};

template <class Operand, class Compute>
Explanation explanation_of(const BackwardRun<Operand, Compute>& run, index_t tasks, index_t lanes,
                           std::size_t bytes) {
  Explanation e;
  e.query_block = query_block;
  e.key_block = backward_key_block;
  e.tile_lanes = run.tile_lanes();
  e.tasks = tasks;
  e.threads = lanes;
  e.workspace_bytes = bytes;
  return e;
}

SSMAX_END
