// Runs a call of attention.
#pragma once

#include "driver.hpp"
#include "sequence_run.hpp"

SSMAX_BEGIN_COMPILED

template <class Operand, class Compute>
void run_attention(const shared::Problem<Compute>& problem, const shared::Variant<Compute>& variant,
                   const shared::Result<Compute>& result, Workspace* workspace,
                   const shared::AnyExecutor& executor) {
  detail::Explainer explainer(problem.caller);
  if (problem.q.extent(2) == 0 || problem.heads_per_kv_head() == 0 || problem.sequences() == 0 ||
      problem.kv_heads() == 0) {
    if (explainer.explains) explainer.publish(Explanation());
    return;
  }
  Workspace own;
  if (workspace == nullptr) workspace = &own;
  std::size_t list_bytes = 0;
  if (detail::SequenceRun<Operand, Compute>::is_needed(problem, result)) {
    detail::SequenceRun<Operand, Compute> sequences(problem, variant, result);
    if (sequences.run(*workspace, executor, explainer)) return;
    list_bytes = sequences.list_bytes();
  }
  const detail::Phase<Compute> phase{.problem = problem,
                                     .variant = variant,
                                     .result = result,
                                     .route = detail::route(problem, result, explainer.explains)};
  detail::PhaseStep step{.workspace = explainer.only_explains ? nullptr : workspace};
  if (explainer.explains) {
    step.explainer = &explainer;
    step.workspace_bytes = std::max(list_bytes, run_phase<Operand>(phase, {}, executor));
  }
  run_phase<Operand>(phase, step, executor);
}

SSMAX_END
