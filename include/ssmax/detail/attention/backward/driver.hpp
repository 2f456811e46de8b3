// Declares the driver of the backward pass. The driver is compiled once per operand type.
#pragma once

#include "../../../workspace.hpp"
#include "../terms/any_executor.hpp"
#include "../terms/backward_problem.hpp"
#include "../terms/variant.hpp"
#include "../work/list.hpp"

SSMAX_BEGIN_COMPILED

/// Makes the list of a backward pass for at most `threads` threads, with its arrays in memory of the workspace. Reads
/// no element of a tensor. Requires checked arguments.
template <class Operand, class Compute>
void make_backward_list(const shared::BackwardProblem<Compute>& problem,
                        const shared::GradientVariant<Compute>& variant, index_t threads,
                        Workspace& workspace, shared::WorkList<Compute>& list);

/// Computes a backward pass with its list, in memory of `run_bytes` of the list.
template <class Operand, class Compute>
void run_backward_list(const shared::WorkList<Compute>& list, const shared::BackwardProblem<Compute>& problem,
                       const shared::GradientVariant<Compute>& variant, std::byte* memory,
                       const shared::AnyExecutor& executor);

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
