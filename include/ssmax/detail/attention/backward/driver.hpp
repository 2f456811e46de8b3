// The driver of attention's backward: compiled once for each element type.
#pragma once

#include "../../../workspace.hpp"
#include "../../threads/any_executor.hpp"
#include "../call/backward_problem.hpp"
#include "../call/gradient_variant.hpp"

SSMAX_BEGIN_COMPILED

/// Arguments have been checked. Without a workspace, one allocation.
template <class T>
void run_backward(const shared::BackwardProblem<T>& problem,
                  const shared::GradientVariant<shared::Compute<T>>& variant, Workspace* workspace,
                  const shared::AnyExecutor& executor);

SSMAX_END

#if SSMAX_COMPILES_DRIVERS
#include "schedule.hpp"
#endif
