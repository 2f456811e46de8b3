// Makes the list of a backward pass: its works, the phases and the memory. Computes no product.
//
// | phase | sequences | order |
// |---|---|---|
// | 0 | their kv heads are split into antidiagonals (grid.hpp) | one sequence after another |
// | 1 | their kv heads are whole tasks | those with the highest cost first, in one run of the executor |
//
// Without lengths, all batch entries are in one of the phases, and the list needs no memory. Exception: sequences whose
// heads share gradients of the score function keep their order.
#pragma once

#include <utility>

#include "../work/explain.hpp"
#include "grid.hpp"

SSMAX_BEGIN_DETAIL

/// The drivers of the phases. Operand is the type of the products' operands.
template <class Operand, class Compute>
inline constexpr PathDriver<Compute> backward_drivers[] = {
    {std::same_as<Operand, Compute> ? Path::backward : Path::backward_bf16, true, nullptr, nullptr, nullptr},
    {std::same_as<Operand, Compute> ? Path::backward : Path::backward_bf16, false, nullptr, nullptr,
     nullptr}};

/// Returns the explanation of a backward pass: all tasks, and the threads of the phase with the most of them.
template <class Compute>
SSMAX_COLD Explanation explanation_of(const WorkList<Compute>& list,
                                      const BackwardProblem<Compute>& problem) {
  Explanation e = explanation_of(list, problem.forward);
  if (list.phase_count < 2) return e;
  e.tasks += list.paths[0].tasks;
  e.threads = std::max(e.threads, list.phases[0].lanes);
  return e;
}

template <class Operand, class Compute>
class BackwardListMaker {
 public:
  /// Counts the works and the memory.
  BackwardListMaker(WorkList<Compute>& list, const BackwardProblem<Compute>& problem,
                    const GradientVariant<Compute>& variant, index_t threads, const Route& route)
      : list_(list),
        problem_(problem),
        threads_(threads),
        kv_heads_(problem.forward.kv_heads()),
        has_lengths_(problem.forward.lengths.is_given()) {
    clear(list);
    for_each([&](const BackwardSequence& sequence, index_t entries) {
      if (all_costs_ == 0)
        sharing_ = variant.sharing(has_lengths_ ? longest_shape(problem.forward) : sequence.shape);
      all_costs_ += cost(sequence) * static_cast<double>(entries * kv_heads_);
    });
    if (all_costs_ > 0) count(variant, route);
    if (problem.forward.caller.explanation != nullptr)
      *problem.forward.caller.explanation = explanation_of(list, problem);
  }

  /// Writes the works in memory of list_bytes.
  void fill(std::byte* memory) {
    Arena arena(memory);
    list_.works = arena.take<Works>(list_.works_count);
    if (list_.works_count == 0) return;
    for (const PathWorks<Compute>& path :
         std::span(list_.paths, static_cast<std::size_t>(list_.path_count))) {
      const std::span<Works> works(list_.works + path.works, static_cast<std::size_t>(path.works_count));
      auto next = works.begin();
      for_each([&](const BackwardSequence& sequence, index_t entries) {
        const BackwardCut cut = cut_of(sequence, entries);
        if (cut.whole_heads != path.driver->keeps_order) *next++ = works_of(sequence, entries, cut);
      });
      if (!path.driver->keeps_order) sort_by_cost(works);
      index_t begin = 0;
      for (Works& some : works) some.begin = std::exchange(begin, begin + kv_heads_);
    }
  }

