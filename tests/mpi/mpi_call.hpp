// A call over ranks whose arguments a test changes on one rank, and a check of the error on all ranks.
#pragma once

#include <ssmax/mpi.hpp>

#include "../refusal.hpp"
#include "../test.hpp"
#include "mpi_problem.hpp"

namespace mpi_problem::mpi_call {

/// Valid arguments of a call with 40 positions. Tests change the arguments on one rank.
struct Call {
  index_t batch = 1;
  Problem<double> problem{{batch, 2, 1, 40, 40, 4, 4}};
  Layout layout = Layout::contiguous(40, world().ranks(), 1);
  Share<double> share{problem, layout, world().rank()};
  AttentionArguments<double> arguments = share.forward();
  bool accumulate = false;

  template <class S, class M, class C = Identity>
  void attention(const S& scaling, const M& mask, const C& score = {},
                 const AttentionOptions<double>& options = {}) {
    ssmax::mpi::attention<double>(world(), layout, with(arguments, options), scaling, mask, score);
  }
  template <class S, class M, class C = Identity>
  void attention_backward(const S& scaling, const M& mask, const C& score = {},
                          const AttentionOptions<double>& options = {}) {
    ssmax::mpi::attention_backward<double>(world(), layout, backward_with(share.backward(), options),
                                           {.dout = share.of_queries(share.dout.data(), 4),
                                            .dq = share.of_queries(share.dq.data(), 4),
                                            .dk = share.of_keys(share.dk.data(), 4),
                                            .dv = share.of_keys(share.dv.data(), 4),
                                            .accumulate = accumulate},
                                           scaling, mask, score);
  }
  template <class M = Full, class C = Identity>
  std::string refused(const M& mask = {}, const C& score = {}, const AttentionOptions<double>& options = {}) {
    return refusal([&] { attention(Softmax{}, mask, score, options); });
  }
  std::string refused_backward(const AttentionOptions<double>& options = {}) {
    return refusal([&] { attention_backward(Softmax{}, Full{}, Identity{}, options); });
  }
};

inline bool is_last() { return world().rank() == world().ranks() - 1; }

/// Checks that all ranks have the same message with these words, and that `out` is unchanged.
inline void check_refused_alike(const Call& call, const std::string& message,
                                std::initializer_list<const char*> words) {
  std::array<char, 600> text{};
  message.copy(text.data(), text.size() - 1);
  MPI_Bcast(text.data(), static_cast<int>(text.size()), MPI_CHAR, 0, MPI_COMM_WORLD);
  CHECK(everywhere(message == text.data()));
  for (const char* word : words) {
    INFO(message);
    CHECK(everywhere(mentions(message, word)));
  }
  bool untouched = true;
  for (const double x : call.share.out) untouched = untouched && x == -77;
  CHECK(everywhere(untouched));
}

}  // namespace mpi_problem::mpi_call
