// Runs the backward pass of a call.
#pragma once

#include "driver.hpp"
#include "sequences.hpp"

SSMAX_BEGIN_DETAIL

template <class Operand, class Compute>
void run_backward_with(const BackwardProblem<Compute>& problem, const GradientVariant<Compute>& variant,
                       Workspace& workspace, const AnyExecutor& executor, const Route& route) {
  const Problem<Compute>& forward = problem.forward;
  const index_t entries = forward.sequences();
  const BackwardSequence first = entries > 0 ? sequence_of(problem, 0) : BackwardSequence{};
  if (forward.kv_heads() == 0 || is_empty(first)) {
    if (is_explained(forward.caller)) publish(problem, Route{}, Explanation());
    return;
  }
  const BackwardRun<Operand, Compute> run(problem, variant, first, entries, variant.sharing(first.shape),
                                          executor.concurrency());
  const SumsMemory<Compute> sums_memory(problem, variant);
  const std::size_t all_bytes = add_bytes(run.bytes(), sums_memory.bytes());
  if (is_explained(forward.caller))
    publish(problem, route, explanation_of(run, run.tasks(), run.lanes(), all_bytes));
  std::byte* memory = workspace.reserve(all_bytes);
  const CallSums sums = sums_memory.in(memory + run.bytes());
  run.run(memory, sums, executor);
  if (sums_memory.is_needed()) hand_over(problem, variant, sums);
}

SSMAX_END

SSMAX_BEGIN_COMPILED

template <class Operand, class Compute>
void run_backward(const shared::BackwardProblem<Compute>& problem,
                  const shared::GradientVariant<Compute>& variant, Workspace* workspace,
                  const shared::AnyExecutor& executor) {
  const detail::Route route = detail::route_backward(problem);
  if constexpr (!std::same_as<Operand, Compute>) {
    if (route.path != Path::backward_bf16) {
      run_backward<Compute>(problem, variant, workspace, executor);
      return;
    }
  }
  Workspace own;
  if (workspace == nullptr) workspace = &own;
  if (problem.forward.lengths.is_given())
    return detail::run_backward_sequences<Operand>(problem, variant, *workspace, executor, route);
  detail::run_backward_with<Operand>(problem, variant, *workspace, executor, route);
}

SSMAX_END
