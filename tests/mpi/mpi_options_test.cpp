// Every option on every function over ranks: the call takes the option, or throws with its name on every rank.

#include <ssmax/mpi.hpp>

#include "../options_table.hpp"
#include "mpi_problem.hpp"

namespace mpi_problem::mpi_options_test {

using namespace options_table;

/// The functions over ranks, with n positions on each.
struct Call : Tensors {
  Layout layout = Layout::contiguous(n * world().ranks(), world().ranks(), 1);

  void attention(const Options& options) {
    ssmax::mpi::attention(
        world(), layout,
        with({.q = view(q), .k = view(q), .v = view(q), .out = view(out), .lse = rows(lse)}, options));
  }
  void backward(const Options& options) {
    attention({});
    ssmax::mpi::attention_backward(
        world(), layout,
        backward_with({.q = view(q), .k = view(q), .v = view(q), .out = view(out), .lse = rows(lse)},
                      options),
        {.dout = view(gradient), .dq = view(dq), .dk = view(dk), .dv = view(dv)});
  }
  void decoded(const Options& options) {
    ssmax::mpi::attention(world(), layout, n * world().ranks(),
                          with({.q = view(q), .keys = cache, .out = view(out)}, options), Causal{});
  }
};

TEST_CASE("each function over ranks takes an option or throws with its name", "[mpi][errors]") {
  check_options<Call>({{"mpi_attention", &Call::attention},
                       {"mpi_backward", &Call::backward},
                       {"mpi_decode", &Call::decoded}});
}

}  // namespace mpi_problem::mpi_options_test
