// Runs a call of attention: the paths that its sequences take share the runs of the executor, and keys that sequences
// share are computed once.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <tuple>
#include <type_traits>

#include "../../memory/slot.hpp"
#include "../forward/decode.hpp"
#include "../forward/decode_bf16.hpp"
#include "../forward/prefill.hpp"
#include "driver.hpp"
#include "explain.hpp"
#include "path_sequences.hpp"
#include "shared_keys.hpp"
#include "short_run.hpp"
#include "task_run.hpp"

SSMAX_BEGIN_DETAIL

/// The runs of the paths with operands of type Operand that a call takes.
template <class Operand, class Compute>
class PathRuns {
 public:
  /// Adds a path that has not been added. `call` must outlive the runs.
  void add(const PathCall<Compute>& call) {
    const Path path = call.route.path;
    if constexpr (std::same_as<Operand, Compute>) {
      if (path == Path::short_keys) {
        std::get<0>(runs_).emplace(call);
      } else if (path == Path::decode) {
        std::get<1>(runs_).emplace(call);
      } else {
        std::get<2>(runs_).emplace(call);
      }
    } else if (path == Path::decode_bf16) {
      std::get<0>(runs_).emplace(call);
    } else {
      std::get<1>(runs_).emplace(call);
    }
  }

  bool is_empty() const {
    return std::apply([](const auto&... runs) { return (!runs && ...); }, runs_);
  }

  /// Computes all paths. The executor runs once. Exception: if the keys of a path are split, it runs twice.
  void run(Workspace& workspace, const AnyExecutor& executor, Explainer& explainer) {
    // 1. Count lanes and bytes. A lane uses its scratch memory for one path at a time.
    index_t count = 0, pieces = 0;
    std::size_t lane_bytes = 0, common_bytes = 0;
    for_each([&](auto& run) {
      ++count;
      pieces += run.pieces();
      lane_bytes = std::max(lane_bytes, run.lane_bytes());
      common_bytes = add_bytes(common_bytes, run.common_bytes());
    });
    const index_t lanes = std::min(executor.concurrency(), pieces);
    const std::size_t all_lane_bytes = multiply_bytes(static_cast<std::size_t>(lanes), lane_bytes);
    const std::size_t bytes = add_bytes(all_lane_bytes, common_bytes);
    if (explainer.explains) {
      for_each([&](auto& run) {
        Explanation e;
        run.explain(e);
        e.threads = lanes;
        e.workspace_bytes = bytes;
        explainer.set<Compute>(run.call().route, run.call().rows());
        explainer.publish(e);
      });
      if (explainer.only_explains) return;
    }
    // 2. Reserve memory.
    std::byte* const memory = workspace.reserve(bytes);
    std::byte* common = memory + all_lane_bytes;
    for_each([&](auto& run) {
      run.bind(common);
      common += run.common_bytes();
    });
    // 3. Compute. Lane i begins with path i, so that lanes compute different paths at the same time.
    const auto run_lane = [&](index_t lane) {
      std::byte* const scratch = memory + static_cast<std::size_t>(lane) * lane_bytes;
      const index_t first = lane % count;
      for (index_t i = 0; i < count; ++i) {
        index_t skipped = first + i < count ? first + i : first + i - count;
        for_each([&](auto& run) {
          if (skipped-- == 0) run.run(scratch);
        });
      }
    };
    bool has_next = true;
    while (has_next) {
      executor.run(lanes, run_lane);
      has_next = false;
      for_each([&](auto& run) { has_next |= run.next_pass(); });
    }
  }

 private:
  template <class... Runs>
  using Slots = std::tuple<Slot<Runs>...>;
  template <class Task>
  using Tasks = TaskRun<Task, Compute>;
  using Bf16Runs = Slots<Tasks<DecodeBf16Task<Compute, Operand>>, Tasks<PrefillTask<Compute, Operand>>>;
  using OtherRuns = Slots<ShortRun<Compute>, Tasks<DecodeTask<Compute>>, Tasks<PrefillTask<Compute>>>;

  /// Calls f for every run.
  template <class F>
  void for_each(const F& f) {
    std::apply([&](auto&... runs) { ((runs ? f(*runs) : void()), ...); }, runs_);
  }

  std::conditional_t<std::same_as<Operand, Compute>, OtherRuns, Bf16Runs> runs_;
};

/// Returns whether the operands of a path are of type Operand, in a call that computes in Compute.
template <class Operand, class Compute>
constexpr bool has_operands(Path path) {
  return (path == Path::prefill_bf16 || path == Path::decode_bf16) != std::same_as<Operand, Compute>;
}

/// The paths of a call: at most three have the same operand type.
template <class Compute>
using PathCalls = std::array<Slot<PathCall<Compute>>, 3>;

/// Adds the paths with operands of type Operand that sequences take. Returns whether some sequences take a path with
/// the other operand type.
template <class Operand, class Compute>
bool add_paths_of_sequences(PathRuns<Operand, Compute>& runs, PathCalls<Compute>& calls,
                            const Problem<Compute>& problem, const Variant<Compute>& variant,
                            const Result<Compute>& result, index_t threads, bool explains) {
  bool has_others = false;
  auto* call = calls.data();
  for (const Path path :
       {Path::short_keys, Path::decode, Path::prefill, Path::decode_bf16, Path::prefill_bf16}) {
    const PathSequences<Compute> sequences(problem, result, path, explains);
    if (!sequences) continue;
    if (!has_operands<Operand, Compute>(path)) {
      has_others = true;
      continue;
    }
    const Route route{path, sequences.reason()};
    runs.add((call++)->emplace(problem, variant, result, threads, route, sequences));
  }
  return has_others;
}

