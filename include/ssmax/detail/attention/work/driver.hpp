// Declares the driver of the forward pass. The driver is compiled once per operand type.
#pragma once

#include "../../../workspace.hpp"
#include "../terms/any_executor.hpp"
#include "../terms/problem.hpp"
#include "../terms/variant.hpp"

SSMAX_BEGIN_COMPILED

/// Runs a call of attention. Requires checked arguments. Allocates once if `workspace` is null. Operand is the
/// operand type that the call may have (route.hpp, OperandsOf): Compute or bfloat16.
template <class Operand, class Compute>
void run_attention(const shared::Problem<Compute>& problem, const shared::Variant<Compute>& variant,
                   const shared::Result<Compute>& result, Workspace* workspace,
                   const shared::AnyExecutor& executor);

SSMAX_END

#if SSMAX_COMPILES_DRIVERS
#include "schedule.hpp"
#endif
