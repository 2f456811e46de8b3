// Every member of the arguments on every function over ranks: the call takes the member, or throws with its name on
// every rank.

#include <ssmax/mpi.hpp>

#include "../options_table.hpp"
#include "mpi_problem.hpp"

namespace mpi_problem::mpi_options_test {

using namespace options_table;

/// The functions over ranks, with n positions on each.
struct Call : Tensors {
  const EveryIndex mask{};
  const LogN scaling{};
  const index_t all = n * world().ranks();
  const Layout layout = Layout::contiguous(all, world().ranks(), 1);

  void views(const Arguments& options) {
    ssmax::mpi::attention(world(), layout, of_views(options), scaling, mask);
  }
  void source(const Arguments& options) {
    ssmax::mpi::attention(world(), layout, all, of_cache(options), scaling, mask);
  }
  void backward(const Arguments& options) {
    views({.lse = rows(lse)});
    ssmax::mpi::attention_backward(world(), layout, of_backward(options), gradients(!options.sinks.empty()),
                                   scaling, mask);
  }
};

TEST_CASE("each function over ranks takes a member or throws with its name", "[mpi][errors]") {
  check_options<Call>(
      {{"mpi_views", &Call::views}, {"mpi_source", &Call::source}, {"mpi_backward", &Call::backward}});
}

}  // namespace mpi_problem::mpi_options_test
