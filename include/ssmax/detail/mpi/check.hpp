// Checks a call over MPI: the arguments of this rank, and the arguments that must be equal on all ranks.
#pragma once

#include <algorithm>

#include "../../kv_cache.hpp"
#include "../../mpi_communicator.hpp"
#include "../../mpi_layout.hpp"
#include "../attention/desk/build.hpp"
#include "agreement.hpp"
#include "head_exchange.hpp"

SSMAX_BEGIN_DETAIL

/// Throws unless the layout has as many ranks as the communicator, and q and k have as many positions as the
/// layout gives this rank.
template <class T>
void check_share(const char* function, const mpi::Communicator& comm, const mpi::Layout& layout,
                 const View<const T, 4>& q, const View<const T, 4>& k) {
  if (layout.ranks() != comm.ranks()) {
    fail_value(function, "layout", "has ranks", layout.ranks(), "the communicator has", comm.ranks());
  }
  const index_t count = layout.count(comm.rank());
  if (q.extent(2) != count)
    fail_value(function, "q", "has positions", q.extent(2), "the layout's share is", count);
  if (k.extent(2) != count)
    fail_value(function, "k", "has positions", k.extent(2), "the layout's share is", count);
}

/// Returns a function that returns the rank that computes a query.
inline auto computing_rank(mpi::Communicator& comm, const mpi::Layout& layout, index_t heads,
                           index_t kv_heads) {
  return [&, exchange = HeadExchange(comm, layout, kv_heads),
          group = heads / std::max<index_t>(1, kv_heads)](const Query& query) {
    if (layout.is_by_heads()) return exchange.rank_of(query.head / group);
    return std::ranges::upper_bound(layout.segments(), query.index, {}, &mpi::Segment::end)->rank;
  };
}

/// Returns the list of arguments and options that must be equal on all ranks.
template <class T, class V>
Agreement agreement_of(const char* function, const mpi::Layout& layout, const View<const T, 4>& q,
                       const View<const T, 4>& k, const View<const T, 4>& v,
                       const AttentionOptions<T>& options) {
  Agreement all(function);
  all.add("the element type, or a type of a policy", fingerprint_of_types<T, V>());
  all.add("the layout", fingerprint(layout));
  all.add("the batch", q.extent(0));
  all.add("the number of heads of q", q.extent(1));
  all.add("the number of heads of k", k.extent(1));
  all.add("the width of q and k", q.extent(3));
  all.add("the width of v", v.extent(3));
  Fingerprint scale;
  scale.add(logit_scale(options, q.extent(3)));
  all.add("the scale", scale.value());
  all.add("the rope", options.rope != nullptr ? fingerprint(options.rope->options()) : 0);
  all.add("key_position", options.key_position);
  Fingerprint sinks;
  sinks.add(options.sinks.data(), options.sinks.size_bytes());
  all.add("sinks", sinks.value());
  all.add("scaled_sinks", options.scaled_sinks);
  all.add("float_products", options.float_products);
  all.add("rounded_rotation", options.rounded_rotation);
  all.add("batch_invariant", options.batch_invariant);
  all.add("rotate_source_keys", options.rotate_source_keys);
  return all;
}

/// Returns the problem of all rows of this rank. `keys` describes the whole sequence and has no data:
/// with_keys replaces it later.
template <class T>
Problem<ComputeType<T>> whole_problem(const char* function, const View<const T, 4>& q,
                                      const KeyShare<T>& keys, const mpi::Layout& layout,
                                      const AttentionOptions<T>& options) {
  check_no_lengths(function, options.lengths);
  return queries_among(called_by(function, options, make_problem(q, AnyKeys<ComputeType<T>>(keys), options)),
                       0, layout.positions());
}

/// Calls check_policies for each segment of this rank.
template <class T, class V>
void check_segments(const char* function, int rank, const mpi::Layout& layout,
                    const Problem<ComputeType<T>>& whole, const View<const T, 4>& k,
                    const View<const T, 4>& v, const AttentionOptions<T>& options, const V& variant) {
  const index_t positions = layout.positions();
  const auto check = [&](const mpi::Segment& segment, index_t row) {
    const index_t count = segment.size();
    const KeyShare<T> keys =
        keys_in(rows_of(k, row, count), rows_of(v, row, count), positions, segment.begin);
    const auto problem = with_keys(with_queries(whole, row, count, segment.begin, positions), keys);
    check_policies(function, problem, options.rope, variant);
  };
  index_t row = 0;
  for (const mpi::Segment& segment : layout.segments()) {
    if (segment.rank != rank) continue;
    check(segment, row);
    row += segment.size();
  }
  if (row == 0) check({0, 0, rank}, 0);
}

/// Throws unless every sequence of the cache holds the rank's share of the first `length` positions. Returns their
/// number.
template <class K, class V>
index_t check_held(const char* function, const KvCache<K, V>& cache, const mpi::Layout& layout, int rank,
                   index_t length) {
  index_t held = 0;
  for (const mpi::Segment& segment : layout.segments()) {
    if (segment.rank == rank) held += std::max<index_t>(0, std::min(segment.end, length) - segment.begin);
  }
  for (index_t b = 0; b < cache.shape().batch; ++b) {
    if (cache.length(b) != held) {
      fail_value(function, "cache", "has length", cache.length(b), "the layout's share so far is", held);
    }
    if (const KeyRange forgotten = cache.forgotten(b); forgotten.size() > 0) {
      fail_format(
          "ssmax::%s: cache no longer stores keys [%td, %td) of sequence %td, a cache over MPI must store "
          "all %td",
          function, forgotten.begin, forgotten.end, b, held);
    }
  }
  return held;
}

SSMAX_END
