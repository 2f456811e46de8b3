// Runs the backward pass of a call.
#pragma once

#include "driver.hpp"
#include "sequences.hpp"

SSMAX_BEGIN_DETAIL

template <class E, class A>
void run_backward_with(const BackwardProblem<A>& problem, const GradientVariant<A>& variant,
                       Workspace& workspace, const AnyExecutor& executor, const Explainer& explainer) {
  if (is_empty(problem)) {
    if (explainer.explains) explainer.publish(Explanation());
    return;
  }
  const BackwardRun<E, A> run(problem, variant, variant.sharing(problem.forward.shape(0)),
                              executor.concurrency());
  const SumsMemory<A> sums_memory(problem, variant);
  const std::size_t all_bytes = add_bytes(run.bytes(), sums_memory.bytes());
  if (explainer.explains) {
    explainer.publish(explanation_of(run, run.tasks(), run.lanes(), all_bytes));
  }
  std::byte* memory = workspace.reserve(all_bytes);
  const CallSums sums = sums_memory.in(memory + run.bytes());
  run.run(memory, sums, executor);
  if (sums_memory.is_needed()) hand_over(problem, variant, sums);
}

SSMAX_END

SSMAX_BEGIN_COMPILED

template <class E, class A>
void run_backward(const shared::BackwardProblem<A>& problem, const shared::GradientVariant<A>& variant,
                  Workspace* workspace, const shared::AnyExecutor& executor) {
  const detail::Route route = detail::route_backward(problem);
  if constexpr (!std::same_as<E, A>) {
    if (route.path != Path::backward_bf16) {
      run_backward<A>(problem, variant, workspace, executor);
      return;
    }
  }
  detail::Explainer explainer(problem.forward.caller);
  explainer.set<A>(route, problem.forward.rows());
  Workspace own;
  if (workspace == nullptr) workspace = &own;
  if (problem.forward.lengths.is_given()) {
    detail::run_backward_sequences<E>(problem, variant, *workspace, executor, explainer);
  } else {
    detail::run_backward_with<E>(problem, variant, *workspace, executor, explainer);
  }
}

SSMAX_END
