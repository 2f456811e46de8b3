/// @defgroup mpi Attention over MPI (mpi.hpp)
/// Attention of a sequence that is split over the ranks of an MPI communicator.
///
///     mpi::Communicator comm(MPI_COMM_WORLD);
///     const auto layout = mpi::Layout::zigzag(n, comm.ranks());
///     // q, k, v, out, lse: the rows of this rank, layout.count(comm.rank()) of them
///     mpi::attention<float>(comm, layout, {.q = q, .k = k, .v = v, .out = out, .lse = lse}, SSMax<float>{s},
///                           Causal{}, {.rope = &rope}, pool);
///
/// Formula, shapes and options are those of attention.hpp and attention_backward.hpp, of the whole sequence:
/// queries and keys are counted over all ranks, in masks, scores and scalings; n is the number of keys that a
/// query sees on all of them; positions are those of the sequence. Arguments are equal on all ranks but for the
/// tensors, which hold the rank's positions, segment behind segment (mpi_layout.hpp). What policies read by query or
/// key (the c of a PerQuery, a Bias, a mask's matrix) is that of the whole sequence, on every rank.
///
/// Queries stay, keys and values come from their owners (rotated by them, once; those of 16 bits by whoever gets
/// them) in pieces of up to 8 MiB, at least 2048 keys, two ahead, while the piece before is computed. Pieces that no
/// query of a rank sees are not sent to it.
///
/// **The same bits** as one process with any number of ranks, wherever segments begin at multiples of 1024
/// (2048 for dq, ds, db …) and have more than 16 queries per kv head, or fewer everywhere. dk and dv are
/// added up in the order of one process too, by their owner, from sums over 1920 rows (queries × heads of a kv head);
/// a number of heads of a kv head that does not divide 1920 (7, say) gives them other bits, the same every
/// time for one layout. So do 16-bit products (attention_backward.hpp), which add up many rows at once, unless segments
/// begin at multiples of 240 rows as well. Cut elsewhere, sums of 1024 keys become sums of fewer: bounds stay those of
/// attention.hpp.
///
/// Exceptions, for bfloat16 on processors with 16-bit products, without `float_products`. At most 128 keys: one process
/// computes `attention` in float, ranks by keys and `decode` use 16-bit products. More than 16 query rows (queries ×
/// heads of a kv head) in mpi::decode: lse can differ by 1 ulp from that of `decode`.
///
/// **By heads**, with `layout.by_heads()`: rounds of an all-to-all, in each of which a rank gets all positions of one
/// kv head and of its query heads, computes them as one process does, and gives the results back. Every result has the
/// bits of one process, dk and dv too, wherever the sequence is cut. A rank computes kv heads
/// [kv_heads·r/R, kv_heads·(r + 1)/R); without one it waits. Memory: all positions of one kv head of what goes
/// in and out, and MPI's own.
///
/// Memory beyond the shares: one share of K and V, two pieces, and the states of the queries: 2 numbers each, and a
/// row of float where out has 16 bits. In the backward, sums on their way take at most as much as another share of K
/// and V (the largest), or 32 MiB; two that come in take at most as much as two pieces of 2048 keys. Where results have
/// 16 bits, sums are floats, and dq, dk and dv of the share are there as floats. Where something is learnt, 32 bytes
/// for each query and head.
///
/// All of that is in the options' `workspace`: a call that needs no more than one before it allocates nothing but lists
/// of pieces, messages and one head's sums. Without a workspace the communicator keeps it, and the kernels' scratch in
/// any case. One rank alone is a call of attention.hpp and attention_backward.hpp, as is their workspace.
///
/// Calls are collective. Shapes, layouts, options and policies are compared before anything else is sent; where they
/// differ or do not fit, every rank throws the same std::invalid_argument.
///
/// | compared | by | time |
/// |---|---|---|
/// | each query's range of keys, position, n and c | every rank | O(batch·heads·n) |
/// | key positions, if the mask defines positions | every rank | O(batch·kv_heads·n) |
/// | the score of the logit 1 at three keys of each query | every rank | O(batch·heads·n) |
/// | masks with `sees`: the above, and one bit for each key of the range | two ranks | O(batch·heads·n²/R) |
///
/// Queries are those of every batch entry and head. The three keys are the first, the last and one that varies with the
/// query. The two ranks are the rank that computes the query and the rank before it.
///
/// `decode` compares all of the above, for its queries, on every rank. The score of other logits and keys (most of
/// a Bias) is not compared. With `sees`, a rank's policies are not compared for queries that neither it nor the next
/// rank computes: the result does not depend on them. One rank alone compares nothing.
///
/// **Errors on one rank.** If a policy throws or memory is lacking before the exchange begins, every rank throws
/// std::runtime_error with the error's text and its rank. (A policy's std::invalid_argument stays one.) `decode`
/// computes before its exchange, so its policies are covered. If a rank fails during the exchange of `attention` or
/// `attention_backward`, other ranks already wait for its messages: the rank prints the text to stderr and calls
/// MPI_Abort. MPI's errors are std::runtime_error with MPI's text before the exchange, and abort during it.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_backward.hpp"
#include "decode.hpp"
#include "detail/mpi/by_heads.hpp"
#include "detail/mpi/check.hpp"
#include "detail/mpi/learnt_rows.hpp"
#include "detail/mpi/ring_backward.hpp"
#include "detail/mpi/ring_forward.hpp"
#include "detail/mpi/spread_keys.hpp"
#include "kv_cache.hpp"
#include "mpi_communicator.hpp"
#include "mpi_layout.hpp"

