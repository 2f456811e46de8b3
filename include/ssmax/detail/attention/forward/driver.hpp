// The driver of attention, for few queries and for many: compiled once for each pair of element types.
#pragma once

#include "../../../workspace.hpp"
#include "../../threads/any_executor.hpp"
#include "../call/problem.hpp"
#include "../call/variant.hpp"

SSMAX_BEGIN_COMPILED

/// Arguments have been checked. Without a workspace, one allocation.
template <class T, class X>
void run_attention(const shared::Problem<T, X>& problem, const shared::Variant<shared::Compute<T>>& variant,
                   const shared::Result<T>& result, Workspace* workspace,
                   const shared::AnyExecutor& executor);

SSMAX_END

#if SSMAX_COMPILES_DRIVERS
#include "schedule.hpp"
#endif
