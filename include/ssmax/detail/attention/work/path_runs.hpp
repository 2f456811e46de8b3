// Runs a phase: the paths that its sequences take share the runs of the executor.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <tuple>
#include <type_traits>

#include "../../../workspace.hpp"
#include "../../memory/slot.hpp"
#include "../forward/decode.hpp"
#include "../forward/decode_bf16.hpp"
#include "../forward/prefill.hpp"
#include "../terms/any_executor.hpp"
#include "explain.hpp"
#include "phase.hpp"
#include "short_run.hpp"
#include "task_run.hpp"

SSMAX_BEGIN_DETAIL

/// The runs of the paths with operands of type Operand that the sequences of a phase take.
template <class Operand, class Compute>
class PathRuns {
 public:
  PathRuns(const Phase<Compute>& phase, const AnyExecutor& executor) {
    // 1. Find the paths.
    const auto* path = paths.data();
    std::apply([&](auto&... slots) { (find(phase, *path++, executor.concurrency(), slots), ...); }, runs_);
    const auto is_other = [](Path taken) { return is_bf16(taken) == std::same_as<Operand, Compute>; };
    has_others_ = phase.sequences.empty()
                      ? is_other(phase.route.path)
                      : std::any_of(phase.sequences.begin(), phase.sequences.end(),
                                    [&](const Sequence& s) { return s.queries > 0 && is_other(s.path); });
    // 2. Count lanes and bytes. A lane uses its scratch memory for one path at a time.
    index_t pieces = 0;
    for_each([&](auto& run) {
      ++count_;
      pieces += run.pieces();
      lane_bytes_ = std::max(lane_bytes_, run.lane_bytes());
      common_bytes_ = add_bytes(common_bytes_, run.common_bytes());
    });
    lanes_ = std::min(executor.concurrency(), pieces);
  }

  /// Returns whether some sequences take a path with the other operand type.
  bool has_others() const { return has_others_; }
  std::size_t bytes() const { return add_bytes(all_lane_bytes(), common_bytes_); }

  /// Publishes an explanation of every path.
  void explain(Explainer& explainer, std::size_t workspace_bytes) {
    for_each([&](auto& run) {
      Explanation e;
      run.explain(e);
      e.threads = lanes_;
      e.workspace_bytes = workspace_bytes;
      explainer.set<Compute>(run.call().route(), run.call().rows());
      explainer.publish(e);
    });
  }

  /// Computes all paths in memory of bytes(). The executor runs once. Exception: if the keys of a path are split, it
  /// runs twice.
  void run(std::byte* memory, const AnyExecutor& executor) {
    std::byte* common = memory + all_lane_bytes();
    for_each([&](auto& run) {
      run.bind(common);
      common += run.common_bytes();
    });
    // Lane i begins with path i, so that lanes compute different paths at the same time.
    const auto run_lane = [&](index_t lane) {
      std::byte* const scratch = memory + static_cast<std::size_t>(lane) * lane_bytes_;
      const index_t first = lane % count_;
      for (index_t i = 0; i < count_; ++i) {
        index_t skipped = first + i < count_ ? first + i : first + i - count_;
        for_each([&](auto& run) {
          if (skipped-- == 0) run.run(scratch);
        });
      }
    };
    bool has_next = count_ > 0;
    while (has_next) {
      executor.run(lanes_, run_lane);
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

  /// The paths of `runs_`, in its order.
  static constexpr std::array<Path, 3> paths =
      std::same_as<Operand, Compute> ? std::array{Path::short_keys, Path::decode, Path::prefill}
                                     : std::array{Path::decode_bf16, Path::prefill_bf16, Path::none};
  static bool is_bf16(Path path) { return path == Path::prefill_bf16 || path == Path::decode_bf16; }

  template <class Run>
  static void find(const Phase<Compute>& phase, Path path, index_t threads, Slot<Run>& run) {
    if (phase.sequences.empty() && phase.route.path != path) return;
    if (const PathCall<Compute> call(phase, path, threads); call) run.emplace(call);
  }
  /// Calls f for every run.
  template <class F>
  void for_each(const F& f) {
    std::apply([&](auto&... runs) { ((runs ? f(*runs) : void()), ...); }, runs_);
  }
  std::size_t all_lane_bytes() const { return multiply_bytes(static_cast<std::size_t>(lanes_), lane_bytes_); }

  std::conditional_t<std::same_as<Operand, Compute>, OtherRuns, Bf16Runs> runs_;
  bool has_others_ = false;
  index_t count_ = 0, lanes_ = 0;
  std::size_t lane_bytes_ = 0, common_bytes_ = 0;
};

/// The work of run_phase besides counting bytes.
struct PhaseStep {
  Workspace* workspace = nullptr;  // if given, run_phase computes the phase in this memory, from `offset` on
  std::size_t offset = 0;
  Explainer* explainer = nullptr;   // if given, run_phase explains the phase
  std::size_t workspace_bytes = 0;  // for the explanation: of the whole call
};

SSMAX_END

SSMAX_BEGIN_COMPILED

/// Returns the bytes of memory that a phase needs. Explains and computes the phase as `step` says.
template <class Operand, class Compute>
std::size_t run_phase(const detail::Phase<Compute>& phase, const detail::PhaseStep& step,
                      const shared::AnyExecutor& executor) {
  detail::PathRuns<Operand, Compute> runs(phase, executor);
  std::size_t bytes = runs.bytes();
  if (step.explainer != nullptr) runs.explain(*step.explainer, step.workspace_bytes);
  Workspace list_memory;  // keeps the sequences of the phase where they are
  if (step.workspace != nullptr) {
    const std::size_t end = detail::add_bytes(step.offset, bytes);
    list_memory = step.workspace->grow(end);
    runs.run(step.workspace->reserve(end) + step.offset, executor);
  }
  if constexpr (!std::same_as<Operand, Compute>) {
    // Both operand types use the same memory, one after the other.
    if (runs.has_others()) bytes = std::max(bytes, run_phase<Compute>(phase, step, executor));
  }
  return bytes;
}

SSMAX_END
