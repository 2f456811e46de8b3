// Defines SequenceQueue, the tasks of the sequences of a call in the order in which threads take them.
#pragma once

#include <algorithm>

#include "../../../config.hpp"

SSMAX_BEGIN_DETAIL

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
  /// Constructs an empty queue in memory for all sequences that are added.
  explicit SequenceQueue(QueuedSequence* memory) : first_(memory), last_(memory) {}

  /// Adds a sequence that has at least one task. Requires a call of `sort` after the last call.
  void add(index_t sequence, index_t tasks, double cost) { *last_++ = {sequence, tasks, 0, cost}; }
  void sort() {
    const auto is_before = [](const QueuedSequence& a, const QueuedSequence& b) {
      return a.cost != b.cost ? a.cost > b.cost : a.sequence < b.sequence;
    };
    if (!std::is_sorted(first_, last_, is_before)) std::sort(first_, last_, is_before);
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
