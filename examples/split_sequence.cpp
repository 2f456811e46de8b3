// Causal attention with SSMax over one sequence that is split over the ranks of MPI: forward and backward.
#include <ssmax/mpi.hpp>
#include <vector>

using namespace ssmax;

bool attention_is_right() {
  constexpr index_t heads = 8, kv_heads = 2, n = 4096, d = 64;
  mpi::Communicator comm(MPI_COMM_WORLD);
  const auto layout = mpi::Layout::zigzag(n, comm.ranks());
  const index_t rows = layout.count(comm.rank());  // positions of this rank

  // The position of each row of this rank's tensors.
  std::vector<index_t> positions;
  for (const mpi::Segment& segment : layout.segments()) {
    if (segment.rank != comm.rank()) continue;
    for (index_t p = segment.begin; p < segment.end; ++p) positions.push_back(p);
  }

  // The tensors of a rank hold its own positions. s and its gradient have one number per head.
  std::vector<float> q(static_cast<std::size_t>(heads * rows * d), 0.1f), out(q), dout(q), dq(q);
  std::vector<float> k(static_cast<std::size_t>(kv_heads * rows * d), 0.2f), v(k.size(), 1.0f), dk(k), dv(k);
  std::vector<float> lse(static_cast<std::size_t>(heads * rows)), s(heads, 0.43f), ds(heads);
  const auto of_queries = [&](std::vector<float>& x) {
    return View<float, 4>(x.data(), {1, heads, rows, d});
  };
  const auto of_keys = [&](std::vector<float>& x) {
    return View<float, 4>(x.data(), {1, kv_heads, rows, d});
  };
  const View<float, 3> lse_view(lse.data(), {1, heads, rows});
  const SSMax<float> scaling{s};
  const Rope<float> rope({.width = d, .theta = 10'000}, n);
  ThreadPool pool(1);

  // clang-format off
  // Every rank makes the same calls.
  mpi::attention(
      comm, layout,
      {.q = of_queries(q), .k = of_keys(k), .v = of_keys(v), .out = of_queries(out), .lse = lse_view,
       .rope = &rope},
      scaling, Causal{}, pool);

  // Adds the gradients of all ranks to ds, on every rank.
  mpi::attention_backward(
      comm, layout,
      {.q = of_queries(q), .k = of_keys(k), .v = of_keys(v), .out = of_queries(out), .lse = lse_view,
       .rope = &rope},
      {.dout = of_queries(dout), .dq = of_queries(dq), .dk = of_keys(dk), .dv = of_keys(dv)},
      scaling.gradient(ds), Causal{}, pool);
  // clang-format on

  if (std::ssize(positions) != rows) return false;
  return rows == 0 || (out.back() > 0.9999f && out.back() < 1.0001f);  // a weighted mean of ones
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const bool is_right = attention_is_right();
  MPI_Finalize();
  return is_right ? 0 : 1;
}
