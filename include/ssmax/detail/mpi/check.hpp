// Checks a call over MPI: the arguments of this rank, and the arguments that must be equal on all ranks.
#pragma once

#include <algorithm>

#include "../../kv_cache.hpp"
#include "../attention/desk/build.hpp"
#include "agreement.hpp"
#include "head_exchange.hpp"
#include "share.hpp"

SSMAX_BEGIN_DETAIL

/// Throws unless the layout has as many ranks as the communicator.
inline void check_ranks(const char* function, const mpi::Communicator& comm, const mpi::Layout& layout) {
  check_equal(function, "layout", "has ranks", layout.ranks(), "the communicator has", comm.ranks());
}

/// Throws unless q and k have as many positions as the layout gives this rank.
template <class Call>
void check_share(const Call& call) {
  check_ranks(call.function, call.comm, call.layout);
  const index_t count = call.layout.count(call.comm.rank()), q = call.a.q.extent(2), k = call.a.k.extent(2);
  if (q != count) fail_value(call.function, "q", "has positions", q, "the layout's share is", count);
  if (k != count) fail_value(call.function, "k", "has positions", k, "the layout's share is", count);
}

/// Returns a function that returns the rank that computes a query.
template <class Call>
auto computing_rank(const Call& call) {
  return [&layout = call.layout, group = call.group(),
          exchange = HeadExchange(call.comm, call.layout, call.a.k.extent(1))](const Query& query) {
    if (layout.is_by_heads()) return exchange.rank_of(query.head / group);
    return std::ranges::upper_bound(layout.segments(), query.index, {}, &mpi::Segment::end)->rank;
  };
}

/// Calls check_policies for each segment of this rank. V is the type that holds the policies.
template <class T, class A, class B, class V>
void check_segments(const RankCall<T, A, B>& call, const V& variant) {
  const index_t positions = call.layout.positions();
  const Problem<ComputeType<T>> whole = whole_problem(call);
  const auto check = [&](const Piece& segment) {
    const index_t count = segment.size();
    const ViewKeys<ComputeType<T>> keys =
        KeyShare<T>{rows_of(call.a.k, segment.row, count), rows_of(call.a.v, segment.row, count), positions,
                    segment.begin}
            .source();
    const auto queries = with_queries(whole, segment.row, count, segment.begin, positions);
    check_policies(call.function, with_keys(queries, keys), call.options.rope, variant);
  };
  if (call.layout.count(call.comm.rank()) == 0) check({});
  for (const Piece& segment : segments_of(call.layout)) {
    if (segment.rank == call.comm.rank()) check(segment);
  }
}

/// The facts that a rank derives from the policies of a call before the exchange.
struct PolicyFacts {
  std::vector<SeenBlocks> seen;  // of each segment of this rank, if ranks exchange keys
  std::int64_t fingerprint = 0;  // 0 for a single rank
};

/// Checks the share and the policies of this rank, and returns the facts of the policies.
template <class T, class A, class B, class V>
PolicyFacts checked_policies(const RankCall<T, A, B>& call, const V& variant) {
  check_share(call);
  check_segments(call, variant);
  if (call.comm.ranks() == 1) return {};
  PolicyFacts facts{{}, fingerprint_of_ranges<ComputeType<T>>(variant, call.shape(), call.a.k.extent(1))};
  if (!call.layout.is_by_heads()) {
    facts.seen = blocks_seen_by(variant, call.shape(), call.layout, call.comm.rank());
  }
  return facts;
}

/// Returns the list of arguments and options that must be equal on all ranks. V is the type that holds the policies.
template <class V, class T, class A, class B>
Agreement agreement_of(const RankCall<T, A, B>& call, const KeySourceShape& keys) {
  const mpi::AttentionOptions<T>& options = call.options;
  Agreement all(call.function);
  all.add("the element type, or a type of a policy", fingerprint_of_types<T, V>());
  all.add("the layout", fingerprint(call.layout));
  all.add("the batch", call.a.q.extent(0));
  all.add("the number of heads of q", call.a.q.extent(1));
  all.add("the number of heads of k", keys.kv_heads);
  all.add("the width of q and k", call.a.q.extent(3));
  all.add("the width of v", keys.value_width);
  all.add("the scale", Fingerprint().add(logit_scale(options, call.a.q.extent(3))).value());
  all.add("the rope", options.rope != nullptr ? fingerprint(options.rope->options()) : 0);
  all.add("key_position", options.key_position);
  all.add("sinks", Fingerprint().add_bytes(options.sinks.data(), options.sinks.size_bytes()).value());
  all.add("scaled_sinks", options.scaled_sinks);
  all.add("float_products", options.float_products);
  all.add("rounded_rotation", options.rounded_rotation);
  all.add("batch_invariant", options.batch_invariant);
  all.add("rotate_source_keys", options.rotate_source_keys);
  return all;
}

/// Collective. Compares masks that have `sees`, then calls `exchange`. Returns at once if the call has no queries.
template <class T, class A, class B, class V, class F>
void compare_and_exchange(const RankCall<T, A, B>& call, const V& variant, const F& exchange) {
  const QueryShape shape = call.shape();
  if (shape.batch == 0 || shape.heads == 0) return;
  if (variant.has_predicate) {
    compare_by_neighbours<ComputeType<T>>(call.comm, call.function, variant, shape, computing_rank(call));
  }
  exchange_or_abort(call.comm, call.function, exchange);
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
    check_equal(function, "cache", "has length", cache.length(b), "the layout's share so far is", held);
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
