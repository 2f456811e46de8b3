// Runs a call of attention: makes its list, reserves its memory and computes it.
#pragma once

#include "driver.hpp"
#include "plan.hpp"
#include "run.hpp"

SSMAX_BEGIN_COMPILED

template <class Operand, class Compute>
void run_attention(const shared::Problem<Compute>& problem, const shared::Variant<Compute>& variant,
                   const shared::Result<Compute>& result, Workspace* workspace,
                   const shared::AnyExecutor& executor) {
  Workspace own;
  if (workspace == nullptr) workspace = &own;
  shared::WorkList<Compute> list;
  make_list<Operand>(problem, variant, result, executor.concurrency(), *workspace, list);
  std::byte* const memory = workspace->grow(detail::bytes_of(list), list.list_bytes);
  detail::Arena arena(memory);
  if (list.listed > 0) detail::take_arrays(list, arena, list.listed);
  run_list(list, problem, variant, result, memory + list.list_bytes, executor);
}

SSMAX_END