/// Returns the bytes of a workspace that a call needs.
template <class Operand, class Compute>
std::size_t workspace_bytes(Problem<Compute> problem, const Variant<Compute>& variant,
                            const Result<Compute>& result, const AnyExecutor& executor) {
  Explanation explanation;
  problem.caller.explanation = &explanation;
  problem.caller.only_explains = true;
  compiled::run_attention<Operand>(problem, variant, result, nullptr, executor);
  return explanation.workspace_bytes;
}

/// Computes a call whose sequences may have shared keys. Returns false, and has no effect, if no sequence has.
template <class Operand, class Compute>
bool run_shared(const Problem<Compute>& problem, const Variant<Compute>& variant,
                const Result<Compute>& result, Workspace& workspace, const AnyExecutor& executor) {
  // 1. Find the groups of sequences.
  using Groups = SharedKeyGroups<Compute>;
  Arena count;
  const Groups counted(count, problem);
  std::byte* memory = workspace.reserve(count.used());
  Arena first(memory);
  Groups groups(first, problem);
  if (groups.is_empty()) return false;
  // 2. Reserve memory for the groups, the states and the largest pass.
  take_states(count, problem, groups.most_queries());
  std::size_t pass_bytes = workspace_bytes<Operand>(groups.of_other_keys(), variant, result, executor);
  for (index_t i = 0; i < groups.size(); ++i)
    pass_bytes =
        std::max(pass_bytes, workspace_bytes<Operand>(groups.of_group(i), variant, result, executor));
  const Caller& caller = problem.caller;
  if (caller.only_explains) {
    // The source of a planned call may have no shared keys.
    Problem<Compute> unshared = problem;
    unshared.shared.is_searched = true;
    pass_bytes = std::max(pass_bytes, workspace_bytes<Operand>(unshared, variant, result, executor));
    compiled::run_attention<Operand>(groups.of_other_keys(), variant, result, nullptr, executor);
    caller.explanation->workspace_bytes = add_bytes(count.used(), pass_bytes);
    return true;
  }
  std::byte* const reserved = workspace.reserve(add_bytes(count.used(), pass_bytes));
  Arena arena(reserved);
  if (reserved != memory) {
    groups = Groups(arena, problem);
  } else {
    arena.take<std::byte>(static_cast<index_t>(first.used()));
  }
  // 3. Compute the states after the shared keys, and continue from them.
  const index_t queries = groups.most_queries();
  const AttentionState<Compute> states = take_states(arena, problem, queries);
  SoftmaxState<Compute>{states.shift.data_handle(), states.sum.data_handle(), states.o.data_handle()}.reset(
      states.shift.size(), problem.value_width());
  Workspace rest(std::span(reserved + count.used(), pass_bytes));
  for (index_t i = 0; i < groups.size(); ++i)
    compiled::run_attention<Operand>(groups.of_group(i), variant, Result<Compute>{.state = states}, &rest,
                                     executor);
  Result<Compute> continued = result;
  continued.start = states;
  compiled::run_attention<Operand>(groups.of_other_keys(), variant, continued, &rest, executor);
  if (caller.explanation != nullptr)
    caller.explanation->workspace_bytes = add_bytes(count.used(), pass_bytes);
  return true;
}

SSMAX_END

SSMAX_BEGIN_COMPILED

template <class Operand, class Compute>
void run_attention(const shared::Problem<Compute>& problem, const shared::Variant<Compute>& variant,
                   const shared::Result<Compute>& result, Workspace* workspace,
                   const shared::AnyExecutor& executor) {
  detail::Explainer explainer(problem.caller);
  if (problem.rows() == 0 || problem.entries() == 0 || problem.kv_heads() == 0) {
    if (explainer.explains) explainer.publish(Explanation());
    return;
  }
  Workspace own;
  if (workspace == nullptr) workspace = &own;
  if (detail::SharedKeyGroups<Compute>::may_share(problem, result) &&
      detail::run_shared<Operand>(problem, variant, result, *workspace, executor))
    return;
  bool is_others = false;  // whether a path needs operands Compute in place of Operand
  detail::PathRuns<Operand, Compute> runs;
  detail::PathCalls<Compute> calls;
  const index_t threads = executor.concurrency();
  if (problem.lengths.is_given()) {
    is_others =
        detail::add_paths_of_sequences(runs, calls, problem, variant, result, threads, explainer.explains);
  } else {
    const detail::Route route = detail::route(problem, result, explainer.explains);
    is_others = !detail::has_operands<Operand, Compute>(route.path);
    if (!is_others) runs.add(calls[0].emplace(problem, variant, result, threads, route));
  }
  if (!runs.is_empty()) {
    runs.run(*workspace, executor, explainer);
  } else if (!is_others && explainer.explains) {
    explainer.publish(Explanation());
  }
  if constexpr (!std::same_as<Operand, Compute>) {
    if (!is_others) return;
    shared::Problem<Compute> others = problem;
    others.shared.is_searched = true;
    Explanation* const explanation = problem.caller.explanation;
    const std::size_t bytes = explanation != nullptr && !runs.is_empty() ? explanation->workspace_bytes : 0;
    run_attention<Compute>(others, variant, result, workspace, executor);
    // Both operand types use the same memory, one after the other.
    if (explanation != nullptr) explanation->workspace_bytes = std::max(explanation->workspace_bytes, bytes);
  }
}

SSMAX_END
