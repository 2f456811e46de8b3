// Decodes where each rank stores the keys of its own positions. Each rank computes the states of its own
// chunks. All ranks then merge the states of all chunks in the order of the keys.
#pragma once

#include <algorithm>
#include <limits>
#include <span>
#include <vector>

#include "../attention/forward/epilogue.hpp"
#include "../attention/work/driver.hpp"
#include "exchange.hpp"
#include "reserve.hpp"
#include "share.hpp"

SSMAX_BEGIN_DETAIL

/// A source of keys that holds one chunk of one rank's keys. Keys [keys.begin, keys.end) of the sequence are
/// stored in `cache` from `row` on.
template <class K>
struct ChunkOfKeys {
  using Element = SourceKey<K>;
  using ValueElement = SourceValue<K>;

  const K& cache;
  index_t length_of_sequence, row;
  KeyRange keys;

  KeySourceShape shape() const { return cache.shape(); }
  index_t length(index_t) const { return length_of_sequence; }
  KeyRange stored(index_t) const { return keys; }
  SourceRun<K> run(index_t batch, index_t kv_head, index_t key) const {
    SourceRun<K> run = cache.run(batch, kv_head, row + key - keys.begin);
    run.count = std::min(run.count, keys.end - key);
    return run;
  }
};

/// Returns the chunks of the first `length` positions, in order. Chunks end at multiples of key_chunk, at the
/// ends of segments and at `length`.
inline std::vector<Piece> chunks_of(const mpi::Layout& layout, index_t length) {
  std::vector<Piece> chunks;
  std::vector<index_t> rows(static_cast<std::size_t>(layout.ranks()));
  for (const mpi::Segment& segment : layout.segments()) {
    index_t& row = rows[static_cast<std::size_t>(segment.rank)];
    for (index_t begin = segment.begin; begin < std::min(segment.end, length);) {
      const index_t end = std::min({segment.end, length, (begin / key_chunk + 1) * key_chunk});
      chunks.push_back({{begin, end, segment.rank}, row});
      row += end - begin;
      begin = end;
    }
  }
  return chunks;
}

/// The states of all chunks, and the merged state.
template <class Compute>
struct SpreadMemory {
  SpreadMemory(Arena& arena, index_t chunks, index_t size)
      : states(arena.take<Compute>(chunks * size)), sums(arena.take<Compute>(size)) {}

  Compute *states, *sums;
};

template <class T, class K>
void spread_decode(mpi::Communicator& comm, const mpi::Layout& layout, const Problem<ComputeType<T>>& whole,
                   const K& cache, index_t length, const Variant<ComputeType<T>>& variant,
                   const Result<ComputeType<T>>& result, Workspace* workspace, const AnyExecutor& executor) {
  using Compute = ComputeType<T>;
  const index_t batch = whole.q.extent(0), heads = whole.q.extent(1), queries = whole.q.extent(2),
                dv = whole.value_width(), rows = batch * heads * queries;
  const std::vector<Piece> chunks = chunks_of(layout, length);
  // Layout of the states: rank by rank, chunk by chunk. A state is shift [rows], sum [rows], o [rows][dv].
  const index_t size = rows * (dv + 2);
  std::vector<int> bytes(static_cast<std::size_t>(comm.ranks())), first(bytes.size());
  for (const Piece& chunk : chunks) {
    bytes[static_cast<std::size_t>(chunk.keys.rank)] +=
        Requests::count(static_cast<std::size_t>(size) * sizeof(Compute));
  }
  for (std::size_t r = 1; r < bytes.size(); ++r) first[r] = first[r - 1] + bytes[r - 1];
  const auto state_at = [&](Compute* at) {
    return AttentionState<Compute>{{at, {batch, heads, queries}},
                                   {at + rows, {batch, heads, queries}},
                                   addressable(View<Compute, 4>{at + 2 * rows, {batch, heads, queries, dv}})};
  };
  const auto place_of = [&](Compute* states, int rank) {
    return states + first[static_cast<std::size_t>(rank)] / static_cast<int>(sizeof(Compute));
  };
  Compute *states = nullptr, *sums = nullptr;
  agree(comm, complaint_of("mpi::decode", [&] {
          const auto memory = reserve<SpreadMemory<Compute>>(comm, workspace, std::ssize(chunks), size);
          states = memory.states;
          sums = memory.sums;
          Compute* next = place_of(states, comm.rank());
          for (const Piece& chunk : chunks) {
            if (chunk.keys.rank != comm.rank()) continue;
            const ChunkOfKeys<K> keys{cache, length, chunk.row, {chunk.keys.begin, chunk.keys.end}};
            compiled::run_attention<SourceOperands<T, K>>(with_keys(whole, keys), variant,
                                                          make_state_result(state_at(next), false),
                                                          &comm.scratch(), executor);
            next += size;
          }
        }));
  const double start = MPI_Wtime();
  check_mpi("MPI_Allgatherv", MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, states, bytes.data(),
                                             first.data(), MPI_BYTE, comm.handle()));
  comm.traffic().seconds_waiting += MPI_Wtime() - start;
  comm.traffic().bytes_sent +=
      static_cast<double>(bytes[static_cast<std::size_t>(comm.rank())]) * (comm.ranks() - 1);

  const AttentionState<Compute> total = state_at(sums);
  std::fill_n(sums, rows, -std::numeric_limits<Compute>::infinity());
  std::fill_n(sums + rows, size - rows, Compute{0});
  std::vector<Compute*> at;
  for (int r = 0; r < comm.ranks(); ++r) at.push_back(place_of(states, r));
  for (const Piece& chunk : chunks) {
    Compute*& state = at[static_cast<std::size_t>(chunk.keys.rank)];
    merge_state(total, state_at(state));
    state += size;
  }
  for (index_t b = 0; b < batch; ++b) {
    for (index_t h = 0; h < heads; ++h) {
      for (index_t i = 0; i < queries; ++i) {
        const Query query{b, h, i, {batch, heads, queries, length}};
        store_result(result, complete_row(result, variant, query, i), i, state_of(total, b, h, i), dv);
      }
    }
  }
}

SSMAX_END
