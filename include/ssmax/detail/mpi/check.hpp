// Checks a call over MPI: the arguments of this rank, and the arguments that must be equal on all ranks.
#pragma once

#include <algorithm>

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

/// Throws if a member that has no meaning over ranks is given.
template <class Arguments>
void check_members(const char* function, const Arguments& a) {
  check_is_whole(function, facts_of(a), "over ranks it must be");
  if constexpr (requires { a.state; }) {
    if (has_state(a.state)) fail_format("ssmax::%s: state is given, over ranks the call takes out", function);
  }
  check_no_lengths(function, a.lengths, "over ranks");
}

/// Throws unless a tensor is given and has the storage type of q. Exception: a tensor without channels has any type.
inline void check_storage(const char* function, const char* name, const Rows& tensor, const Rows& q) {
  if (tensor.element_bytes() == 0) fail_format("ssmax::%s: %s is left out, must be given", function, name);
  if (tensor.extent(3) == 0) return;
  if (tensor.kind() != q.kind() || tensor.element_bytes() != q.element_bytes()) {
    fail_format("ssmax::%s: %s and q have different storage types, over ranks they must be the same",
                function, name);
  }
}

/// Checks the arguments of this rank's part of a call over keys in views.
template <class A>
void check_rank_arguments(const char* function, const AttentionArguments<A>& a) {
  check_members(function, a);
  if (a.keys.is_given()) {
    fail_format("ssmax::%s: keys are given, over ranks they take the length of the sequence as an argument",
                function);
  }
  ForwardCall<A> call{};
  build_call(function, a, a.keys, call);
  check_arguments(function, call);
  check_no_overlap(function, "out", a.out, "q", a.q);
  check_storage(function, "q", a.q, a.q);
  check_storage(function, "k", a.k, a.q);
  check_storage(function, "v", a.v, a.q);
  check_storage(function, "out", a.out, a.q);
}
template <class A>
void check_rank_arguments(const char* function, const BackwardArguments<A>& a,
                          const AttentionGradients<A>& g) {
  check_members(function, a);
  if (g.accumulate) fail_value(function, "accumulate", "is", 1, "over ranks it must be", 0);
  BackwardCall<A> call{};
  build_call(function, a, g, call);
  check_arguments(function, call);
  check_storage(function, "q", a.q, a.q);
  check_storage(function, "k", a.k, a.q);
  check_storage(function, "v", a.v, a.q);
  check_storage(function, "out", a.out, a.q);
  check_storage(function, "dout", g.dout, a.q);
  check_storage(function, "dq", g.dq, a.q);
  check_storage(function, "dk", g.dk, a.q);
  check_storage(function, "dv", g.dv, a.q);
}

