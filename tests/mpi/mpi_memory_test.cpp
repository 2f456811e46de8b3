// Memory that a rank allocates beyond its inputs and outputs stays within the bound in docs/cluster.md.

#include <ssmax/mpi.hpp>

#include "../allocation_count.hpp"
#include "mpi_problem.hpp"

namespace mpi_problem::mpi_memory_test {

constexpr double MiB = 1 << 20;

/// Returns the total allocations of a call in MiB, an upper bound for its peak.
template <class Call>
double allocated(const Call& call) {
  const long long before = allocated_bytes();
  call();
  return static_cast<double>(allocated_bytes() - before) / MiB;
}

TEST_CASE("a rank allocates at most two copies of its K and V and 64 MiB", "[mpi][backward][memory]") {
  const int ranks = world().ranks(), rank = world().rank();
  if (ranks == 1) return;  // attention of one process
  // K and V take 128 MiB / ranks on each rank. The window shortens the test; allocations do not depend on it.
  const index_t n = 32768, heads = 8, d = 64;
  const Layout layout = Layout::zigzag(n, ranks);
  const index_t rows = layout.count(rank);
  const auto elements = static_cast<std::size_t>(heads * rows * d);
  const std::vector<float> in(elements, 0.1f), s(heads, 0.4f);
  std::vector<float> out(elements), lse(static_cast<std::size_t>(heads * rows)), dq(elements), dk(elements),
      dv(elements), ds(heads), db(heads);
  const auto view = [&](auto* data) {
    return View<std::remove_pointer_t<decltype(data)>, 4>{data, {1, heads, rows, d}};
  };
  const View<float, 3> lse_view{lse.data(), {1, heads, rows}};
  const SSMax<float> scaling{s};
  const SlidingWindow window{64};

  const double bytes_of_key = 4 * 2.0 * heads * d, piece = 2048 * bytes_of_key / MiB,
               share = static_cast<double>(rows) * bytes_of_key / MiB,
               of_queries = static_cast<double>(heads * rows) / MiB, scratch = 2,
               lists = 0.5;  // lists of pieces and messages, sums of one head
  double largest_share = share;
  for (int r = 0; r < ranks; ++r) {
    largest_share = std::max(largest_share, static_cast<double>(layout.count(r)) * bytes_of_key / MiB);
  }
  REQUIRE(piece == 8);

  std::size_t scratch_bytes = 0;
  const double forward = allocated([&] {
    Communicator comm(MPI_COMM_WORLD);  // with new buffers
    comm.scratch().reserve(2 << 20);    // keeps this size
    ssmax::mpi::attention(comm, layout,
                          {.q = view(in.data()),
                           .k = view(in.data()),
                           .v = view(in.data()),
                           .out = view(out.data()),
                           .lse = lse_view},
                          scaling, window);
  });
  CAPTURE(rank, share, forward);
  CHECK(everywhere(forward <= share + 2 * piece + 8 * of_queries + scratch + lists));
  CHECK(everywhere(forward <= 2 * share + 64));

  const double backward = allocated([&] {
    Communicator comm(MPI_COMM_WORLD);
    comm.scratch().reserve(2 << 20);
    ssmax::mpi::attention_backward(
        comm, layout,
        {.q = view(in.data()),
         .k = view(in.data()),
         .v = view(in.data()),
         .out = view(static_cast<const float*>(out.data())),
         .lse = lse_view},
        {.dout = view(in.data()), .dq = view(dq.data()), .dk = view(dk.data()), .dv = view(dv.data())},
        scaling.gradient(ds, db), window);
    scratch_bytes = comm.scratch().size();
  });
  CAPTURE(backward);
  CHECK(everywhere(backward <=
                   share + std::max(32.0, largest_share) + 4 * piece + 32 * of_queries + scratch + lists));
  CHECK(everywhere(backward <= 2 * share + 64));
  CHECK(everywhere(scratch_bytes == 2 << 20));
}

/// Returns the allocations in MiB of forward, backward and decode with the workspace.
template <class T>
double allocated_with(ssmax::Workspace& workspace, Communicator& comm, const Problem<T>& problem,
                      Layout layout) {
  const Shape& shape = problem.shape;
  const auto heads = static_cast<std::size_t>(shape.heads);
  const std::vector<float> s(heads, 0.4f), sinks(heads, 0.5f);
  std::vector<float> ds(heads), db(heads), decoded(heads * static_cast<std::size_t>(shape.dv));
  const SSMax<float> scaling{s};
  const SlidingWindow window{64};
  const AttentionOptions<T> options{.sinks = sinks, .workspace = &workspace};
  Share<T> share(problem, layout, comm.rank());
  ssmax::KvCache<float> cache({.kv_heads = shape.kv_heads,
                               .width = shape.d,
                               .capacity = std::max<index_t>(1, layout.count(comm.rank()))});
  const std::vector<float> in(static_cast<std::size_t>(shape.kv_heads * shape.keys * shape.d), 0.1f);
  const View<const float, 4> keys{in.data(), {1, shape.kv_heads, shape.keys, shape.d}};
  ssmax::mpi::append(cache, layout, comm.rank(), 0, keys, keys);
  return allocated([&] {
    ssmax::mpi::attention(comm, layout, share.forward(options), scaling, window);
    ssmax::mpi::attention_backward(comm, layout, share.backward(options), share.gradients(true),
                                   scaling.gradient(ds, db), window);
    ssmax::mpi::attention(comm, layout, shape.keys,
                          {.q = {in.data(), {1, shape.heads, 1, shape.d}},
                           .keys = cache,
                           .out = {decoded.data(), {1, shape.heads, 1, shape.dv}},
                           .workspace = &workspace},
                          scaling, Causal{});
  });
}

TEST_CASE("a second call with a workspace allocates only small lists",
          "[mpi][backward][heads][decode][memory]") {
  if (world().ranks() == 1) return;
  const index_t n = 4096;
  const Problem<float> wide({1, 8, 8, n, n, 64, 64});
  const Problem<ssmax::half> narrow({1, 8, 8, n, n, 64, 64});
  const Layout layout = Layout::contiguous(n, world().ranks(), 512);
  const auto check = [](const auto& problem, const Layout& by) {
    Communicator comm(MPI_COMM_WORLD);
    ssmax::Workspace workspace;
    const double first = allocated_with(workspace, comm, problem, by);
    const double second = allocated_with(workspace, comm, problem, by);
    CAPTURE(first, second);
    CHECK(everywhere(first > 4));
    CHECK(everywhere(second < 0.25));
    CHECK(everywhere(comm.buffers().size() == 0));
  };
  check(wide, layout);
  check(wide, layout.by_heads());
  check(narrow, layout);
}

}  // namespace mpi_problem::mpi_memory_test
