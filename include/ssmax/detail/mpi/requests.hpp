// Defines Requests and Outgoing, which start nonblocking messages and wait for them.
#pragma once

#include <limits>
#include <thread>
#include <vector>

#include "../../mpi_layout.hpp"
#include "../checks/error.hpp"

SSMAX_BEGIN_DETAIL

/// A helper that starts nonblocking messages and waits for them. While it waits, it yields the processor to
/// other ranks on the same machine.
class Requests {
 public:
  explicit Requests(mpi::Communicator& comm) : comm_(comm) {}
  Requests(const Requests&) = delete;
  Requests& operator=(const Requests&) = delete;

  /// Returns a number of bytes or rows as the int that MPI takes. Throws if the number is too large.
  static int count(std::size_t number) {
    if (number > static_cast<std::size_t>(std::numeric_limits<int>::max())) {
      fail_format("ssmax::mpi: a message has %zu bytes or rows, MPI counts up to %d", number,
                  std::numeric_limits<int>::max());
    }
    return static_cast<int>(number);
  }

  MPI_Request send(const void* data, std::size_t size, int to, int tag) {
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi("MPI_Isend", MPI_Isend(data, count(size), MPI_BYTE, to, tag, comm_.handle(), &request));
    comm_.traffic().bytes_sent += static_cast<double>(size);
    return request;
  }
  MPI_Request receive(void* data, std::size_t size, int from, int tag) {
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi("MPI_Irecv", MPI_Irecv(data, count(size), MPI_BYTE, from, tag, comm_.handle(), &request));
    return request;
  }
  /// Returns true if the request is complete. The request is then null.
  static bool test(MPI_Request& request) {
    int done = 0;
    check_mpi("MPI_Test", MPI_Test(&request, &done, MPI_STATUS_IGNORE));
    return done != 0;
  }
  /// Waits until done() returns true. The time counts as waiting.
  template <class Done>
  void wait(const Done& done) {
    if (done()) return;
    const double start = MPI_Wtime();
    while (!done()) std::this_thread::yield();
    comm_.traffic().seconds_waiting += MPI_Wtime() - start;
  }

 private:
  mpi::Communicator& comm_;
};

/// A set of requests. The function `done` removes the completed requests.
class Outgoing {
 public:
  void add(MPI_Request request) { requests_.push_back(request); }
  bool done() {
    if (requests_.empty()) return true;
    int count = 0;
    finished_.resize(requests_.size());
    check_mpi("MPI_Testsome", MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count,
                                           finished_.data(), MPI_STATUSES_IGNORE));
    if (count != 0) std::erase(requests_, MPI_REQUEST_NULL);
    return requests_.empty();
  }

 private:
  std::vector<MPI_Request> requests_;
  std::vector<int> finished_;
};

SSMAX_END
