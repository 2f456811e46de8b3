// Stores the sums of all queries of a backward pass: dc, the score's parameters and the gradients of the sinks.
#pragma once

#include "../../memory/arena.hpp"
#include "../terms/gradient_variant.hpp"
#include "../terms/sequences.hpp"

SSMAX_BEGIN_DETAIL

/// Passes the sums of all queries, in their order, to the scaling and the score function, and adds the gradients of
/// the sinks to dsinks.
template <class Compute>
void hand_over(const BackwardProblem<Compute>& problem, const GradientVariant<Compute>& variant,
               const CallSums& sums) {
  const Problem<Compute>& forward = problem.forward;
  const index_t sums_of_row = 1 + variant.parameters(), first = forward.first_query;
  const index_t first_entry = forward.first_entry(), end_entry = first_entry + forward.entries();
  const InputRows<Compute>& q = forward.q;
  Query query{0, 0, 0, forward.shape(first_entry)};
  const double* row = sums.sums;
  const QueryReport* report = sums.reports;
  for (query.batch = first_entry; query.batch < end_entry; ++query.batch) {
    for (query.head = q.first_head(); query.head < q.end_head(); ++query.head) {
      double dsink = 0;
      const index_t end = first + q.extent(2);
      for (query.index = first; query.index < end; ++query.index, row += sums_of_row, ++report) {
        variant.accumulate(query, {query.head, report->position, report->n}, row);
        dsink += report->dsink;
      }
      if (!problem.dsinks.empty()) {
        problem.dsinks[static_cast<std::size_t>(query.head)] += static_cast<Compute>(dsink);
      }
    }
  }
}

/// The memory for the sums of all queries of a call, and the part of it that belongs to one sequence.
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
    const auto row_bytes = static_cast<std::size_t>(sums_of_row_) * sizeof(double) + sizeof(QueryReport);
    return is_needed_ ? multiply_bytes(static_cast<std::size_t>(rows()), row_bytes) : 0;
  }
  CallSums in(std::byte* memory) const {
    if (!is_needed_) return kept_;
    auto* sums = reinterpret_cast<double*>(memory);
    return {sums, reinterpret_cast<QueryReport*>(sums + rows() * sums_of_row_)};
  }
  CallSums of_rows(const CallSums& all, const SequenceRows& rows) const {
    if (!all) return all;
    const index_t before = (rows.entry * q_.extent(2) + rows.first) * q_.extent(1);
    return {all.sums + before * sums_of_row_, all.reports + before};
  }

 private:
  index_t rows() const { return q_.extent(0) * q_.extent(1) * q_.extent(2); }

  const InputRows<Compute>& q_;
  const CallSums kept_;
  const index_t sums_of_row_;
  const bool is_needed_;
};

SSMAX_END
