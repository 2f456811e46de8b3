// Decodes where each rank stores the keys of its own positions. Each rank computes the states of its own
// chunks. All ranks then merge the states of all chunks in the order of the keys.
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "../attention/work/driver.hpp"
#include "check.hpp"
#include "datatype.hpp"
#include "reserve.hpp"
#include "share.hpp"

SSMAX_BEGIN_DETAIL

/// A source of keys that holds one chunk of one rank's keys. Keys [keys.begin, keys.end) of the sequence are
/// stored in `cache` from `row` on.
template <class A>
struct ChunkOfKeys {
  const AnyKeys<A>& cache;
  index_t length_of_sequence, row;
  KeyRange keys;

  KeySourceShape shape() const { return cache.shape(); }
  index_t length(index_t) const { return length_of_sequence; }
  KeyRange stored(index_t) const { return keys; }
  AnyKeyRun run(index_t batch, index_t kv_head, index_t key) const {
    AnyKeyRun run = cache.run(batch, kv_head, row + key - keys.begin);
    run.count = std::min(run.count, keys.end - key);
    return run;
  }
  /// Returns a reference to this source.
  AnyKeys<A> refer() const { return {*this, &cache.k_type(), &cache.v_type()}; }
};

/// Returns the problem of all queries of a call over a cache. Its keys are `all`, which are not read.
template <class A>
Problem<A> problem_over_source(const AttentionOverRanks<A>& call, const ChunkOfKeys<A>& all) {
  Problem<A> problem = make_problem<A>(call.function, call.a.q, all.refer(), call.a);
  problem.in_cache = true;
  complete_source(problem, facts_of(call.a), call.variant);
  return problem;
}

/// Collective. Compares a call over a cache with those of the other ranks. `all` are the keys of the whole sequence.
/// check() throws unless further arguments fit, and `further` is their hash. Returns whether the call has rows.
template <class A, class V, class F>
bool agree_on_source(const AttentionOverRanks<A>& call, const V& variant, const ChunkOfKeys<A>& all,
                     bool has_mask, const F& check, std::int64_t further) {
  const AttentionArguments<A>& a = call.a;
  const index_t length = all.length_of_sequence;
  const QueryShape shape{a.q.extent(0), a.q.extent(1), a.q.extent(2), length};
  std::int64_t fingerprint = 0;
  const Complaint complaint = complaint_of(call.function, [&] {
    check();
    check_source_arguments(call, all.cache, length);
    const Problem<A> problem = problem_over_source(call, all);
    check_policies<A>(call.function, problem, call.variant);
    check_new_queries(call.function, problem, a.more_queries_than_keys, has_mask);
    if (call.comm.ranks() > 1)
      fingerprint = fingerprint_of_all<A>(variant, shape, all.cache.shape().kv_heads);
  });
  auto agreement = agreement_of<V>(call, all.cache.shape(), true);
  agreement.add("the type that the cache stores", fingerprint_of_storage(a.keys, all.cache));
  agreement.add("length", length);
  agreement.add("the number of positions of q", a.q.extent(2));
  agreement.add("the presence of statistics", a.statistics.functions() != nullptr ? 1 : 0);
  agreement.add("gaps", further);
  agreement.add("a result of scaling, mask or score", fingerprint);
  agreement.settle(call.comm, complaint);
  return shape.rows() > 0;
}

/// Returns the chunks of the first `length` positions, in order. Chunks end at multiples of key_chunk, at the
/// ends of segments and at `length`.
inline std::vector<Piece> chunks_of(const mpi::Layout& layout, index_t length) {
  std::vector<Piece> chunks;
  for (Piece segment : segments_of(layout)) {
    segment.end = std::min(segment.end, length);
    for_each_part(segment, key_chunk, [&](const Piece& chunk) { chunks.push_back(chunk); });
  }
  return chunks;
}

/// The memory of the states of all chunks: rank by rank, chunk by chunk. MPI counts in states, because it counts in
/// int.
struct StatePlaces {
  /// `a_size` is the number of elements of a state. Throws if MPI cannot count the chunks.
  StatePlaces(const std::vector<Piece>& chunks, int ranks, index_t a_size)
      : size(a_size), counts(static_cast<std::size_t>(ranks)), first(counts.size()) {
    (void)Requests::count(chunks.size());
    for (const Piece& chunk : chunks) ++counts[static_cast<std::size_t>(chunk.rank)];
    std::exclusive_scan(counts.begin(), counts.end(), first.begin(), 0);
  }
  /// Returns the number of elements before the states of a rank.
  [[nodiscard]] index_t offset(int rank) const { return first[static_cast<std::size_t>(rank)] * size; }

  index_t size;
  std::vector<int> counts, first;  // [ranks]: the number of states of a rank, and the index of its first one
};

