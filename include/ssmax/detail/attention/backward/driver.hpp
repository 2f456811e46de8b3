// The driver of the backward pass: compiled once for each operand type.
#pragma once

#include "../../../workspace.hpp"
#include "../../threads/any_executor.hpp"
#include "../call/backward_problem.hpp"
#include "../call/gradient_variant.hpp"

SSMAX_BEGIN_COMPILED

/// Requires checked arguments. Allocates once without a workspace. E: as for run_attention.
template <class E, class A>
void run_backward(const shared::BackwardProblem<A>& problem, const shared::GradientVariant<A>& variant,
                  Workspace* workspace, const shared::AnyExecutor& executor);

SSMAX_END

#if SSMAX_COMPILES_DRIVERS
#include "schedule.hpp"
#endif