 private:
  /// Calls f(sequence, entries) for every sequence with queries or keys or, without lengths, for all batch entries.
  template <class F>
  void for_each(const F& f) const {
    const index_t count = kv_heads_ > 0 ? problem_.forward.sequences() : 0;
    for (index_t batch = 0; batch < (has_lengths_ ? count : std::min<index_t>(count, 1)); ++batch) {
      const BackwardSequence sequence = sequence_of(problem_, batch);
      if (!is_empty(sequence)) f(sequence, has_lengths_ ? 1 : count);
    }
  }
  static double cost(const BackwardSequence& sequence) {
    return static_cast<double>(sequence.rows + query_block) *
           static_cast<double>(sequence.keys + backward_key_block);
  }
  /// Returns how the kv heads of a sequence are split. A sequence among others is split only if its kv heads are too
  /// long for one task.
  BackwardCut cut_of(const BackwardSequence& sequence, index_t entries) const {
    BackwardCut cut(entries * kv_heads_, query_blocks(sequence), key_blocks(sequence), sharing_, threads_);
    const bool is_balanced = 10 * cost(sequence) * static_cast<double>(threads_) <= all_costs_;
    if (has_lengths_ && sharing_ == Sharing::one_head && is_balanced) cut.whole_heads = true;
    return cut;
  }
  Works works_of(const BackwardSequence& sequence, index_t entries, const BackwardCut& cut) const {
    const index_t at_once = cut.whole_heads ? 1 : cut.at_once;
    return {sequence.batch, entries, sequence.rows,
            at_once,        0,       sharing_ == Sharing::one_head ? cost(sequence) : 0};
  }

  void count(const GradientVariant<Compute>& variant, const Route& route) {
    const Problem<Compute>& forward = problem_.forward;
    Arena lane;
    const BackwardScratch<Compute, Operand> scratch(lane, forward, variant);
    index_t lanes[2] = {};
    for (index_t i = 0; i < 2; ++i) {
      PathWorks<Compute>& path = list_.paths[i] = {};
      path.driver = &backward_drivers<Operand, Compute>[i];
      path.reason = route.reason;
      path.rows = forward.q.extent(2) * forward.heads_per_kv_head();
      path.queries = query_block;
      path.split = path.together = {1, 1, 1};
      path.heads = 1;
      path.sizes = {lane.used(), 0, backward_key_block, scratch.tile_lanes};
      path.lane_bytes = lane.used();
    }
    for_each([&](const BackwardSequence& sequence, index_t entries) {
      const BackwardCut cut = cut_of(sequence, entries);
      const index_t queries = query_blocks(sequence), keys = key_blocks(sequence),
                    heads = entries * kv_heads_;
      Arena sums;
      HeadSums<Compute, Operand>(sums, problem_, sequence, 0, scratch);
      PathWorks<Compute>& path = list_.paths[cut.whole_heads ? 1 : 0];
      path.only = works_of(sequence, entries, cut);
      ++path.works_count;
      if (cut.whole_heads) {
        path.tasks += heads;
        lanes[1] = std::min(cut.threads, path.tasks);
        path.waiting_bytes = std::max(path.waiting_bytes, sums.used());
      } else {
        path.tasks += heads * queries * keys;
        lanes[0] = std::max(lanes[0], std::min(cut.threads, cut.at_once * (queries + keys)));
        path.waiting_bytes =
            std::max(path.waiting_bytes, multiply_bytes(static_cast<std::size_t>(cut.at_once), sums.used()));
      }
    });
    PathWorks<Compute>&grids = list_.paths[0], &whole = list_.paths[1];
    whole.waiting_bytes = multiply_bytes(static_cast<std::size_t>(lanes[1]), whole.waiting_bytes);
    whole.works = grids.works_count;
    if (has_lengths_) list_.works_count = grids.works_count + whole.works_count;
    for (index_t i = 0; i < 2; ++i) {
      if (list_.paths[i].works_count == 0) continue;
      PathWorks<Compute>& path = list_.paths[list_.path_count] = list_.paths[i];
      const std::size_t bytes =
          add_bytes(path.waiting_bytes, multiply_bytes(static_cast<std::size_t>(lanes[i]), path.lane_bytes));
      list_.phases[list_.phase_count++] = {list_.path_count++, 1, lanes[i], path.lane_bytes, bytes, false};
      list_.run_bytes = std::max(list_.run_bytes, bytes);
    }
    Arena works;
    works.take<Works>(list_.works_count);
    list_.list_bytes = works.used();
    list_.state_bytes = SumsMemory<Compute>(problem_, variant).bytes();
    list_.run_bytes = add_bytes(list_.run_bytes, list_.state_bytes);
  }

  WorkList<Compute>& list_;
  const BackwardProblem<Compute>& problem_;
  const index_t threads_, kv_heads_;
  const bool has_lengths_;
  Sharing sharing_ = Sharing::one_head;
  double all_costs_ = 0;
};

SSMAX_END