/// Calls check_policies for each segment of this rank.
template <class A, class Arguments, class V>
void check_segments(const RankCall<A, Arguments, V>& call) {
  const index_t positions = call.layout.positions();
  const Problem<A> whole = whole_problem(call);
  const auto check = [&](const Piece& segment) {
    const index_t count = segment.size();
    const ViewKeys<A> keys = keys_from(call, segment.row, count, segment.begin);
    const auto queries = with_queries(whole, segment.row, count, segment.begin, positions);
    check_policies<A>(call.function, with_keys(queries, keys), call.variant);
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
template <class A, class Arguments, class V, class P>
PolicyFacts checked_policies(const RankCall<A, Arguments, V>& call, const P& variant) {
  check_share(call);
  check_segments(call);
  if (call.comm.ranks() == 1) return {};
  PolicyFacts facts{{}, fingerprint_of_ranges<A>(variant, call.shape(), call.a.k.extent(1))};
  if (!call.layout.is_by_heads()) {
    facts.seen = blocks_seen_by(variant, call.shape(), call.layout, call.comm.rank());
  }
  return facts;
}

/// Returns the list of arguments and options that must be equal on all ranks. P is the type that holds the policies.
template <class P, class A, class Arguments, class V>
Agreement agreement_of(const RankCall<A, Arguments, V>& call, const KeySourceShape& keys,
                       bool has_length = false) {
  const Arguments& a = call.a;
  Agreement all(call.function);
  all.add("the presence of length", has_length ? 1 : 0);
  all.add("the element type, or a type of a policy",
          Fingerprint().add(a.q.kind(), a.q.element_bytes(), fingerprint_of_types<A, P>()).value());
  all.add("the layout", fingerprint(call.layout));
  all.add("the batch", a.q.extent(0));
  all.add("the number of heads of q", a.q.extent(1));
  all.add("the number of heads of k", keys.kv_heads);
  all.add("the width of q and k", a.q.extent(3));
  all.add("the width of v", keys.value_width);
  all.add("the scale", Fingerprint().add(logit_scale(a, a.q.extent(3))).value());
  all.add("the rope", a.rope != nullptr ? fingerprint(*a.rope) : 0);
  all.add("key_position", a.key_position);
  all.add("sinks", Fingerprint().add_bytes(a.sinks.data(), a.sinks.size_bytes()).value());
  const DropoutOption<A>& dropout = a.dropout;
  all.add("dropout", Fingerprint()
                         .add(static_cast<double>(dropout.p), dropout.seed, dropout.offset)
                         .add_bytes(dropout.seeds.data(), dropout.seeds.size_bytes())
                         .value());
  for_each_flag(a, [&](const char* name, bool flag) { all.add(name, flag); });
  return all;
}

/// Collective. Compares masks that have `sees`, then calls `exchange`. Returns at once if the call has no queries.
template <class A, class Arguments, class V, class P, class F>
void compare_and_exchange(const RankCall<A, Arguments, V>& call, const P& variant, const F& exchange) {
  const QueryShape shape = call.shape();
  if (shape.batch == 0 || shape.heads == 0) return;
  if (variant.has_predicate) {
    compare_by_neighbours<A>(call.comm, call.function, variant, shape, computing_rank(call));
  }
  exchange_or_abort(call.comm, call.function, exchange);
}

/// Throws unless every sequence of a source of keys holds the rank's share of the first `length` positions. Returns
/// their number.
template <class Source>
index_t check_held(const char* function, const Source& keys, const mpi::Layout& layout, int rank,
                   index_t length) {
  index_t held = 0;
  for (const mpi::Segment& segment : layout.segments()) {
    if (segment.rank == rank) held += std::max<index_t>(0, std::min(segment.end, length) - segment.begin);
  }
  for (index_t b = 0; b < keys.shape().batch; ++b) {
    check_equal(function, "cache", "has length", keys.length(b), "the layout's share so far is", held);
    KeyRange lost = keys.forgotten(b);
    if (lost.size() == 0) lost = {0, keys.stored(b).begin};
    if (lost.size() > 0) {
      fail_format(
          "ssmax::%s: cache no longer stores keys [%td, %td) of sequence %td, a cache over MPI must store "
          "all %td",
          function, lost.begin, lost.end, b, held);
    }
  }
  return held;
}

/// Returns a hash of the storage types of a source of keys, or 0 without a source.
template <class A>
std::int64_t fingerprint_of_storage(const Keys<A>& given, const AnyKeys<A>& keys) {
  if (!given.is_given()) return 0;
  Fingerprint result;
  for (const StoredType<A>* type : {&keys.k_type(), &keys.v_type()})
    result.add(type->kind, type->size, type->group);
  return result.value();
}

/// Checks the arguments of a call over a cache of the first `length` positions.
template <class A>
void check_source_arguments(const AttentionOverRanks<A>& call, const AnyKeys<A>& cache, index_t length) {
  const AttentionArguments<A>& a = call.a;
  check_ranks(call.function, call.comm, call.layout);
  check_part(call.function, "length", 0, length, "must be at most the layout's positions,", "positions",
             call.layout.positions());
  check_members(call.function, a);
  if (!a.keys.is_given())
    fail_format("ssmax::%s: keys are left out, must be given with a length", call.function);
  check_held(call.function, cache, call.layout, call.comm.rank(), length);
  ForwardCall<A> own{};
  build_call(call.function, a, a.keys, own);
  own.problem.keys = cache;
  check_source_arguments(call.function, own);
  check_no_overlap(call.function, "out", a.out, "q", a.q);
  check_storage(call.function, "q", a.q, a.q);
  check_storage(call.function, "out", a.out, a.q);
}

SSMAX_END
