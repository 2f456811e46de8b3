// Splits the backward pass of a call, or of one of its sequences, into tasks, and computes them. Two tasks never add to
// the same sum at the same time, so additions are not atomic.
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
#include "../work/list.hpp"
#include "task.hpp"

SSMAX_BEGIN_DETAIL

struct BackwardCut {
  index_t threads;   // the largest number of threads with memory of their own
  index_t at_once;   // kv heads whose sums are in memory at the same time
  bool whole_heads;  // whether each kv head is one task

  BackwardCut(index_t heads, index_t query_blocks, index_t key_blocks, Sharing sharing, index_t max_threads)
      : threads(sharing == Sharing::any ? 1 : max_threads) {
    const index_t rounds = ceil_div(heads, threads);
    const bool balanced = heads >= 9 * (rounds * threads - heads);  // at most a tenth of the threads idle
    whole_heads = threads == 1 || (balanced && sharing == Sharing::one_head);
    const index_t diagonals = std::max<index_t>(1, query_blocks + key_blocks - 1);
    // `pairs` is the average length of an antidiagonal. `at_once` kv heads together give 8 pairs per thread: under a
    // causal mask, half of the pairs are empty.
    const double all_pairs = static_cast<double>(query_blocks) * static_cast<double>(key_blocks);
    const auto pairs = std::max<index_t>(1, static_cast<index_t>(all_pairs / static_cast<double>(diagonals)));
    at_once = whole_heads                 ? std::min(threads, heads)
              : sharing == Sharing::heads ? 1
                                          : std::min(heads, ceil_div(8 * threads, pairs));
  }
};

inline bool is_empty(const BackwardSequence& sequence) { return sequence.rows + sequence.keys == 0; }

/// A phase of a backward list while it runs. Operand is the type of the products' operands, see BackwardTask.
template <class Operand, class Compute>
class BackwardPhase {
 public:
  using Task = BackwardTask<Compute, Operand>;

  BackwardPhase(const BackwardProblem<Compute>& problem, const GradientVariant<Compute>& variant,
                const WorkList<Compute>& list, const PhaseWorks& phase, const CallSums& sums,
                std::byte* memory, const AnyExecutor& executor)
      : problem_(problem),
        variant_(variant),
        list_(list),
        phase_(phase),
        path_(list.paths[phase.first]),
        sums_(sums),
        memory_(memory),
        executor_(executor) {}

  void run() const {
    if (!path_.driver->keeps_order) return run_heads();
    for (const Works& works : works_of(list_, path_)) run_grid(works);
  }

 private:
  /// Computes kv heads that are whole tasks.
  void run_heads() const {
    const index_t kv_heads = problem_.forward.kv_heads();
    run_tasks(path_.tasks, [&](Task& task, index_t lane, index_t i) {
      const Works& works = works_of(list_, path_, i);
      const index_t at = i - works.begin;
      task.enter(works.first + at / kv_heads, at % kv_heads, head_sums(lane, phase_.lanes));
      task.attend_all();
    });
  }

  /// Computes the antidiagonals of grids, of works.blocks kv heads at once.
  void run_grid(const Works& works) const {
    const BackwardSequence sequence = sequence_of(problem_, works.first);
    const index_t queries = query_blocks(sequence), keys = key_blocks(sequence),
                  kv_heads = problem_.forward.kv_heads(), heads = works.count * kv_heads;
    for (index_t first = 0; first < heads; first += works.blocks) {
      const index_t slots = std::min(works.blocks, heads - first);
      const auto run_slots = [&](index_t pairs, const auto& f) {
        run_tasks(slots * pairs, [&](Task& task, index_t, index_t i) {
          const index_t head = first + i % slots;
          task.enter(works.first + head / kv_heads, head % kv_heads, head_sums(i % slots, works.blocks));
          f(task, i / slots);
        });
      };
      run_slots(queries + keys, [&](Task& task, index_t i) {
        if (i < queries) return task.survey(i);
        task.prepare_keys(i - queries);
      });
      for (index_t diagonal = 0; diagonal < queries + keys - 1; ++diagonal) {
        const index_t lowest = std::max<index_t>(0, diagonal - queries + 1);
        run_slots(std::min(diagonal + 1, keys) - lowest,
                  [&](Task& task, index_t i) { task.attend(diagonal - (lowest + i), lowest + i); });
      }
      run_slots(queries + keys, [&](Task& task, index_t i) {
        if (i < queries) return task.finish_queries(i);
        task.finish_keys(i - queries);
      });
    }
  }

  /// Calls f(task, lane, i) for i below n. Each lane has a task and memory of its own.
  template <class F>
  void run_tasks(index_t n, const F& f) const {
    std::atomic<index_t> next{0};
    executor_.run(std::min(phase_.lanes, n), [&](index_t lane) {
      Arena arena(memory_ + static_cast<std::size_t>(lane) * phase_.lane_bytes);
      const typename Task::Memory lane_memory(arena, problem_.forward, variant_);
      Task task(problem_, variant_, lane_memory, sums_);
      for (index_t i = next++; i < n; i = next++) f(task, lane, i);
    });
  }

  /// Returns the memory of the sums of one of `slots` kv heads.
  std::byte* head_sums(index_t slot, index_t slots) const {
    const std::size_t bytes = path_.waiting_bytes / static_cast<std::size_t>(slots) / 64 * 64;
    return memory_ + static_cast<std::size_t>(phase_.lanes) * phase_.lane_bytes +
           static_cast<std::size_t>(slot) * bytes;
  }

  const BackwardProblem<Compute>& problem_;
  const GradientVariant<Compute>& variant_;
  const WorkList<Compute>& list_;
  const PhaseWorks& phase_;
  const PathWorks<Compute>& path_;
  const CallSums& sums_;
  std::byte* const memory_;
  const AnyExecutor& executor_;
};

SSMAX_END
