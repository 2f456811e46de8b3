// Computes attention, forward and backward, over one long sequence that is split over the ranks of MPI:
//
//     mpirun -n 4 ring 65536
//
// The first argument is the number of positions. Optional arguments follow: the threads per rank; 0 for no
// RoPE, whose tables take 256 bytes per position on each rank; and "heads" for the layout by heads. Each
// rank prints its memory, the bytes that it sent, its time in computation and its time in waiting. out and
// dq are bit-identical for any number of ranks, so the checksum is the same.
#include <mpi.h>
#include <sys/resource.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ssmax/mpi.hpp>
#include <string_view>
#include <type_traits>
#include <vector>

namespace {

using ssmax::index_t;
using ssmax::View;

constexpr index_t heads = 8, kv_heads = 2, d = 64;

/// Returns a number in [-1, 1) that depends only on the tensor and the element's place in the whole
/// sequence.
float number_at(std::uint64_t tensor, std::uint64_t place) {
  std::uint64_t x = (tensor << 48) ^ (place + 1) * 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return static_cast<float>(static_cast<std::int64_t>(x >> 40) - (1 << 23)) / static_cast<float>(1 << 23);
}

/// Calls f(index of an element on this rank, its place in the whole sequence).
template <class F>
void for_each_element(const ssmax::mpi::Layout& layout, int rank, index_t count_of_heads, const F& f) {
  std::size_t at = 0;
  for (index_t head = 0; head < count_of_heads; ++head) {
    for (const ssmax::mpi::Segment& segment : layout.segments()) {
      if (segment.rank != rank) continue;
      const index_t first = (head * layout.positions() + segment.begin) * d;
      for (index_t i = 0; i < segment.size() * d; ++i) f(at++, static_cast<std::uint64_t>(first + i));
    }
  }
}

/// Returns the peak memory of this process, in MiB.
double memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const index_t n = argc > 1 ? std::atoll(argv[1]) : 8192;
  const index_t threads = argc > 2 ? std::atoll(argv[2]) : 1;
  const bool rotates = argc > 3 ? std::atoi(argv[3]) != 0 : true;
  const std::string_view what_travels = argc > 4 ? argv[4] : "keys";
  const bool by_heads = what_travels == "heads";
  if (n < 1 || threads < 1 || (!by_heads && what_travels != "keys")) {
    std::fprintf(
        stderr,
        "usage: mpirun -n <ranks> ring [positions] [threads of a rank] [1: RoPE, 0: none] [keys or heads]\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  {
    ssmax::mpi::Communicator comm;
    const auto zigzag = ssmax::mpi::Layout::zigzag(n, comm.ranks());
    const auto layout = by_heads ? zigzag.by_heads() : zigzag;
    const index_t rows = layout.count(comm.rank());
    const auto share = [&](std::uint64_t tensor, index_t count_of_heads) {
      std::vector<float> values(static_cast<std::size_t>(count_of_heads * rows * d));
      for_each_element(layout, comm.rank(), count_of_heads,
                       [&](std::size_t at, std::uint64_t place) { values[at] = number_at(tensor, place); });
      return values;
    };
    const std::vector<float> q = share(1, heads), k = share(2, kv_heads), v = share(3, kv_heads),
                             dout = share(4, heads), s(heads, 0.43f);
    std::vector<float> out(q.size()), lse(static_cast<std::size_t>(heads * rows)), dq(q.size()), dk(k.size()),
        dv(v.size()), ds(heads), db(heads);
    const auto of_queries = [&](auto* data) {
      return View<std::remove_pointer_t<decltype(data)>, 4>{data, {1, heads, rows, d}};
    };
    const auto of_keys = [&](auto* data) {
      return View<std::remove_pointer_t<decltype(data)>, 4>{data, {1, kv_heads, rows, d}};
    };
    const ssmax::Rope<float> rope({.width = d, .theta = 10'000}, rotates ? n : 1);
    const ssmax::SSMax<float> scaling{s};
    ssmax::ThreadPool pool(threads);

    // Runs the call twice and prints the time of the second run. The first run touches the memory.
    const double before = memory();
    const auto measure = [&](const char* name, double products, const auto& call) {
      if (comm.rank() == 0) std::printf("%s …\n", name), std::fflush(stdout);
      call();
      MPI_Barrier(MPI_COMM_WORLD);
      const ssmax::mpi::Traffic earlier = comm.traffic();
      const double start = MPI_Wtime();
      call();
      const double own = MPI_Wtime() - start,
                   waited = comm.traffic().seconds_waiting - earlier.seconds_waiting;
      MPI_Barrier(MPI_COMM_WORLD);
      const double seconds = MPI_Wtime() - start;
      const double work =
          products * 2 * d * static_cast<double>(heads) * static_cast<double>(n) * static_cast<double>(n) / 2;
      std::printf(
          "%-8s rank %d of %d: %.3f s computing, %.3f s waiting, %.1f MiB sent, %.0f MiB of memory, "
          "%.0f of them since before the first call\n",
          name, comm.rank(), comm.ranks(), own - waited, waited,
          (comm.traffic().bytes_sent - earlier.bytes_sent) / (1 << 20), memory(), memory() - before);
      std::fflush(stdout);
      MPI_Barrier(MPI_COMM_WORLD);
      if (comm.rank() == 0) std::printf("%-8s %.3f s, %.1f GFLOP/s\n", name, seconds, work / seconds * 1e-9);
    };
    measure("forward", 2, [&] {
      ssmax::mpi::attention(comm, layout,
                            {.q = of_queries(q.data()),
                             .k = of_keys(k.data()),
                             .v = of_keys(v.data()),
                             .out = of_queries(out.data()),
                             .lse = {lse.data(), {1, heads, rows}},
                             .rope = rotates ? &rope : nullptr},
                            scaling, ssmax::Causal{}, pool);
    });
    measure("backward", 5, [&] {
      std::fill(ds.begin(), ds.end(), 0.0f);
      std::fill(db.begin(), db.end(), 0.0f);
      ssmax::mpi::attention_backward(comm, layout,
                                     {.q = of_queries(q.data()),
                                      .k = of_keys(k.data()),
                                      .v = of_keys(v.data()),
                                      .out = of_queries(out.data()),
                                      .lse = {lse.data(), {1, heads, rows}},
                                      .rope = rotates ? &rope : nullptr},
                                     {.dout = of_queries(dout.data()),
                                      .dq = of_queries(dq.data()),
                                      .dk = of_keys(dk.data()),
                                      .dv = of_keys(dv.data())},
                                     scaling.gradient(ds, db), ssmax::Causal{}, pool);
    });

    std::uint64_t sum = 0;
    for_each_element(layout, comm.rank(), heads, [&](std::size_t at, std::uint64_t place) {
      sum +=
          (place + 1) * (std::bit_cast<std::uint32_t>(out[at]) + 7ULL * std::bit_cast<std::uint32_t>(dq[at]));
    });
    MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    if (comm.rank() == 0) {
      std::printf("checksum of out and dq %016llx, ds[0] %a\n", static_cast<unsigned long long>(sum),
                  static_cast<double>(ds[0]));
    }
  }
  MPI_Finalize();
}
