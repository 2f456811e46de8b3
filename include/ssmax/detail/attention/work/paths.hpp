// The table of paths. A new path is a file in forward/ and a row here.
#pragma once

#include <span>

#include "../forward/decode.hpp"
#include "../forward/decode_bf16.hpp"
#include "../forward/prefill.hpp"
#include "short_run.hpp"
#include "task_run.hpp"

SSMAX_BEGIN_DETAIL

template <class Compute, class Task>
constexpr PathDriver<Compute> path_of_tasks(Path path) {
  return {path, false, blocks_of_tasks<Task>, sizes_of_tasks<Task, Compute>, run_tasks<Task, Compute>};
}

SSMAX_END

SSMAX_BEGIN_COMPILED

/// Returns the paths with operands of type Operand.
template <class Operand, class Compute>
std::span<const shared::PathDriver<Compute>> paths_with() {
  using namespace detail;
  if constexpr (std::same_as<Operand, Compute>) {
    static constexpr PathDriver<Compute> table[] = {
        {Path::short_keys, true, blocks_of_tiles<Compute>, sizes_of_tiles<Compute>, run_tiles<Compute>},
        path_of_tasks<Compute, DecodeTask<Compute>>(Path::decode),
        path_of_tasks<Compute, PrefillTask<Compute>>(Path::prefill)};
    return table;
  } else {
    static constexpr PathDriver<Compute> table[] = {
        path_of_tasks<Compute, DecodeBf16Task<Compute, Operand>>(Path::decode_bf16),
        path_of_tasks<Compute, PrefillTask<Compute, Operand>>(Path::prefill_bf16)};
    return table;
  }
}

SSMAX_END
