// Stores the sums of all queries of a backward pass: dc, the score's parameters and the gradients of the sinks.
#pragma once

#include "../../memory/arena.hpp"
#include "../terms/backward_problem.hpp"
#include "../terms/variant.hpp"

SSMAX_BEGIN_DETAIL

/// Returns the place of a query among the queries of the call: sequence by sequence, head by head.
template <class Compute>
index_t place_of(const Problem<Compute>& problem, const Sequence& sequence, const Query& query) {
  const InputRows<Compute>& q = problem.q;
  const index_t rows_before = (sequence.entry * q.extent(2) + sequence.first_row) * q.extent(1);
  return rows_before + (query.head - q.first_head()) * sequence.queries + problem.state_row(query);
}

/// Passes the sums of all queries, in their order, to the scaling and the score function, and adds the gradients of
/// the sinks to dsinks.
template <class Compute>
void hand_over(const BackwardProblem<Compute>& problem, const GradientVariant<Compute>& variant,
               const CallSums& sums) {
  const Problem<Compute>& forward = problem.forward;
  const InputRows<Compute>& q = forward.q;
  for (index_t batch = 0; batch < forward.sequences(); ++batch) {
    const Sequence sequence = sequence_of(forward, batch);
    Query query{batch, 0, 0, sequence.shape};
    for (query.head = q.first_head(); query.head < q.end_head(); ++query.head) {
      double dsink = 0;
      for (index_t i = 0; i < sequence.queries; ++i) {
        query.index = forward.first_query + i;
        const index_t at = place_of(forward, sequence, query);
        const QueryReport& report = sums.reports[at];
        variant.accumulate(query, {query.head, report.position, report.n},
                           sums.sums + at * (1 + variant.parameters()));
        dsink += report.dsink;
      }
      if (!problem.dsinks.empty()) {
        problem.dsinks[static_cast<std::size_t>(query.head)] += static_cast<Compute>(dsink);
      }
    }
  }
}

/// The memory for the sums of all queries of a call.
template <class Compute>
class SumsMemory {
 public:
  SumsMemory(const BackwardProblem<Compute>& problem, const GradientVariant<Compute>& variant)
      : q_(problem.forward.q),
        kept_(problem.stage.kept),
        sums_of_row_(1 + variant.parameters()),
        is_needed_(!kept_ && (variant.wants_gradients() || !problem.dsinks.empty())) {}

  bool is_needed() const { return is_needed_; }
  std::size_t bytes() const {
    Arena count;
    if (is_needed_) in(count);
    return count.used();
  }
  /// Returns the sums in the memory of an arena.
  CallSums in(Arena& arena) const {
    if (!is_needed_) return kept_;
    auto* sums = arena.take<double>(rows() * sums_of_row_);
    return {sums, arena.take<QueryReport>(rows())};
  }

 private:
  index_t rows() const { return q_.extent(0) * q_.extent(1) * q_.extent(2); }

  const InputRows<Compute>& q_;
  const CallSums kept_;
  const index_t sums_of_row_;
  const bool is_needed_;
};

SSMAX_END
