/// @defgroup mpi_communicator Communicators (mpi_communicator.hpp)
/// @ingroup mpi
/// The ranks that share a sequence, and statistics of what they exchanged.
#pragma once

#include <mpi.h>

#include "detail/checks/mpi.hpp"
#include "workspace.hpp"

SSMAX_BEGIN_CODE
namespace mpi {
/// @addtogroup mpi_communicator
/// @{

/// The bytes that a rank has sent and the time that it has waited since its Communicator was made.
struct Traffic {
  double bytes_sent = 0;       ///< Bytes of keys, values and gradients sent to other ranks.
  double seconds_waiting = 0;  ///< Time without work to compute, in s.
};

/// The ranks of an MPI communicator. The constructor duplicates the communicator, so the library's messages do not
/// mix with yours. Functions that take a Communicator are collective. Call them from one thread
/// (MPI_THREAD_FUNNELED): the threads of the executor do not call MPI. An MPI error throws std::runtime_error with
/// MPI's text. Exception: an error during an exchange aborts (mpi.hpp).
class Communicator {
 public:
  /// Duplicates `comm`. Collective over `comm`. Requires that MPI is initialised.
  explicit Communicator(MPI_Comm comm = MPI_COMM_WORLD) {
    detail::check_mpi("MPI_Comm_dup", MPI_Comm_dup(comm, &comm_));
    detail::check_mpi("MPI_Comm_set_errhandler", MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
    detail::check_mpi("MPI_Comm_rank", MPI_Comm_rank(comm_, &rank_));
    detail::check_mpi("MPI_Comm_size", MPI_Comm_size(comm_, &ranks_));
  }
  /// Frees the duplicate. Collective. Exception: after MPI_Finalize, it does not call MPI.
  ~Communicator() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized == 0) MPI_Comm_free(&comm_);
  }
  /// Deleted.
  Communicator(const Communicator&) = delete;
  /// Deleted.
  Communicator& operator=(const Communicator&) = delete;

  /// Returns the index of this rank.
  [[nodiscard]] int rank() const { return rank_; }
  /// Returns the number of ranks.
  [[nodiscard]] int ranks() const { return ranks_; }
  /// Returns the duplicate of the communicator.
  [[nodiscard]] MPI_Comm handle() const { return comm_; }
  /// Returns the statistics so far.
  [[nodiscard]] const Traffic& traffic() const { return traffic_; }
  /// Returns the statistics, for the functions of mpi.hpp, which update them.
  [[nodiscard]] Traffic& traffic() { return traffic_; }
  /// Returns the buffers of the functions of mpi.hpp for calls without a workspace. Calls reuse the buffers.
  [[nodiscard]] Workspace& buffers() { return buffers_; }
  /// Returns the scratch memory of the kernels, which every step of a call reuses.
  [[nodiscard]] Workspace& scratch() { return scratch_; }

 private:
  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, ranks_ = 1;
  Traffic traffic_{};
  Workspace buffers_, scratch_;
};

/// @}
}  // namespace mpi

SSMAX_END
