// Reserves the memory of a call at once: in the caller's workspace or, without one, in the communicator's.
#pragma once

#include <optional>

#include "../../mpi_layout.hpp"
#include "../memory/arena.hpp"
#include "agreement.hpp"

SSMAX_BEGIN_DETAIL

/// Returns Memory(arena, arguments...), which takes its arrays from the arena. A first construction counts
/// the bytes, a second one takes them from the workspace.
template <class Memory, class Call, class... Arguments>
Memory reserve(const Call& call, const Arguments&... arguments) {
  Arena count;
  Memory(count, arguments...);
  Workspace& workspace = call.a.workspace != nullptr ? *call.a.workspace : call.comm.buffers();
  Arena arena(workspace.reserve(count.used()));
  return Memory(arena, arguments...);
}

/// Collective. Returns the same as reserve, and every rank throws if one rank lacks the memory.
template <class Memory, class Call, class... Arguments>
Memory reserve_on_all(const Call& call, const Arguments&... arguments) {
  std::optional<Memory> memory;
  agree(call.comm, complaint_of(call.function, [&] { memory.emplace(reserve<Memory>(call, arguments...)); }));
  return *memory;
}

SSMAX_END
