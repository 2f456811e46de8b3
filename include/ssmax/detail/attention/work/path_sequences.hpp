// Lists the sequences of a call that take one path. A sequence takes the same path as in a call of its own.
#pragma once

#include <algorithm>

#include "../../memory/arena.hpp"
#include "../terms/sequences.hpp"
#include "../terms/variant.hpp"
#include "route.hpp"

SSMAX_BEGIN_DETAIL

/// The call of one sequence. Tasks hold references to it.
template <class Compute>
struct SequenceCall {
  Problem<Compute> problem;
  Result<Compute> result;

  SequenceCall(const Problem<Compute>& whole, const Result<Compute>& results, index_t sequence)
      : problem(of_sequence(whole, sequence)), result(of_sequence(results, whole.lengths, sequence)) {}
};

/// The sequences of a call that take one path. Empty if the call has no sequence lengths.
template <class Compute>
class PathSequences {
 public:
  PathSequences() = default;
  PathSequences(const Problem<Compute>& problem, const Result<Compute>& result, Path path, bool explains)
      : problem_(&problem), result_(&result), path_(path) {
    for_each([&](index_t, const Problem<Compute>& sequence) {
      if (sequence.rows() > max_rows_ && explains) reason_ = route(sequence, result, true).reason;
      max_rows_ = std::max(max_rows_, sequence.rows());
    });
  }

  explicit operator bool() const { return max_rows_ > 0; }
  /// Calls f(sequence, its problem) for every sequence of the path.
  template <class F>
  void for_each(const F& f) const {
    for_each_sequence(*problem_, problem_->lengths, [&](index_t b, const Problem<Compute>& sequence) {
      if (sequence.rows() > 0 && route(sequence, *result_).path == path_) f(b, sequence);
    });
  }
  /// Returns the number of rows (queries of a kv head) of the sequence with the most rows.
  index_t max_rows() const { return max_rows_; }
  /// Returns why no faster path takes the sequence with the most rows.
  const char* reason() const { return reason_; }
  /// Returns the number of query blocks of a kv head, summed over all sequences.
  index_t blocks(index_t queries) const {
    index_t count = 0;
    for_each([&](index_t, const Problem<Compute>& sequence) { count += blocks_of(sequence, queries); });
    return count;
  }
  std::size_t queue_bytes() const {
    Arena arena;
    if (max_rows_ > 0) arena.take<QueuedSequence>(problem_->entries());
    return arena.used();
  }
  /// Returns the queue of kv heads × query blocks, in memory of queue_bytes(). On the short-keys path, where a task
  /// takes microseconds, the sequences stay in their order, because the processor prefetches neighbouring rows. In the
  /// order of their costs, 512 packed sequences of 16 to 128 tokens take 5 to 18 % more time. This was measured from
  /// memory, on two threads of an Intel Xeon with AMX, as the best of 21 calls in five runs.
  SequenceQueue queue(std::byte* memory, index_t queries, index_t kv_heads) const {
    if (max_rows_ == 0) return {};
    SequenceQueue queue(reinterpret_cast<QueuedSequence*>(memory));
    for_each([&](index_t b, const Problem<Compute>& sequence) {
      queue.add(b, blocks_of(sequence, queries) * kv_heads,
                path_ == Path::short_keys
                    ? 0
                    : static_cast<double>(sequence.rows()) * static_cast<double>(sequence.stored(b).size()));
    });
    queue.sort();
    return queue;
  }

 private:
  static index_t blocks_of(const Problem<Compute>& sequence, index_t queries) {
    return (sequence.rows() + queries - 1) / queries;
  }
  const Problem<Compute>* problem_ = nullptr;
  const Result<Compute>* result_ = nullptr;
  Path path_ = Path::none;
  index_t max_rows_ = 0;
  const char* reason_ = "";
};

/// A call on one path. Exception: if the sequences of the call have their own lengths, the sequences that take the
/// path. The references must outlive it.
template <class Compute>
struct PathCall {
  const Problem<Compute>& problem;
  const Variant<Compute>& variant;
  const Result<Compute>& result;
  index_t threads;
  Route route;
  PathSequences<Compute> sequences;

  PathCall(const Problem<Compute>& a_problem, const Variant<Compute>& a_variant,
           const Result<Compute>& a_result, index_t a_threads, const Route& a_route,
           const PathSequences<Compute>& of = {})
      : problem(a_problem),
        variant(a_variant),
        result(a_result),
        threads(a_threads),
        route(a_route),
        sequences(of) {}

  /// Returns the largest number of rows of a kv head.
  index_t rows() const { return sequences ? sequences.max_rows() : problem.rows(); }
};

SSMAX_END
