// Defines Phase, the sequences that one run of the executor computes, and PathCall, those of them that take one path.
#pragma once

#include <algorithm>
#include <span>

#include "../../memory/arena.hpp"
#include "../terms/problem.hpp"
#include "../terms/variant.hpp"
#include "queue.hpp"
#include "route.hpp"

SSMAX_BEGIN_DETAIL

/// The part of a call that one run of the executor computes. The references must outlive it.
template <class Compute>
struct Phase {
  const Problem<Compute>& problem;
  const Variant<Compute>& variant;
  const Result<Compute>& result;
  /// The sequences, with their paths. Empty: the sequences are the batch entries of q, and all take `route`.
  std::span<const Sequence> sequences{};
  Route route{};
  bool are_together =
      false;  // whether a task computes rows of all sequences: their keys lie in the same memory
  index_t shared_sequences = 0;  // for the explanation: sequences of the call with shared keys

  /// Calls f(sequence) for every sequence.
  template <class F>
  void for_each(const F& f) const {
    if (sequences.empty()) {
      for (index_t b = 0; b < problem.sequences(); ++b) f(sequence_of(problem, b));
    } else {
      for (const Sequence& sequence : sequences.first(are_together ? 1 : sequences.size())) f(sequence);
    }
  }
};

/// The sequences of a phase that take one path. Without a list of sequences, the path is that of the phase.
template <class Compute>
class PathCall {
 public:
  PathCall(const Phase<Compute>& a_phase, Path path, index_t a_threads)
      : phase(a_phase), threads(a_threads), route_{path, ""} {
    if (!is_queued()) {
      route_ = phase.route;
      count_ = phase.problem.sequences();
      rows_ = phase.problem.q.extent(2) * phase.problem.heads_per_kv_head();
      return;
    }
    for_each([&](const Sequence& sequence) {
      ++count_;
      if (rows_of(sequence) > rows_) route_.reason = sequence.reason;
      rows_ = std::max(rows_, rows_of(sequence));
    });
  }

  const Phase<Compute>& phase;
  const index_t threads;

  explicit operator bool() const { return rows_ > 0; }
  /// Returns whether tasks come from a queue of sequences.
  bool is_queued() const { return !phase.sequences.empty(); }
  /// Returns the path, and why no faster path takes the sequence with the most rows.
  const Route& route() const { return route_; }
  /// Returns the largest number of rows (queries of a kv head) that tasks compute together.
  index_t rows() const { return rows_; }
  /// Returns the number of rows that tasks compute together with those of a sequence.
  index_t rows_of(const Sequence& sequence) const {
    return sequence.queries * phase.problem.heads_per_kv_head() *
           (phase.are_together ? std::ssize(phase.sequences) : 1);
  }
  index_t blocks_of(const Sequence& sequence, index_t queries) const {
    return (rows_of(sequence) + queries - 1) / queries;
  }

  /// Calls f(sequence) for every sequence of the path.
  template <class F>
  void for_each(const F& f) const {
    phase.for_each([&](const Sequence& sequence) {
      if (!is_queued() || (sequence.path == route_.path && sequence.queries > 0)) f(sequence);
    });
  }
  /// Returns the number of query blocks of a kv head, summed over all sequences.
  index_t blocks(index_t queries) const {
    if (!is_queued()) return count_ * ((rows_ + queries - 1) / queries);
    index_t count = 0;
    for_each([&](const Sequence& sequence) { count += blocks_of(sequence, queries); });
    return count;
  }

  std::size_t queue_bytes() const {
    Arena arena;
    if (is_queued()) arena.take<QueuedSequence>(count_);
    return arena.used();
  }
  /// Returns the queue of kv heads × query blocks, in memory of queue_bytes(). On the short-keys path, where a task
  /// takes microseconds, the sequences stay in their order, because the processor prefetches neighbouring rows. In the
  /// order of their costs they take more time. Measured: docs/measured.md.
  SequenceQueue queue(std::byte* memory, index_t queries) const {
    if (!is_queued()) return {};
    SequenceQueue queue(reinterpret_cast<QueuedSequence*>(memory));
    const bool keeps_order = route_.path == Path::short_keys;
    for_each([&](const Sequence& sequence) {
      queue.add(&sequence - phase.sequences.data(), blocks_of(sequence, queries) * phase.problem.kv_heads(),
                keeps_order
                    ? 0
                    : static_cast<double>(rows_of(sequence)) * static_cast<double>(sequence.stored.size()));
    });
    queue.sort();
    return queue;
  }
  /// Returns the sequences whose rows tasks compute together with those of sequence i of the phase.
  std::span<const Sequence> together(index_t i) const {
    return phase.are_together ? phase.sequences : phase.sequences.subspan(static_cast<std::size_t>(i), 1);
  }

 private:
  Route route_;
  index_t rows_ = 0, count_ = 0;
};

SSMAX_END
