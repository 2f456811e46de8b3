// Declares the driver of the forward pass. The driver is compiled once per operand type.
#pragma once

#include "../../../workspace.hpp"
#include "../../threads/any_executor.hpp"
#include "../call/problem.hpp"
#include "../call/variant.hpp"

SSMAX_BEGIN_COMPILED

/// Runs a call of attention. Requires checked arguments. Allocates once if `workspace` is null. E is the operand
/// type that the call may have (route.hpp, OperandsOf): A or bfloat16.
template <class E, class A>
void run_attention(const shared::Problem<A>& problem, const shared::Variant<A>& variant,
                   const shared::Result<A>& result, Workspace* workspace,
                   const shared::AnyExecutor& executor);

SSMAX_END

#if SSMAX_COMPILES_DRIVERS
#include "schedule.hpp"
#endif
