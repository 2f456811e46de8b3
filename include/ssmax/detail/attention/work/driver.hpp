// Declares the drivers of the forward pass. They are compiled once per operand type.
#pragma once

#include "../../../workspace.hpp"
#include "../terms/any_executor.hpp"
#include "../terms/variant.hpp"
#include "list.hpp"

SSMAX_BEGIN_COMPILED

/// Makes the list of a call for at most `threads` threads, with its arrays in memory of the workspace. Reads no element
/// of a tensor. Requires checked arguments. Operand is the operand type that the call may have (OperandOf in
/// desk/tensor.hpp): Compute or bfloat16.
template <class Operand, class Compute>
void make_list(const shared::Problem<Compute>& problem, const shared::Variant<Compute>& variant,
               const shared::Result<Compute>& result, index_t threads, Workspace& workspace,
               shared::WorkList<Compute>& list);

/// Computes a call with its list, in memory of `run_bytes` of the list.
template <class Compute>
void run_list(const shared::WorkList<Compute>& list, const shared::Problem<Compute>& problem,
              const shared::Variant<Compute>& variant, const shared::Result<Compute>& result,
              std::byte* memory, const shared::AnyExecutor& executor);

/// Runs a call of attention. Requires checked arguments. Allocates if `workspace` is null.
template <class Operand, class Compute>
void run_attention(const shared::Problem<Compute>& problem, const shared::Variant<Compute>& variant,
                   const shared::Result<Compute>& result, Workspace* workspace,
                   const shared::AnyExecutor& executor);

SSMAX_END

#if SSMAX_COMPILES_DRIVERS
#include "run.hpp"
#endif
