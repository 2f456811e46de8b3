// The driver of attention: compiled once for each operand type.
#pragma once

#include "../../../workspace.hpp"
#include "../../threads/any_executor.hpp"
#include "../call/problem.hpp"
#include "../call/variant.hpp"

SSMAX_BEGIN_COMPILED

/// Requires checked arguments. Allocates once without a workspace. E is the operand type that the call may have
/// (route.hpp, OperandsOf): A or bfloat16.
template <class E, class A>
void run_attention(const shared::Problem<A>& problem, const shared::Variant<A>& variant,
                   const shared::Result<A>& result, Workspace* workspace,
                   const shared::AnyExecutor& executor);

SSMAX_END

#if SSMAX_COMPILES_DRIVERS
#include "schedule.hpp"
#endif
