// Masks with runs over ranks: bit-identical to one process. Ranks do not send keys outside all runs.

#include <mpi.h>

#include <ssmax/mpi.hpp>

#include "../test.hpp"
#include "mpi_problem.hpp"

namespace {

std::int64_t sent_bytes = 0;

}  // namespace

/// Counts the bytes that the library sends.
extern "C" int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
                         MPI_Request* request) {
  int size = 0;
  MPI_Type_size(type, &size);
  sent_bytes += std::int64_t{count} * size;
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}

namespace mpi_problem::mpi_mask_runs_test {

using ssmax::BlockSparse, ssmax::SlidingWindow, ssmax::SparseBlocks;

template <class T, class M>
void check_bits(const Problem<T>& problem, const Layout& layout, const M& mask,
                const AttentionOptions<T>& options = {}) {
  using A = attention_problem::Compute<T>;
  const std::vector<A> s(static_cast<std::size_t>(problem.shape.heads), A(0.4));
  std::vector<A> ds(s.size()), ds_here(s.size());
  const SSMax<A> scaling{s};
  const Output<T> output = run<T>(problem, scaling, mask, Identity{}, options);
  const Result<T> whole = backward<T>(problem, output, scaling.gradient(ds), mask, Identity{}, options);
  Share<T> share(problem, layout, world().rank());
  ssmax::mpi::attention<A>(world(), layout, share.forward(options), scaling, mask);
  ssmax::mpi::attention_backward<A>(world(), layout, share.backward(options), share.gradients(),
                                    scaling.gradient(ds_here), mask);
  share.check(problem, output, whole, layout);
  CHECK(everywhere(same_bits(ds_here, ds)));
}

TEST_CASE("masks with runs are bit-identical to one process", "[mpi][backward]") {
  const int ranks = world().ranks();
  const index_t n = 4 * 2048 + 300;
  const ssmax::Rope<float> rope({.width = 8}, n);
  const Problem<float> problem({1, 2, 1, n, n, 8, 8});
  for (const Layout& layout : {Layout::zigzag(n, ranks), Layout::contiguous(n, ranks)}) {
    check_bits<float>(problem, layout, SlidingWindow{511, 0, 4}, {.rope = &rope});
  }
  // Every third block of 1024 keys, shifted by the query block. The two heads see different blocks.
  const SparseBlocks blocks{
      .query_block = 512, .key_block = 1024, .query_blocks = 17, .key_blocks = 9, .bitmaps = 2};
  std::vector<std::uint64_t> bitmap(static_cast<std::size_t>(blocks.words()));
  for (std::size_t row = 0; row < bitmap.size(); ++row) bitmap[row] = 0b001001001u << row % 3 & 0x1FF;
  bitmap[5] = 0;  // queries that see no key
  check_bits<float>(problem, Layout::contiguous(n, ranks), BlockSparse(blocks, bitmap));
  check_bits<float>(problem, Layout::zigzag(n, ranks), Causal{} & BlockSparse(blocks, bitmap),
                    {.rope = &rope});
  const index_t shorter = 2 * 2048 + 100;
  // With 15 heads, segments begin at multiples of 240 rows, as dk and dv of the bf16 path require.
  const Problem<ssmax::bfloat16> narrow({1, 15, 1, shorter, shorter, 8, 8});
  check_bits<ssmax::bfloat16>(narrow, Layout::contiguous(shorter, ranks), SlidingWindow{199, 0, 4});
}

TEST_CASE("keys outside all runs are not sent", "[mpi]") {
  const int ranks = world().ranks();
  const index_t n = 2048 * ranks;
  const Shape shape{1, 1, 1, n, n, 4, 4};
  const Problem<float> problem(shape);
  const Layout layout = Layout::contiguous(n, ranks, 2048);
  // The queries of a rank see its own keys and the keys of the rank after the next one.
  const SparseBlocks blocks{
      .query_block = 2048, .key_block = 2048, .query_blocks = ranks, .key_blocks = ranks};
  std::vector<std::uint64_t> bitmap(static_cast<std::size_t>(blocks.words()));
  for (int r = 0; r < ranks; ++r)
    bitmap[static_cast<std::size_t>(r)] = std::uint64_t{1} << r | std::uint64_t{1} << (r + 2) % ranks;
  const BlockSparse mask(blocks, bitmap);
  const Output<float> whole = run<float>(problem, ssmax::Softmax{}, mask, Identity{}, {});
  Share<float> share(problem, layout, world().rank());
  const std::int64_t before = sent_bytes;
  ssmax::mpi::attention(world(), layout, share.forward(), ssmax::Softmax{}, mask);
  const std::int64_t sent = sent_bytes - before;
  const index_t row = (shape.d + shape.dv) * static_cast<index_t>(sizeof(float));
  CHECK(everywhere(sent == (ranks > 2 ? 2048 * row : 0)));
  CHECK(everywhere(same_bits(share.out, share_of(whole.out, 1, shape.dv, layout, world().rank()))));
}

}  // namespace mpi_problem::mpi_mask_runs_test
