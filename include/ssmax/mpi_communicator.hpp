/// @defgroup mpi_communicator Communicators (mpi_communicator.hpp)
/// @ingroup mpi
/// The ranks that share a sequence, and what has passed between them.
#pragma once

#include <mpi.h>

#include "detail/mpi/call.hpp"
#include "workspace.hpp"

SSMAX_BEGIN_CODE
namespace mpi {
/// @addtogroup mpi_communicator
/// @{

/// What a rank has sent, and how long it has waited for others, since its Communicator was made.
struct Traffic {
  double bytes_sent = 0;       ///< Keys, values and gradients that went to other ranks.
  double seconds_waiting = 0;  ///< In which there was nothing to compute.
};

/// The ranks of an MPI communicator, by a copy of it: messages of the user's are not mixed up with the
/// library's. Calls that take one are collective, and belong to one thread (MPI_THREAD_FUNNELED); the executor's
/// threads call no MPI. MPI's errors become std::runtime_error with MPI's text. Exception: during an exchange they
/// abort (mpi.hpp).
class Communicator {
 public:
  /// Collective over `comm`. MPI must have been initialised.
  explicit Communicator(MPI_Comm comm = MPI_COMM_WORLD) {
    detail::check_mpi("MPI_Comm_dup", MPI_Comm_dup(comm, &comm_));
    detail::check_mpi("MPI_Comm_set_errhandler", MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
    detail::check_mpi("MPI_Comm_rank", MPI_Comm_rank(comm_, &rank_));
    detail::check_mpi("MPI_Comm_size", MPI_Comm_size(comm_, &ranks_));
  }
  /// Collective, unless MPI has been finalised.
  ~Communicator() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized == 0) MPI_Comm_free(&comm_);
  }
  /// Not copied.
  Communicator(const Communicator&) = delete;
  /// Not copied.
  Communicator& operator=(const Communicator&) = delete;

  /// This rank.
  [[nodiscard]] int rank() const { return rank_; }
  /// How many there are.
  [[nodiscard]] int ranks() const { return ranks_; }
  /// The copy.
  [[nodiscard]] MPI_Comm handle() const { return comm_; }
  /// What has passed so far.
  [[nodiscard]] const Traffic& traffic() const { return traffic_; }
  /// For the functions of mpi.hpp, which count here.
  [[nodiscard]] Traffic& traffic() { return traffic_; }
  /// For the functions of mpi.hpp: their buffers, where no workspace is handed in. Kept from call to call.
  [[nodiscard]] Workspace& buffers() { return buffers_; }
  /// The same: what kernels need, which is little. A call computes in many steps, and this is theirs.
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
