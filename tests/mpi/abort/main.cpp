// A score throws on the last rank in the middle of an exchange. MPI_Abort must end all ranks with the error's text.
//     mpirun -n 2 ssmax_tests_mpi_abort attention|backward|heads
#include <array>
#include <atomic>
#include <cstdio>
#include <span>
#include <ssmax/mpi.hpp>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace {

using ssmax::index_t;
using ssmax::View;

/// An identity score that throws after `calls_left` calls.
struct Throwing {
  std::atomic<index_t>* calls_left;

  template <class A>
  A operator()(A z, const ssmax::Key&) const {
    if ((*calls_left)-- <= 0) throw std::runtime_error("the score's error");
    return z;
  }
  template <class A>
  A derivative(A, const ssmax::Key&) const {
    return 1;
  }
};

void call(std::string_view what) {
  ssmax::mpi::Communicator comm(MPI_COMM_WORLD);
  const index_t n = 4096, d = 4;
  ssmax::mpi::Layout layout = ssmax::mpi::Layout::contiguous(n, comm.ranks());
  if (what == "heads") layout = layout.by_heads();
  const index_t own = layout.count(comm.rank());
  std::vector<float> rows(static_cast<std::size_t>(own * 2 * d), 1.0f),
      lse(static_cast<std::size_t>(own * 2));
  std::vector<float> out = rows, dq = rows, dk = rows, dv = rows;
  const std::array<index_t, 4> extents{1, 2, own, d};
  const View<const float, 4> in{rows.data(), extents};
  // The comparison of policies and the list of needed pieces call the score 3 times for each of 2·n queries.
  const bool is_last = comm.rank() == comm.ranks() - 1;
  std::atomic<index_t> calls_left = is_last ? 6 * n + 1000 : index_t{1} << 40;
  const Throwing score{&calls_left};
  if (what == "backward") {
    ssmax::mpi::attention_backward(
        comm, layout, {.q = in, .k = in, .v = in, .out = in, .lse = {lse.data(), {1, 2, own}}},
        {.dout = in, .dq = {dq.data(), extents}, .dk = {dk.data(), extents}, .dv = {dv.data(), extents}},
        ssmax::Softmax{}, ssmax::Causal{}, score);
  } else {
    ssmax::mpi::attention(comm, layout, {.q = in, .k = in, .v = in, .out = {out.data(), extents}},
                          ssmax::Softmax{}, ssmax::Causal{}, score);
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  try {
    call(argc > 1 ? argv[1] : "attention");
  } catch (const std::exception& error) {
    std::printf("thrown on one rank: %s\n", error.what());
  }
  MPI_Finalize();
  return 0;
}
