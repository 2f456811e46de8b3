// Runs a call of attention: makes its list, reserves its memory and computes the list's works. Each phase is one run of
// the executor. Exception: if the keys of a path are split, it is two runs.
//
// All paths of a phase share the run: decode is bound by memory and prefill by arithmetic, so threads that compute
// different paths at the same time end earlier.
#pragma once

#include <array>

#include "../../memory/slot.hpp"
#include "../terms/any_executor.hpp"
#include "driver.hpp"
#include "path_run.hpp"
#include "plan.hpp"

SSMAX_BEGIN_DETAIL

/// Computes a phase in memory of its bytes. A lane uses its scratch memory for one path at a time.
template <class Compute>
void run_phase(const PhaseRun<Compute>& phase, std::byte* memory, const AnyExecutor& executor) {
  const PhaseWorks& works = phase.works;
  std::array<Slot<PathRun<Compute>>, WorkList<Compute>::most_paths> runs;
  std::byte* waiting = memory + static_cast<std::size_t>(works.lanes) * works.lane_bytes;
  auto* slot = runs.data();
  for (const PathWorks<Compute>& path : paths_of(phase.list, works)) {
    const Split split = split_of(path, phase.problem);
    slot++->emplace(phase, path, split, reinterpret_cast<Compute*>(waiting),
                    split.chunks > 1 ? TaskPass::chunks : TaskPass::whole);
    waiting += path.waiting_bytes;
  }
  const std::span all(runs.data(), static_cast<std::size_t>(works.count));
  // Lane i begins with path i, so that lanes compute different paths at the same time.
  const auto run_lane = [&](index_t lane) {
    std::byte* const scratch = memory + static_cast<std::size_t>(lane) * works.lane_bytes;
    for (index_t i = 0; i < works.count; ++i) {
      PathRun<Compute>& run = *all[static_cast<std::size_t>((lane + i) % works.count)];
      run.works.driver->run(run, scratch);
    }
  };
  for (bool has_next = true; has_next;) {
    executor.run(works.lanes, run_lane);
    has_next = false;
    for (auto& run : all) has_next |= run->next_pass();
  }
}

SSMAX_END

SSMAX_BEGIN_COMPILED

template <class Compute>
void run_list(const shared::WorkList<Compute>& list, const shared::Problem<Compute>& problem,
              const shared::Variant<Compute>& variant, const shared::Result<Compute>& result,
              std::byte* memory, const shared::AnyExecutor& executor) {
  using namespace detail;
  if (traces_calls()) print_list(list, problem);
  Result<Compute> continued = result, shared{};
  if (list.has_groups()) {
    Arena arena(memory);
    continued.start = shared.state = take_states(arena, problem, list.shared_queries);
  }
  for (const PhaseWorks& works : std::span(list.phases, static_cast<std::size_t>(list.phase_count))) {
    const PhaseRun<Compute> phase{problem, variant, works.are_together ? shared : continued, list, works};
    detail::run_phase(phase, memory + list.state_bytes, executor);
  }
}

template <class Operand, class Compute>
void run_attention(const shared::Problem<Compute>& problem, const shared::Variant<Compute>& variant,
                   const shared::Result<Compute>& result, Workspace* workspace,
                   const shared::AnyExecutor& executor) {
  Workspace own;
  if (workspace == nullptr) workspace = &own;
  shared::WorkList<Compute> list;
  make_list<Operand>(problem, variant, result, executor.concurrency(), *workspace, list);
  std::byte* const memory = workspace->grow(detail::bytes_of(list), list.list_bytes);
  detail::Arena arena(memory);
  if (list.listed > 0) detail::take_arrays(list, arena, list.listed);
  run_list(list, problem, variant, result, memory + list.list_bytes, executor);
}

SSMAX_END