/// The states of all chunks, and the merged state.
template <class Compute>
struct SpreadMemory {
  SpreadMemory(Arena& arena, index_t chunks, index_t size)
      : states(arena.take<Compute>(chunks * size)), sum(arena.take<Compute>(size)) {}

  Compute *states, *sum;
};

/// Decode over the keys of all ranks. `all` are the keys of the whole sequence. Requires that the arguments of the
/// constructor outlive the object.
template <class A>
class SpreadDecode {
 public:
  SpreadDecode(const AttentionOverRanks<A>& call, const ChunkOfKeys<A>& all)
      : call_(call),
        problem_(problem_over_source(call, all)),
        cache_(all.cache),
        shape_{call.a.q.extent(0), call.a.q.extent(1), call.a.q.extent(2), all.length_of_sequence},
        states_{.rows = shape_.rows(),
                .channels = problem_.value_width(),
                .has_statistics = problem_.statistics != nullptr},
        size_(states_.size()),
        chunks_(chunks_of(call.layout, all.length_of_sequence)) {}

  /// Collective. Writes out and lse on every rank.
  void run() const {
    mpi::Communicator& comm = call_.comm;
    std::optional<StatePlaces> places;
    std::optional<SpreadMemory<A>> memory;
    Datatype state;
    agree(comm, complaint_of(call_.function, [&] {
            places.emplace(chunks_, comm.ranks(), size_);
            state = bytes_type(static_cast<std::size_t>(size_) * sizeof(A));
            memory.emplace(reserve<SpreadMemory<A>>(call_, std::ssize(chunks_), size_));
            compute(memory->states + places->offset(comm.rank()));
          }));
    const double start = MPI_Wtime();
    check_mpi("MPI_Allgatherv",
              MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, memory->states, places->counts.data(),
                             places->first.data(), state.get(), comm.handle()));
    comm.traffic().seconds_waiting += MPI_Wtime() - start;
    comm.traffic().bytes_sent += static_cast<double>(size_) * sizeof(A) *
                                 places->counts[static_cast<std::size_t>(comm.rank())] * (comm.ranks() - 1);
    merge(*places, memory->states, memory->sum);
    store(state_at(memory->sum));
  }

 private:
  /// Returns the states in memory of states_.size().
  [[nodiscard]] AttentionState<A> state_at(A* memory) const {
    const index_t batch = shape_.batch, heads = shape_.heads, queries = shape_.queries;
    const SoftmaxState<A> first = states_.at(memory, 0);
    const std::array<index_t, 3> rows{batch, heads, queries};
    AttentionState<A> state{
        {first.shift, rows},
        {first.sum, rows},
        addressable(View<A, 4>{first.o, {batch, heads, queries, problem_.value_width()}})};
    if (!states_.has_statistics) return state;
    const TileStatistics<A>& statistics = first.statistics;
    state.largest = {statistics.largest, rows};
    state.smallest = {statistics.smallest, rows};
    state.distances = {statistics.distances, rows};
    state.squares = {statistics.squares, rows};
    return state;
  }

  /// Computes the states of this rank's chunks.
  void compute(A* next) const {
    for (const Piece& chunk : chunks_) {
      if (chunk.rank != call_.comm.rank()) continue;
      const ChunkOfKeys<A> keys{cache_, shape_.keys, chunk.row, {chunk.begin, chunk.end}};
      call_.a.q.functions()->run(with_keys(problem_, keys.refer()), call_.variant,
                                 make_state_result(state_at(next), false), &call_.comm.scratch(),
                                 call_.executor);
      next += size_;
    }
  }

  /// Merges the states of all chunks in the order of the keys.
  void merge(const StatePlaces& places, A* states, A* sum) const {
    states_.reset(sum, states_.rows);
    std::vector<A*> at;
    for (int r = 0; r < call_.comm.ranks(); ++r) at.push_back(states + places.offset(r));
    for (const Piece& chunk : chunks_) {
      A*& state = at[static_cast<std::size_t>(chunk.rank)];
      merge_state(state_at(sum), state_at(state));
      state += size_;
    }
  }

  void store(const AttentionState<A>& total) const {
    const Result<A> result = make_result<A>(call_.a.out, call_.a.lse, call_.a);
    for_each_query(shape_, [&](const Query& query) {
      const Sequence own{.batch = query.batch, .entry = query.batch};
      store_complete(result, complete_row(result, call_.variant, query, own), query.index, total,
                     problem_.value_width());
    });
  }

  const AttentionOverRanks<A>& call_;
  const Problem<A> problem_;
  const AnyKeys<A>& cache_;
  const QueryShape shape_;
  const StateLayout states_;  // of all queries
  const index_t size_;
  const std::vector<Piece> chunks_;
};

SSMAX_END
