// What one call of attention's backward has to do.
#pragma once

#include <span>

#include "problem.hpp"

SSMAX_BEGIN_SHARED

/// What a query leaves for the end of the call: n and position, which its scaling was called with, and its
/// share of the sink's gradient.
struct QueryReport {
  index_t n = 0, position = 0;
  double dsink = 0;
};

/// Numbers of all queries of a call, where anything is learnt.
struct CallSums {
  double* sums = nullptr;  // [queries][sums_of_row]: dc, then the score's parameters
  QueryReport* reports = nullptr;

  SSMAX_INLINE explicit operator bool() const { return sums != nullptr; }
};

/// A backward whose keys come in parts, a call for each: what it leaves from call to call lies in dq and in
/// `kept`, and nothing is handed to scaling, score and sinks: that is left to the caller.
struct BackwardStage {
  bool first = true, last = true;
  CallSums kept{};
  /// dk and dv hold what queries before these gave, which are at most as many rows as one sum takes.
  bool continues = false;
};

/// Sums of a backward in stages whose results have fewer digits. The last stage rounds dq; dk and dv, whose rows
/// lie one behind the other, are left to the caller, before they are rotated back.
template <class A>
struct StageSums {
  OutputRows<A> dq{}, dk{}, dv{};

  SSMAX_INLINE explicit operator bool() const { return dq.is_given(); }
};

template <class A>
struct BackwardProblem {
  Problem<A> forward;
  InputRows<A> out, dout;
  RowNumbers<const A> lse, dlse;
  OutputRows<A> dq, dk, dv;  // dk and dv count kv heads from 0
  /// Given if the gradients are added to dq, dk, dv: what the rows of dq, dk, dv hold before.
  InputRows<A> old_dq, old_dk, old_dv;
  bool accumulates = false;
  std::span<const A> sinks;  // of all heads of the call, as dsinks are
  std::span<A> dsinks;
  bool scaled_sinks = false;
  BackwardStage stage{};
  StageSums<A> sums{};  // of a stage whose results are not stored as A

  /// Returns whether the results can hold sums.
  SSMAX_INLINE bool stores_sums() const {
    const auto holds = [](const OutputRows<A>& rows) { return rows.kind() == ElementKind::compute; };
    return holds(dq) && holds(dk) && holds(dv) && !accumulates;
  }
  /// kv heads [first_head, first_head + heads) are computed, counted over batch entries.
  SSMAX_INLINE index_t first_head() const { return forward.first_entry() * forward.kv_heads(); }
  SSMAX_INLINE index_t heads() const { return forward.entries() * forward.kv_heads(); }
  /// Those that k and v hold, and where they begin.
  SSMAX_INLINE index_t keys() const { return dk.extent(2); }
  SSMAX_INLINE index_t first_key() const { return forward.keys.stored(forward.first_entry()).begin; }
};

SSMAX_END
