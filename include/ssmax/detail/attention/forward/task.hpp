// Defines ForwardTask, the base of the tasks of the forward pass that keep states: which rows of which sequence a task
// computes, and how the states of these rows begin, are merged and become results.
#pragma once

#include <algorithm>
#include <span>

#include "../../rows/state.hpp"
#include "../tile/queries.hpp"
#include "epilogue.hpp"

SSMAX_BEGIN_DETAIL

/// A task for some rows of a kv head. Memory is the scratch memory of a path. Its states have the layout
/// `memory.layout`, and `merge_outputs` adds their o.
template <class Compute, class Memory>
class ForwardTask {
 public:
  ForwardTask(const Problem<Compute>& problem, const Variant<Compute>& variant, const Memory& memory)
      : problem_(problem), variant_(variant), memory_(memory) {}

  static constexpr bool takes_heads = false;

  /// Sets the number of kv heads of a task. Requires 1, unless takes_heads.
  void take_heads(index_t heads) { heads_ = heads; }

  /// Returns whether a key of a chunk may be visible to a query. Always returns true unless the mask has runs.
  /// attend_chunk requires a call of sees_chunk for the same keys.
  bool sees_chunk(KeyRange keys) const {
    return !variant_.has_runs || find_visible_blocks(variant_, memory_, count_, keys);
  }

  /// Computes and stores the results of the task without states. Returns false if the path cannot.
  bool store_at_once(const Result<Compute>&) const { return false; }

  /// Initializes the states: to the state before the first key or, if the result continues a state, to that state.
  void begin(Compute* states, const Result<Compute>& result) const {
    reset(states);
    if (!result.continues() || !sequence_->has_start) return;
    for_each_group([&](index_t first, index_t count) {
      const SoftmaxState<Compute> state = memory_.layout.at(states, first);
      for (index_t i = 0; i < count; ++i) {
        const Query& query = memory_.rows[first + i].query;
        const index_t row = problem_.state_row(query);
        const SoftmaxState<Compute> start = state_of(result.start, query.batch, query.head, row);
        state.shift[i] = *start.shift;
        state.sum[i] = *start.sum;
        if (state.statistics.is_given()) {
          const TileStatistics<Compute> to = state.statistics.from(i),
                                        from = statistics_of(result.start, query.batch, query.head, row);
          *to.distances = *from.distances;
          *to.squares = *from.squares;
        }
        if constexpr (Memory::in_lanes) {
          memory_.in[i] = start.o;
        } else {
          std::copy_n(start.o, problem_.value_width(), state.o);
        }
      }
      if constexpr (Memory::in_lanes)
        memory_.kernels.transpose(memory_.in, count, problem_.value_width(), nullptr, state.o,
                                  memory_.tile_lanes);
    });
  }

  /// Merges the states `chunks` into the states `totals`.
  void merge(Compute* totals, Compute* chunks) const {
    const StateLayout& layout = memory_.layout;
    constexpr index_t most_rows = 64;
    SSMAX_ASSERT(layout.rows <= most_rows);
    alignas(64) Compute factors[most_rows], chunk_factors[most_rows];
    for (index_t first = 0; first < count_; first += layout.rows) {
      const SoftmaxState<Compute> total = layout.at(totals, first), chunk = layout.at(chunks, first);
      const index_t count = Memory::in_lanes ? layout.rows : count_;
      for (index_t i = 0; i < count; ++i) {
        if (total.statistics.is_given()) {
          merge_statistics(total.statistics.from(i), chunk.statistics.from(i), total.shift[i], total.sum[i],
                           chunk.shift[i], chunk.sum[i]);
        }
        merge_sums(total.shift[i], total.sum[i], chunk.shift[i], chunk.sum[i], factors[i], chunk_factors[i]);
      }
      memory_.merge_outputs(total.o, chunk.o, count, factors, chunk_factors);
    }
  }

