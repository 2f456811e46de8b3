// The memory of a call, in one reservation: the caller's workspace or, without one, the communicator's.
#pragma once

#include <optional>

#include "../../mpi_communicator.hpp"
#include "../memory/arena.hpp"
#include "agreement.hpp"

SSMAX_BEGIN_DETAIL

/// Memory(arena, arguments...) takes from the arena what it needs: once to count that, then from the workspace.
template <class Memory, class... Arguments>
Memory reserve(mpi::Communicator& comm, Workspace* workspace, const Arguments&... arguments) {
  Arena count;
  Memory(count, arguments...);
  Arena arena((workspace != nullptr ? *workspace : comm.buffers()).reserve(count.used()));
  return Memory(arena, arguments...);
}

/// The same. Collective: every rank throws if one rank lacks the memory.
template <class Memory, class... Arguments>
Memory reserve_on_all(mpi::Communicator& comm, const char* function, Workspace* workspace,
                      const Arguments&... arguments) {
  std::optional<Memory> memory;
  agree(comm,
        complaint_of(function, [&] { memory.emplace(reserve<Memory>(comm, workspace, arguments...)); }));
  return *memory;
}

SSMAX_END
