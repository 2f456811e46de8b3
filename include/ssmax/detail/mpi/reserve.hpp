// The memory of a call, in one reservation: the caller's workspace or, without one, the communicator's.
#pragma once

#include "../../mpi_communicator.hpp"
#include "../memory/arena.hpp"

SSMAX_BEGIN
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// Memory(arena, arguments...) takes from the arena what it needs: once to count that, then from the workspace.
template <class Memory, class... Arguments>
Memory reserve(mpi::Communicator& comm, Workspace* workspace, const Arguments&... arguments) {
  Arena count;
  Memory(count, arguments...);
  Arena arena((workspace != nullptr ? *workspace : comm.buffers()).reserve(count.used()));
  return Memory(arena, arguments...);
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
SSMAX_END