  /// Turns the states into results.
  void store(Compute* states, const Result<Compute>& result) const {
    const index_t dv = problem_.value_width();
    for_each_group([&](index_t first, index_t count) {
      const SoftmaxState<Compute> state = memory_.layout.at(states, first);
      if constexpr (Memory::in_lanes) stage_outputs(state.o, count);
      for (index_t i = 0; i < count; ++i) {
        const QueryRow& seen = memory_.rows[first + i];
        Compute* o = state.o;
        if constexpr (Memory::in_lanes) o = memory_.staged + i * memory_.pitch;
        const SoftmaxState<Compute> own{state.shift + i, state.sum + i, o, state.statistics.from(i)};
        if (problem_.statistics != nullptr) {
          problem_.statistics->store(result, seen, problem_.state_row(seen.query), own, dv);
        } else {
          store_result(result, seen, problem_.state_row(seen.query), own, dv);
        }
      }
    });
  }

 protected:
  /// Selects rows [first, first + count) of a kv head: of one sequence, or of several whose keys lie in the memory of
  /// the first one. Returns a cursor on the first row.
  RowCursor<Compute> select(std::span<const Sequence> sequences, index_t kv_head, index_t first,
                            index_t count) {
    sequence_ = &sequences.front();
    batch_ = sequence_->batch;
    kv_head_ = kv_head;
    count_ = count;
    rows_ = std::ssize(sequences) * sequence_->queries * problem_.heads_per_kv_head();
    return {problem_, sequences, kv_head, first};
  }

  /// Selects rows as the function above does, and loads their queries into lanes. Returns the hull of their visible
  /// keys.
  Hull load_rows(std::span<const Sequence> sequences, index_t kv_head, index_t first, index_t count,
                 const Multipliers& multiply) {
    RowCursor cursor = select(sequences, kv_head, first, count);
    const index_t lanes =
        list_queries(memory_, count, UnusedLanes::repeat_last, [&](index_t) { return next_row(cursor); });
    list_runs(variant_, memory_, lanes);
    load_queries(problem_, variant_, multiply, memory_, lanes, count);
    Hull hull;
    for (index_t i = 0; i < lanes; i += memory_.kernels.width)
      hull.add(memory_.hulls[i / memory_.kernels.width]);
    return hull;
  }

  /// Returns the row of a cursor, which moves to the next one. With statistics, a multiplier of 0 is replaced.
  QueryRow next_row(RowCursor<Compute>& cursor) const {
    QueryRow row = cursor.row(variant_);
    if (problem_.statistics != nullptr && row.multiplier == 0) row.multiplier = multiplier_for_0;
    cursor.next();
    return row;
  }

  /// Sets the states to the state before the first key.
  void reset(Compute* states) const { memory_.layout.reset(states, count_); }

  const Problem<Compute>& problem_;
  const Variant<Compute>& variant_;
  const Memory& memory_;
  const Sequence* sequence_ = nullptr;  // the sequence whose keys the task reads
  index_t batch_ = 0, kv_head_ = 0;     // of these keys
  index_t heads_ = 1;                   // kv heads of the task, from kv_head_ on
  index_t count_ = 0;                   // rows of the task
  index_t rows_ = 0;                    // rows of the kv head

 private:
  /// Calls f(first, count) for groups of states: whole vectors of lanes, or single rows.
  template <class F>
  void for_each_group(const F& f) const {
    index_t size = 1;
    if constexpr (Memory::in_lanes) size = memory_.kernels.width;
    for (index_t first = 0; first < count_; first += size) f(first, std::min(size, count_ - first));
  }

  /// Transposes o of `count` lanes to rows of memory_.staged.
  void stage_outputs(const Compute* o, index_t count) const {
    const index_t dv = problem_.value_width(), width = memory_.kernels.width;
    for (index_t c = 0; c < dv; c += width) {
      const index_t channels = std::min(width, dv - c);
      for (index_t r = 0; r < channels; ++r) memory_.in[r] = o + (c + r) * memory_.tile_lanes;
      memory_.kernels.transpose(memory_.in, channels, count, nullptr, memory_.staged + c, memory_.pitch);
    }
  }
};

SSMAX_END
