// Declares the driver of the backward pass. The driver is compiled once per operand type.
#pragma once

#include "../../../workspace.hpp"
#include "../../threads/any_executor.hpp"
#include "../call/backward_problem.hpp"
#include "../call/gradient_variant.hpp"

SSMAX_BEGIN_COMPILED

/// Runs the backward pass of a call. Requires checked arguments. Allocates once if `workspace` is null. E is defined
/// as for run_attention.
template <class E, class A>
void run_backward(const shared::BackwardProblem<A>& problem, const shared::GradientVariant<A>& variant,
                  Workspace* workspace, const shared::AnyExecutor& executor);

SSMAX_END

#if SSMAX_COMPILES_DRIVERS
#include "schedule.hpp"
#endif
