// Runs the same tests in the same order on every rank.
#include <mpi.h>

#include "../run_tests.hpp"
#include "mpi_problem.hpp"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int failed = 1;
  {
    mpi_problem::world();
    failed = run_tests(argc, argv);
  }
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return failed != 0 ? 1 : 0;
}
