// Runs `longcontext train` over the ranks of MPI. Losses and checkpoint are bit-identical for any number of
// ranks:
//
//     mpirun -n 4 longcontext_mpi train --text build/brown build/model
//
// Each rank has one thread. The first rank prints and saves.
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "train_command.hpp"

namespace {

// Throws unless all ranks or no ranks see the checkpoint: else some ranks would continue and others would
// start anew.
void check_that_all_see(const std::filesystem::path& path) {
  const int here = std::filesystem::exists(path) ? 1 : 0;
  int ranks = 0, seeing = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  MPI_Allreduce(&here, &seeing, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (seeing != 0 && seeing != ranks) {
    throw std::runtime_error(path.string() + " is there for " + std::to_string(seeing) + " of " +
                             std::to_string(ranks) + " ranks");
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, status = EXIT_SUCCESS;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  longcontext::TrainOptions options;
  options.threads = 1;
  options.saves = rank == 0;
  CLI::App app{"Trains a small transformer, its attention split over the ranks of MPI."};
  app.require_subcommand(1);
  longcontext::add_train(app, options).callback([&] {
    check_that_all_see(options.checkpoint);
    longcontext::run_train(options);
  });
  try {
    if (rank != 0 && std::freopen("/dev/null", "w", stdout) == nullptr) {
      throw std::runtime_error("cannot open /dev/null");
    }
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    status = rank == 0 ? app.exit(error) : error.get_exit_code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "longcontext_mpi: rank %d: %s\n", rank, error.what());
    MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);  // other ranks may wait for this one
  }
  MPI_Finalize();
  return status;
}
