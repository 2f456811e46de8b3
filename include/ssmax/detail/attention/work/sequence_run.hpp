// Runs a call whose sequences differ: lists and routes them, computes the keys that several of them share once, and
// continues from there.
#pragma once

#include <algorithm>
#include <span>

#include "path_runs.hpp"
#include "shared_keys.hpp"

SSMAX_BEGIN_DETAIL

/// The sequences of a call that have their own lengths or may have shared keys, and the phases that compute them.
template <class Operand, class Compute>
class SequenceRun {
 public:
  SequenceRun(const Problem<Compute>& problem, const Variant<Compute>& variant, const Result<Compute>& result)
      : problem_(problem), variant_(variant), result_(result) {}

  /// Returns whether the sequences of a call must be listed.
  static bool is_needed(const Problem<Compute>& problem, const Result<Compute>& result) {
    return problem.lengths.is_given() || SharedKeyGroups<Compute>::may_share(problem, result);
  }

  /// Computes the call. Returns false, and has no effect, if the sequences need no list.
  bool run(Workspace& workspace, const AnyExecutor& executor, Explainer& explainer) {
    const bool may_share = SharedKeyGroups<Compute>::may_share(problem_, result_);
    // 1. List and route the sequences, and find those with shared keys.
    Arena count;
    list(count, may_share, explainer.explains);
    list_bytes_ = count.used();
    Arena arena(workspace.reserve(list_bytes_));
    list(arena, may_share, explainer.explains);
    const bool shares = may_share && !groups_->is_empty();
    if (!shares && !problem_.lengths.is_given()) return false;
    // 2. Reserve memory for the list, the states after shared keys, and the largest phase.
    std::size_t bytes = 0;
    if (shares) {
      // The source of a planned call may have no shared keys.
      if (explainer.only_explains) bytes = run_phase(rest(result_), {}, executor);
      groups_->narrow(sequences_, result_, explainer.explains);
      take_states(count, problem_, groups_->most_queries());
    }
    if (shares || explainer.explains)
      for_each_phase(
          {}, [&](const Phase<Compute>& phase) { bytes = std::max(bytes, run_phase(phase, {}, executor)); });
    bytes = add_bytes(count.used(), bytes);
    // 3. Explain.
    if (explainer.explains) {
      const PhaseStep step{.explainer = &explainer, .workspace_bytes = bytes};
      if (!has_rows_) explainer.publish(Explanation());
      for_each_phase({}, [&](const Phase<Compute>& phase) { run_phase(phase, step, executor); });
      if (explainer.only_explains) return true;
    }
    // 4. Compute.
    const Workspace list_memory = workspace.grow(bytes);
    Arena reserved(workspace.reserve(bytes));
    reserved.take<std::byte>(static_cast<index_t>(list_bytes_));
    const auto states =
        shares ? take_states(reserved, problem_, groups_->most_queries()) : AttentionState<Compute>{};
    const PhaseStep step{.workspace = &workspace, .offset = count.used()};
    for_each_phase(states, [&](const Phase<Compute>& phase) { run_phase(phase, step, executor); });
    return true;
  }

  /// Returns the bytes of the list of sequences, after a call of `run`.
  std::size_t list_bytes() const { return list_bytes_; }

 private:
  /// Lists and routes the sequences. Without a block of memory, counts its bytes.
  void list(Arena& arena, bool may_share, bool explains) {
    const index_t count = problem_.sequences();
    auto* const sequences = arena.take<Sequence>(count);
    if (sequences != nullptr) {
      sequences_ = {sequences, static_cast<std::size_t>(count)};
      for (index_t b = 0; b < count; ++b) {
        Sequence& sequence = sequences[b] = sequence_of(problem_, b);
        if (sequence.queries == 0) continue;
        has_rows_ = true;
        const Route route = detail::route(problem_, result_, sequence, 1, explains);
        sequence.path = route.path;
        sequence.reason = route.reason;
      }
    }
    if (may_share) groups_.emplace(arena, problem_, sequences_);
  }

  /// Calls f(phase) for the groups of sequences with shared keys, which write `states`, and for all other keys.
  template <class F>
  void for_each_phase(const AttentionState<Compute>& states, const F& f) {
    if (!groups_ || groups_->is_empty()) return f(rest(result_));
    const Result<Compute> shared{.state = states};
    for (index_t i = 0; i < groups_->size(); ++i) {
      f(Phase<Compute>{.problem = problem_,
                       .variant = variant_,
                       .result = shared,
                       .sequences = groups_->sequences(i),
                       .are_together = true,
                       .shared_sequences = groups_->shared_sequences()});
    }
    Result<Compute> continued = result_;
    continued.start = states;
    f(rest(continued));
  }
  Phase<Compute> rest(const Result<Compute>& result) {
    return {.problem = problem_,
            .variant = variant_,
            .result = result,
            .sequences = sequences_,
            .shared_sequences = groups_ ? groups_->shared_sequences() : 0};
  }
  static std::size_t run_phase(const Phase<Compute>& phase, const PhaseStep& step,
                               const AnyExecutor& executor) {
    return compiled::run_phase<Operand>(phase, step, executor);
  }

  const Problem<Compute>& problem_;
  const Variant<Compute>& variant_;
  const Result<Compute>& result_;
  std::span<Sequence> sequences_{};
  Slot<SharedKeyGroups<Compute>> groups_;
  std::size_t list_bytes_ = 0;
  bool has_rows_ = false;
};

SSMAX_END