SSMAX_BEGIN_CODE
namespace mpi {
/// @addtogroup mpi
/// @{

/// attention of attention.hpp, the sequence being split over ranks as the layout says. Collective.
template <class T, class S, class M, class C, class E = Serial>
requires Scaling<S> && Mask<M> && Score<C> && Executor<E>
void attention(Communicator& comm, const Layout& layout, const std::type_identity_t<AttentionArguments<T>>& a,
               const S& scaling, const M& mask, const C& score,
               const std::type_identity_t<AttentionOptions<T>>& options = {}, E&& executor = E{}) {
  using A = detail::Compute<T>;
  const char* function = "mpi::attention";
  const index_t n = layout.positions();
  const detail::KeyShare<T> none{.k = {}, .v = {}, .keys = n};
  const detail::UserVariant<A, S, M, C> variant(scaling, mask, score);
  const QueryShape shape{a.q.extent(0), a.q.extent(1), n, n};
  std::vector<detail::SeenBlocks> seen;
  std::int64_t policies = 0;
  const detail::Complaint complaint = detail::complaint_of(function, [&] {
    detail::check_arguments(function, a, options);
    detail::check_share(function, comm, layout, a.q, a.k);
    const auto whole = detail::whole_problem(function, a.q, none, layout, options);
    detail::check_segments<T>(function, comm.rank(), layout, whole, a.k, a.v, options, variant);
    if (comm.ranks() > 1) policies = detail::fingerprint_of_ranges<A>(variant, shape, a.k.extent(1));
    if (comm.ranks() > 1 && !layout.is_by_heads()) {
      seen = detail::blocks_seen_by(variant, shape, layout, comm.rank());
    }
  });
  auto agreement = detail::agreement_of<T, decltype(variant)>(function, layout, a.q, a.k, a.v, options);
  agreement.add("what scaling, mask and score say", policies);
  agreement.add_if(a.q.extent(2) > 0, "whether lse is wanted", detail::is_given(a.lse) ? 1 : 0);
  agreement.settle(comm, complaint);
  if (comm.ranks() == 1) {
    ssmax::attention<T>(a, scaling, mask, score, options, std::forward<E>(executor));
    return;
  }
  if (a.q.extent(0) == 0 || a.q.extent(1) == 0) return;
  if (variant.has_predicate) {
    detail::compare_by_neighbours<A>(comm, function, variant, shape,
                                     detail::computing_rank(comm, layout, a.q.extent(1), a.k.extent(1)));
  }
  detail::exchange_or_abort(comm, function, [&] {
    const detail::AnyExecutor any(executor);
    if (layout.is_by_heads()) {
      detail::forward_by_heads<T>(comm, layout, a, agreement.last_agreed() != 0, variant, options, any);
      return;
    }
    const index_t row = a.k.extent(0) * a.k.extent(1) * (a.k.extent(3) + a.v.extent(3));
    const index_t size = static_cast<index_t>(sizeof(T));
    const detail::RingPlan plan(comm, layout, detail::travel_unit(row * size), seen);
    const auto whole = detail::whole_problem(function, a.q, none, layout, options);
    detail::ring_forward<T>(comm, plan, a, whole, variant, options, n, any);
  });
}

/// The same without a score.
template <class T, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && Mask<M> && Executor<E>
void attention(Communicator& comm, const Layout& layout,
               const std::type_identity_t<AttentionArguments<T>>& arguments, const S& scaling = {},
               const M& mask = {}, const std::type_identity_t<AttentionOptions<T>>& options = {},
               E&& executor = E{}) {
  mpi::attention<T>(comm, layout, arguments, scaling, mask, Identity{}, options, std::forward<E>(executor));
}

/// attention_backward of attention_backward.hpp, the sequence being split over ranks as the layout says. Collective.
/// Gradients of 16 bits are sums of float, rounded once. Every rank gets the gradients of its own rows, and all of
/// those that scaling, score and sinks sum over queries (ds, db, dslopes, dsinks) or have for every one (a PerQuery's
/// dc, a Bias' dbias, of the whole sequence). A row of dbias that many queries or heads share is added up rank by rank,
/// in the order of their first queries: its bits are the same every time for one layout, and those of one process
/// where one rank has all of these queries and they are not of several batch entries and heads. What a score of your
/// own learns from every logit without a gradient_row, or with a null one, stays with the rank that computed the query:
/// that of its row or, by heads, of its head. first_key, keys, first_query and queries stay 0.
template <class T, class S, class M, class C, class E = Serial>
requires Scaling<S> && Mask<M> && Score<C> && Executor<E>
void attention_backward(Communicator& comm, const Layout& layout,
                        const std::type_identity_t<BackwardArguments<T>>& a,
                        const std::type_identity_t<AttentionGradients<T>>& g, const S& scaling, const M& mask,
                        const C& score, const std::type_identity_t<AttentionOptions<T>>& options = {},
                        E&& executor = E{}) {
  static_assert(detail::Storage<T>, "ssmax::mpi::attention_backward: T is float, double, half or bfloat16");
  using A = detail::Compute<T>;
  const char* function = "mpi::attention_backward";
  const index_t n = layout.positions();
  const detail::KeyShare<T> none{.k = {}, .v = {}, .keys = n};
  const detail::UserGradientVariant<A, S, M, C> variant(scaling, mask, score);
  const QueryShape shape{a.q.extent(0), a.q.extent(1), n, n};
  detail::LearntRows<C> rows(score);
  std::vector<detail::SeenBlocks> seen;
  std::int64_t policies = 0;
  const detail::Complaint complaint = detail::complaint_of(function, [&] {
    if (g.accumulate) detail::fail_value(function, "accumulate", "is", 1, "over ranks it must be", 0);
    detail::check_arguments(function, a, g, options);
    detail::check_share(function, comm, layout, a.q, a.k);
    if (layout.segments().size() > 16384) {
      detail::fail_value(function, "layout", "has segments", std::ssize(layout.segments()), "must be at most",
                         16384);
    }
    const auto whole = detail::whole_problem(function, a.q, none, layout, options);
    detail::check_segments<T>(function, comm.rank(), layout, whole, a.k, a.v, options, variant);
    if (comm.ranks() > 1) policies = detail::fingerprint_of_ranges<A>(variant, shape, a.k.extent(1));
    if (comm.ranks() > 1 && !layout.is_by_heads()) {
      seen = detail::blocks_seen_by(variant, shape, layout, comm.rank());
    }
    rows.list(shape, detail::computing_rank(comm, layout, a.q.extent(1), a.k.extent(1)));
  });
  auto agreement = detail::agreement_of<T, decltype(variant)>(function, layout, a.q, a.k, a.v, options);
  agreement.add("what scaling, mask and score say", policies);
  agreement.add("which queries share a row of the score's gradient", rows.fingerprint());
  agreement.add("whether dsinks are wanted", g.dsinks.empty() ? 0 : 1);
  agreement.add_if(a.q.extent(2) > 0, "whether there is dlse", detail::is_given(g.dlse) ? 1 : 0);
  agreement.settle(comm, complaint);
  if (comm.ranks() == 1) {
    ssmax::attention_backward<T>(a, g, scaling, mask, score, options, std::forward<E>(executor));
    return;
  }
  if (a.q.extent(0) == 0 || a.q.extent(1) == 0) return;
  if (variant.has_predicate) {
    detail::compare_by_neighbours<A>(comm, function, variant, shape,
                                     detail::computing_rank(comm, layout, a.q.extent(1), a.k.extent(1)));
  }
  detail::exchange_or_abort(comm, function, [&] {
    const detail::AnyExecutor any(executor);
    rows.begin(comm.rank());
    if (layout.is_by_heads()) {
      detail::backward_by_heads<T>(comm, layout, a, g, agreement.last_agreed() != 0, variant, options, any);
    } else {
      const detail::RingPlan plan(comm, layout, detail::travel_keys, seen);
      const auto whole = detail::whole_problem(function, a.q, none, layout, options);
      detail::ring_backward<T>(comm, plan, a, g, whole, variant, options, n, any);
    }
    rows.add_up(comm);
  });
}

/// The same without a score.
template <class T, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && Mask<M> && Executor<E>
void attention_backward(Communicator& comm, const Layout& layout,
                        const std::type_identity_t<BackwardArguments<T>>& arguments,
                        const std::type_identity_t<AttentionGradients<T>>& gradients, const S& scaling = {},
                        const M& mask = {}, const std::type_identity_t<AttentionOptions<T>>& options = {},
                        E&& executor = E{}) {
  mpi::attention_backward<T>(comm, layout, arguments, gradients, scaling, mask, Identity{}, options,
                             std::forward<E>(executor));
}

/// Stores new positions in the cache of this rank, which holds the positions that a layout gives it, in
/// their order: those of k and v [batch, kv_heads, new, channels], positions first … of the sequence, that are the
/// rank's. With a rope, keys are rotated to their positions in the sequence. A local call. Throws unless the layout has
/// these positions and the cache holds those before them.
template <class K, class V>
void append(KvCache<K, V>& cache, const Layout& layout, int rank, index_t first,
            std::type_identity_t<View<const detail::Compute<K>, 4>> k,
            std::type_identity_t<View<const detail::Compute<K>, 4>> v,
            const Rope<detail::Compute<K>>* rope = nullptr) {
  const char* function = "mpi::append";
  detail::check_part(function, "first", first, k.extent(2), "leaves no room for k in the layout's positions,",
                     "positions", layout.positions());
  detail::check_held(function, cache, layout, rank, first);
  std::vector<detail::Compute<K>> rotated;
  for (const Segment& segment : layout.segments()) {
    const index_t begin = std::max(segment.begin, first), end = std::min(segment.end, first + k.extent(2));
    if (segment.rank != rank || begin >= end) continue;
    auto keys = detail::rows_of(k, begin - first, end - begin);
    if (rope != nullptr) {
      rotated.resize(static_cast<std::size_t>(keys.size()));
      const View<detail::Compute<K>, 4> out{rotated.data(),
                                            {k.extent(0), k.extent(1), end - begin, k.extent(3)}};
      ssmax::rope(keys, out, *rope, begin);
      keys = out;
    }
    cache.append(keys, detail::rows_of(v, begin - first, end - begin));
  }
}

/// decode of decode.hpp, of the first `length` positions of a layout, each rank having stored its own (append).
/// Collective; q is the same on all ranks, and so are out and lse: those of one process with one cache,
/// bit for bit, where segments begin at multiples of 1024. (Exceptions for bfloat16 are above.) key_position must be 0,
/// unless rotate_source_keys is set.
/// out and lse must not overlap the cache's memory. Memory: the states of all chunks of 1024 keys, that is
/// batch·heads·queries·(dv + 2) numbers for each.
template <class T, class K, class V, class S, class M, class C, class E = Serial>
requires Scaling<S> && Mask<M> && Score<C> && Executor<E>
void decode(Communicator& comm, const Layout& layout, index_t length,
            const std::type_identity_t<DecodeArguments<T>>& a, const KvCache<K, V>& cache, const S& scaling,
            const M& mask, const C& score, const std::type_identity_t<AttentionOptions<T>>& options = {},
            E&& executor = E{}) {
  static_assert(detail::Storage<T> && detail::SourceFits<T, KvCache<K, V>>,
                "ssmax::mpi::decode: double queries need a cache of double and a result of double, other "
                "queries float, half or bfloat16");
  const char* function = "mpi::decode";
  const detail::ChunkOfKeys<KvCache<K, V>> none{cache, length, 0, {}};
  const auto whole = detail::called_by(function, options, detail::make_source_problem(a.q, none, options));
  const detail::UserVariant<detail::Compute<T>, S, M, C> variant(scaling, mask, score);
  const QueryShape shape{a.q.extent(0), a.q.extent(1), a.q.extent(2), length};
  std::int64_t policies = 0;
  const detail::Complaint complaint = detail::complaint_of(function, [&] {
    if (layout.ranks() != comm.ranks()) {
      detail::fail_value(function, "layout", "has ranks", layout.ranks(), "the communicator has",
                         comm.ranks());
    }
    detail::check_part(function, "length", 0, length, "must be at most the layout's positions,", "positions",
                       layout.positions());
    detail::check_held(function, cache, layout, comm.rank(), length);
    detail::check_no_lengths(function, options.lengths);
    detail::check_arguments(function, a, cache, options);
    if (a.q.extent(2) > length) {
      detail::fail_value(function, "q", "has positions", a.q.extent(2), "the sequence has", length);
    }
    detail::check_policies(function, whole, options.rope, variant);
    if (comm.ranks() > 1)
      policies = detail::fingerprint_of_all<detail::Compute<T>>(variant, shape, cache.shape().kv_heads);
  });
  auto agreement = detail::agreement_of<T, decltype(variant)>(
      function, layout, a.q, View<const T, 4>{nullptr, {0, cache.shape().kv_heads, 0, 0}}, View<const T, 4>{},
      options);
  agreement.add("the type that the cache stores", detail::fingerprint_of_types<K, V>());
  agreement.add("length", length);
  agreement.add("the number of positions of q", a.q.extent(2));
  agreement.add("what scaling, mask and score say", policies);
  agreement.settle(comm, complaint);
  if (shape.rows() == 0) return;
  detail::exchange_or_abort(comm, function, [&] {
    detail::spread_decode<T>(comm, layout, whole, cache, length, variant, detail::make_result(a, options),
                             options.workspace, detail::AnyExecutor(executor));
  });
}

/// The same without a score.
template <class T, class K, class V, class S = Softmax, class M = Causal, class E = Serial>
requires Scaling<S> && Mask<M> && Executor<E>
void decode(Communicator& comm, const Layout& layout, index_t length,
            const std::type_identity_t<DecodeArguments<T>>& arguments, const KvCache<K, V>& cache,
            const S& scaling = {}, const M& mask = {},
            const std::type_identity_t<AttentionOptions<T>>& options = {}, E&& executor = E{}) {
  mpi::decode<T>(comm, layout, length, arguments, cache, scaling, mask, Identity{}, options,
                 std::forward<E>(executor));
}

/// @}
}  // namespace mpi

SSMAX_END
