// Narrows a call whose sequences have their own lengths to one sequence. The result is the call that the sequence
// would be alone, except for the number of its batch entry. So drivers compute it like any other call.
#pragma once

#include <algorithm>

#include "backward_problem.hpp"
#include "problem.hpp"

SSMAX_BEGIN_DETAIL

template <class Compute>
Problem<Compute> of_sequence(const Problem<Compute>& problem, index_t sequence) {
  Problem<Compute> result = problem;
  result.q.keep_sequence(problem.lengths.query_rows(sequence), problem.lengths.count());
  result.lengths = {};
  result.sequence = sequence;
  return result;
}

/// Narrows the given tensors with rows of queries to one sequence.
template <class... Tensors>
void keep_sequence(const SequenceRows& rows, index_t sequences, Tensors&... tensors) {
  const auto keep = [&](auto& tensor) {
    if (tensor.is_given()) tensor.keep_sequence(rows, sequences);
  };
  (keep(tensors), ...);
}

template <class Compute>
Result<Compute> of_sequence(const Result<Compute>& result, const SequenceLengths& lengths, index_t sequence) {
  Result<Compute> narrowed = result;
  keep_sequence(lengths.query_rows(sequence), lengths.count(), narrowed.out, narrowed.lse);
  return narrowed;
}

template <class Compute>
BackwardProblem<Compute> of_sequence(const BackwardProblem<Compute>& problem, index_t sequence) {
  const SequenceLengths& lengths = problem.forward.lengths;
  BackwardProblem<Compute> result = problem;
  result.forward = of_sequence(problem.forward, sequence);
  keep_sequence(lengths.query_rows(sequence), lengths.count(), result.out, result.dout, result.lse,
                result.dlse, result.dq, result.old_dq);
  result.dk.keep_sequence(lengths.key_rows(sequence), lengths.count());
  result.dv.keep_sequence(lengths.key_rows(sequence), lengths.count());
  keep_sequence(lengths.key_rows(sequence), lengths.count(), result.old_dk, result.old_dv);
  return result;
}

/// Calls f(sequence, its problem) for every sequence.
template <class P, class F>
void for_each_sequence(const P& problem, const SequenceLengths& lengths, const F& f) {
  for (index_t sequence = 0; sequence < lengths.count(); ++sequence)
    f(sequence, of_sequence(problem, sequence));
}

/// Returns the extents of a batch entry.
template <class Compute>
QueryShape entry_shape(const Problem<Compute>& problem, index_t batch) {
  return problem.lengths.is_given() ? of_sequence(problem, batch).shape(batch) : problem.shape(batch);
}

/// Returns the extents of a call whose sequences all have the length of the longest one.
template <class Compute>
QueryShape longest_shape(const Problem<Compute>& problem) {
  QueryShape longest{problem.entries(), problem.q.end_head() + problem.heads_after, 0, 0};
  for (index_t b = 0; b < longest.batch; ++b) {
    const QueryShape shape = entry_shape(problem, b);
    longest.queries = std::max(longest.queries, shape.queries);
    longest.keys = std::max(longest.keys, shape.keys);
  }
  return longest;
}

/// An entry of a SequenceQueue.
struct QueuedSequence {
  index_t sequence = 0, tasks = 0;
  index_t end = 0;  // end of its tasks, counted over the queue
  double cost = 0;
};

/// A queue of the tasks of some sequences. The sequences with the highest cost come first, so that all threads end
/// at nearly the same time. Sequences of equal cost keep their order.
class SequenceQueue {
 public:
  struct Place {
    index_t sequence, task;  // `task` is counted from the first task of the sequence
  };

  /// Constructs an empty queue.
  SequenceQueue() = default;
  /// Constructs an empty queue in memory for all sequences of the call.
  explicit SequenceQueue(QueuedSequence* memory) : first_(memory), last_(memory) {}

  bool is_empty() const { return first_ == last_; }
  /// Adds a sequence that has at least one task. Requires a call of `sort` after the last call.
  void add(index_t sequence, index_t tasks, double cost) { *last_++ = {sequence, tasks, 0, cost}; }
  void sort() {
    std::sort(first_, last_, [](const QueuedSequence& a, const QueuedSequence& b) {
      return a.cost != b.cost ? a.cost > b.cost : a.sequence < b.sequence;
    });
    index_t end = 0;
    for (QueuedSequence* at = first_; at != last_; ++at) at->end = end += at->tasks;
  }
  Place operator[](index_t task) const {
    const QueuedSequence* at = std::upper_bound(
        first_, last_, task, [](index_t i, const QueuedSequence& queued) { return i < queued.end; });
    return {at->sequence, task - (at->end - at->tasks)};
  }

 private:
  QueuedSequence *first_ = nullptr, *last_ = nullptr;
};

SSMAX_END
