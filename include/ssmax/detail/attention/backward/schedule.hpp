// Makes the list of a backward pass and computes it.
#pragma once

#include "driver.hpp"
#include "plan.hpp"

SSMAX_BEGIN_COMPILED

template <class Operand, class Compute>
void make_backward_list(const shared::BackwardProblem<Compute>& problem,
                        const shared::GradientVariant<Compute>& variant, index_t threads,
                        Workspace& workspace, shared::WorkList<Compute>& list) {
  const detail::Route route = detail::route_backward(problem);
  if constexpr (!std::same_as<Operand, Compute>) {
    if (route.path != Path::backward_bf16)
      return make_backward_list<Compute>(problem, variant, threads, workspace, list);
  }
  detail::BackwardListMaker<Operand, Compute> maker(list, problem, variant, threads, route);
  maker.fill(workspace.reserve(list.list_bytes));
}

template <class Operand, class Compute>
void run_backward_list(const shared::WorkList<Compute>& list, const shared::BackwardProblem<Compute>& problem,
                       const shared::GradientVariant<Compute>& variant, std::byte* memory,
                       const shared::AnyExecutor& executor) {
  using namespace detail;
  if constexpr (!std::same_as<Operand, Compute>) {
    if (list.path_count > 0 && list.paths[0].driver->path != Path::backward_bf16)
      return run_backward_list<Compute>(list, problem, variant, memory, executor);
  }
  if (traces_calls()) print(explanation_of(list, problem));
  if (list.phase_count == 0) return;
  const SumsMemory<Compute> sums_memory(problem, variant);
  // The sums lie after the memory of the phases.
  Arena arena(memory + (list.run_bytes - list.state_bytes));
  const CallSums sums = sums_memory.in(arena);
  for (const PhaseWorks& phase : std::span(list.phases, static_cast<std::size_t>(list.phase_count))) {
    BackwardPhase<Operand, Compute>(problem, variant, list, phase, sums, memory, executor).run();
  }
  if (sums_memory.is_needed()) hand_over(problem, variant, sums);
}

template <class Operand, class Compute>
void run_backward(const shared::BackwardProblem<Compute>& problem,
                  const shared::GradientVariant<Compute>& variant, Workspace* workspace,
                  const shared::AnyExecutor& executor) {
  const detail::Route route = detail::route_backward(problem);
  if constexpr (!std::same_as<Operand, Compute>) {
    if (route.path != Path::backward_bf16)
      return run_backward<Compute>(problem, variant, workspace, executor);
  }
  Workspace own;
  if (workspace == nullptr) workspace = &own;
  shared::WorkList<Compute> list;
  detail::BackwardListMaker<Operand, Compute> maker(list, problem, variant, executor.concurrency(), route);
  std::byte* const memory = workspace->reserve(detail::bytes_of(list));
  maker.fill(memory);
  run_backward_list<Operand>(list, problem, variant, memory + list.list_bytes, executor);
}

SSMAX_END
