// Defines BackwardProblem: everything that the driver of the backward pass reads about one call.
#pragma once

#include <span>

#include "problem.hpp"

SSMAX_BEGIN_SHARED

/// Values of a query that the end of the call reads: n and position, with which the scaling was called, and the
/// query's share of the sink's gradient.
struct QueryReport {
  index_t n = 0, position = 0;
  double dsink = 0;
};

/// The sums of all queries of a call. Given only if the call has parameter gradients.
struct CallSums {
  double* sums = nullptr;  // [queries][sums_of_row]: dc, then the score's parameters
  QueryReport* reports = nullptr;

  SSMAX_INLINE explicit operator bool() const { return sums != nullptr; }
};

/// One call of several that together compute a backward pass, each with a part of the keys. Between the calls,
/// intermediate results stay in dq and in `kept`. The caller, not the driver, passes the sums to scaling, score and
/// sinks.
struct BackwardStage {
  bool first = true, last = true;
  CallSums kept{};
  /// Set if dk and dv already hold the sums of earlier queries. The rows of these queries and of this call must fit
  /// one partial sum (blocks_per_sum).
  bool continues = false;
};

/// The arrays for the sums of a backward in stages whose results are stored with fewer digits than Compute. The
/// last stage rounds dq. The caller rotates dk and dv back and rounds them. Rows of dk and dv must be contiguous.
template <class Compute>
struct StageSums {
  OutputRows<Compute> dq{}, dk{}, dv{};

  SSMAX_INLINE explicit operator bool() const { return dq.is_given(); }
};

template <class Compute>
struct BackwardProblem {
  Problem<Compute> forward;
  InputRows<Compute> out, dout;
  RowNumbers<const Compute> lse, dlse;
  OutputRows<Compute> dq, dk, dv;  // kv heads of dk and dv are counted from 0
  bool accumulates = false;        // whether gradients are added to dq, dk and dv
  std::span<const Compute> sinks;  // of all heads of the call, as is dsinks
  std::span<Compute> dsinks;
  bool scaled_sinks = false;
  BackwardStage stage{};
  StageSums<Compute> sums{};  // given if the results of a stage are not stored as Compute

  /// Returns whether the results can hold sums, that is, all are stored as Compute and gradients are not accumulated.
  SSMAX_INLINE bool stores_sums() const {
    const auto holds = [](const OutputRows<Compute>& rows) { return rows.kind() == ElementKind::compute; };
    return holds(dq) && holds(dk) && holds(dv) && !accumulates;
  }
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// One sequence of a backward pass.
struct BackwardSequence : Sequence {
  index_t rows = 0;                          // queries of a kv head
  index_t key_entry = 0, first_key_row = 0;  // its rows in dk and dv: [key_entry, kv head, first_key_row + i]
  index_t keys = 0;                          // number of these rows: keys stored.begin, stored.begin + 1, …
};

template <class Compute>
BackwardSequence sequence_of(const BackwardProblem<Compute>& problem, index_t batch) {
  const Problem<Compute>& forward = problem.forward;
  const Sequence sequence = sequence_of(forward, batch);
  const SequenceRows keys = forward.lengths.is_given() ? forward.lengths.key_rows(batch)
                                                       : SequenceRows{batch, 0, problem.dk.extent(2)};
  return {sequence, sequence.queries * forward.heads_per_kv_head(), keys.entry, keys.first, keys.count};
}

SSMAX_END
