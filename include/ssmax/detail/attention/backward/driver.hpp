// Declares the driver of the backward pass. The driver is compiled once per operand type.
#pragma once

#include "../../../workspace.hpp"
#include "../terms/any_executor.hpp"
#include "../terms/backward_problem.hpp"
#include "../terms/gradient_variant.hpp"

SSMAX_BEGIN_COMPILED

/// Runs the backward pass of a call. Requires checked arguments. Allocates once if `workspace` is null. Operand
/// is defined as for run_attention.
template <class Operand, class Compute>
void run_backward(const shared::BackwardProblem<Compute>& problem,
                  const shared::GradientVariant<Compute>& variant, Workspace* workspace,
                  const shared::AnyExecutor& executor);

SSMAX_END

#if SSMAX_COMPILES_DRIVERS
#include "schedule.hpp"
#endif
