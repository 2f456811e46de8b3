// Reserves the memory of a call at once: in the caller's workspace or, without one, in the communicator's.
#pragma once

#include <optional>

#include "../../mpi_communicator.hpp"
#include "../memory/arena.hpp"
#include "agreement.hpp"

SSMAX_BEGIN_DETAIL

/// Returns Memory(arena, arguments...), which takes its arrays from the arena. A first construction counts
/// the bytes, a second one takes them from the workspace.
template <class Memory, class... Arguments>
Memory reserve(mpi::Communicator& comm, Workspace* workspace, const Arguments&... arguments) {
  Arena count;
  Memory(count, arguments...);
  Arena arena((workspace != nullptr ? *workspace : comm.buffers()).reserve(count.used()));
  return Memory(arena, arguments...);
}

/// Collective. Returns the same as reserve, and every rank throws if one rank lacks the memory.
template <class Memory, class... Arguments>
Memory reserve_on_all(mpi::Communicator& comm, const char* function, Workspace* workspace,
                      const Arguments&... arguments) {
  std::optional<Memory> memory;
  agree(comm,
        complaint_of(function, [&] { memory.emplace(reserve<Memory>(comm, workspace, arguments...)); }));
  return *memory;
}

SSMAX_END
