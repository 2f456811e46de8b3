/// @defgroup mpi Attention over MPI (mpi.hpp)
/// Computes attention of a sequence that is split over the ranks of an MPI communicator.
///
///     mpi::Communicator comm(MPI_COMM_WORLD);
///     const auto layout = mpi::Layout::zigzag(n, comm.ranks());
///     // q, k, v, out, lse: the rows of this rank, layout.count(comm.rank()) of them
///     mpi::attention(comm, layout, {.q = q, .k = k, .v = v, .out = out, .lse = lse, .rope = &rope},
///                    SSMax<float>{s}, Causal{}, pool);
///
/// Formula, shapes and options are those of attention.hpp and attention_backward.hpp, for the whole sequence. Masks,
/// score functions and scalings receive indices of queries and keys in the whole sequence, and n counts the visible
/// keys on all ranks. The tensors hold the positions of the rank, in the order of its segments (mpi_layout.hpp). All
/// other arguments are equal on all ranks. Some policies read data per query or key: PerQuery, Bias, a mask by a
/// matrix. For such a policy, every rank passes the data of the whole sequence.
///
/// q and out stay on their rank. The owners send keys and values in blocks of up to 8 MiB, with at least 2048 keys.
/// Two blocks are on their way while a rank computes the previous one. The owner rotates keys once. Exception:
/// receivers rotate keys of 16 bits. A rank does not receive blocks that are masked for all of its queries.
///
/// **Bit-identical results.** A row is one query of one query head: for a kv head, a segment has positions · heads /
/// kv_heads rows. "All short" means that every segment has at most 16 rows.
///
/// | result | bit-identical to a single-process run if |
/// |---|---|
/// | out, lse | segments begin at multiples of 1024 positions and have more than 16 rows, or all are short |
/// | dq, ds, db and other parameters | as out, with multiples of 2048 positions |
/// | dk, dv in float or double | as out, and heads / kv_heads divides 1920 |
/// | dk, dv on the bf16 path | the same, and segments begin at multiples of 240 rows |
/// | every result with `by_heads()` | always |
///
/// The owner of a key adds dk and dv from sums over 1920 rows, in the order of a single process. If the conditions
/// for dk and dv do not hold, dk and dv are still bit-identical for every run with the same layout. If segments begin
/// at other positions, chunks have fewer than 1024 keys, and the error bounds are those of attention.hpp.
///
/// Two cases of bfloat16 on targets with bfloat16 products, without `float_products`, differ from a single process:
///
/// | case | difference |
/// |---|---|
/// | at most 128 keys in views | a single process computes in float. Ranks that exchange keys take the bf16 path |
/// | 5 rows or more over a cache | lse can differ by 1 ulp |
///
/// **By heads**, with `layout.by_heads()`: the ranks exchange heads in rounds of an all-to-all. In a round, a rank
/// receives all positions of one kv head and of its query heads. The rank computes the heads as a single process does
/// and returns the results. Rank r computes kv heads [kv_heads·r/R, kv_heads·(r + 1)/R). A rank without a kv head
/// waits.
///
/// **Memory** in addition to the tensors of the rank:
///
/// | call | memory |
/// |---|---|
/// | every call | K and V of one rank, and two blocks |
/// | attention | the states of the queries: 2 numbers per query and head, 6 with statistics |
/// | attention, out of 16 bits | a row of float per query more |
/// | attention_backward | sums on their way: K and V of the largest rank, or 32 MiB |
/// | attention_backward | two incoming sums: two blocks of 2048 keys |
/// | attention_backward, results of 16 bits | sums, and dq, dk and dv of the rank, are floats |
/// | attention_backward, gradients of parameters | 32 bytes per query and head |
/// | by heads | all positions of one kv head of every input and output, and the memory of MPI |
///
/// The `workspace` of the options holds this memory. A call that needs no more memory than an earlier one allocates
/// only the lists of blocks and messages, and the sums of one head. Without a workspace, the Communicator holds the
/// memory. The Communicator also holds the scratch memory of the kernels. With one rank, a call is one of
/// attention.hpp or attention_backward.hpp, and so is its workspace.
///
/// **Agreement.** Calls are collective. The ranks compare shapes, layouts, options and policies before they send
/// anything else. If these differ or do not fit, every rank throws the same std::invalid_argument.
///
/// | compared | by | time |
/// |---|---|---|
/// | each query's range of keys, position, n and c | every rank | O(batch·heads·n) |
/// | key positions, if the mask defines positions | every rank | O(batch·kv_heads·n) |
/// | the score of the logit 1 at three keys of each query | every rank | O(batch·heads·n) |
/// | masks with `sees`: the above, and one bit for each key of the range | two ranks | O(batch·heads·n²/R) |
///
/// The ranks compare the queries of every batch entry and head. The three keys are the first, the last and one that
/// varies with the query. The two ranks are the rank that computes the query and the rank before it.
///
/// A call over a cache compares all of the above, for its queries, on every rank. The ranks do not compare the score of
/// other logits and keys (most of a Bias). They do not compare the positions of a Rope on several axes. With `sees`,
/// they do not compare a rank's policies for queries that neither this rank nor the next rank computes. The result does
/// not depend on these policies. Two storage types of one kind and size, such as half and a 16-bit type of your own,
/// count as the same type. A single rank skips the comparison.
///
/// **Errors on one rank**
///
/// | error | result |
/// |---|---|
/// | a policy throws or memory is lacking before the exchange | std::runtime_error with text and rank on every rank |
/// | a policy throws std::invalid_argument before the exchange | the same with std::invalid_argument |
/// | MPI reports an error before the exchange | std::runtime_error with MPI's text |
/// | any error during the exchange | the rank prints the text to stderr and calls MPI_Abort |
///
/// During the exchange of keys or heads, other ranks already wait for messages. A call over a cache computes before its
/// exchange, so its policies throw before the exchange.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_backward.hpp"
#include "detail/mpi/by_heads.hpp"
#include "detail/mpi/check.hpp"
#include "detail/mpi/gap_counts.hpp"
#include "detail/mpi/ring_backward.hpp"
#include "detail/mpi/ring_forward.hpp"
#include "detail/mpi/row_gradient_sums.hpp"
#include "detail/mpi/spread_keys.hpp"
#include "kv_cache.hpp"
#include "mpi_layout.hpp"

SSMAX_BEGIN_CODE
namespace mpi {
/// @addtogroup mpi
/// @{

/// Computes attention (attention.hpp) of a sequence that the layout splits over ranks. Collective. The policies are a
/// scaling, a mask, a score and an executor, in any order. q, k, v and out have one storage type. `out` must not
/// overlap q. Throws std::invalid_argument for `state`, `lengths`, `continues`, and parts of the queries or keys.
template <class A = float, class... P>
requires(detail::is_call<A, P...>()) void attention(Communicator& comm, const Layout& layout,
                                                    const std::type_identity_t<AttentionArguments<A>>& a,
                                                    P&&... policies) {
  const detail::Policies<P...> given(policies...);
  const detail::VariantOf<A, decltype(given)> variant(given.scaling, given.mask, given.score);
  const detail::AttentionOverRanks<A> call{"mpi::attention", comm, layout, a, variant, given.executor};
  detail::PolicyFacts facts;
  const detail::Complaint complaint = detail::complaint_of(call.function, [&] {
    detail::check_rank_arguments(call.function, a);
    facts = detail::checked_policies(call, variant);
  });
  auto agreement = detail::agreement_of<decltype(variant)>(call, call.key_shape());
  agreement.add("a result of scaling, mask or score", facts.fingerprint);
  agreement.add_if(a.q.extent(2) > 0, "the presence of lse, or of a statistic", detail::given_numbers(a));
  agreement.settle(comm, complaint);
  if (comm.ranks() == 1) return ssmax::attention<A>(a, policies...);
  detail::compare_and_exchange(call, variant, [&] {
    if (layout.is_by_heads()) return detail::forward_by_heads<A>(call, agreement.last_agreed());
    detail::ring_forward<A>(call,
                            detail::Pieces(comm, layout, detail::travel_unit(call.key_bytes()), facts.seen));
  });
}

/// Computes attention over a cache (attention.hpp) of the first `length` positions of a layout. The queries have the
/// last positions. Each rank has appended its own positions to the cache, the argument `keys`. Collective. q is equal
/// on all ranks, and so are out and lse. If segments begin at multiples of 1024, the results are bit-identical to those
/// of a single process with one cache. Exception: bfloat16, see above.
///
/// `keys` may be any source (key_source.hpp) with the positions of the rank, in the order of its segments. The source
/// must store all of them: a ring that has overwritten one throws std::invalid_argument.
///
/// key_position must be 0. Exception: with rotate_source_keys it may differ. `out` and `lse` must not overlap q and
/// the memory of the cache. Memory: the states of all chunks of 1024 keys, batch·heads·queries·(dv + 2) numbers per
/// chunk, with statistics (dv + 6).
template <class A = float, class... P>
requires(detail::is_call<A, P...>()) void attention(Communicator& comm, const Layout& layout, index_t length,
                                                    const std::type_identity_t<AttentionArguments<A>>& a,
                                                    P&&... policies) {
  const detail::Policies<P...> given(policies...);
  const detail::VariantOf<A, decltype(given)> variant(given.scaling, given.mask, given.score);
  const detail::AttentionOverRanks<A> call{"mpi::attention", comm, layout, a, variant, given.executor};
  const auto cache = a.keys.is_given() ? a.keys.refer() : shared::AnyKeys<A>();
  const detail::ChunkOfKeys<A> all{cache, length, 0, {0, length}};
  if (!detail::agree_on_source(
          call, variant, all, given.has_mask, [] {}, 0))
    return;
  detail::exchange_or_abort(comm, call.function, [&] { detail::SpreadDecode<A>(call, all).run(); });
}

SSMAX_MISTAKES_OF(attention, Communicator&, const Layout&,
                  const std::type_identity_t<AttentionArguments<detail::ComputeOr<A>>>&)
SSMAX_MISTAKES_OF(attention, Communicator&, const Layout&, index_t,
                  const std::type_identity_t<AttentionArguments<detail::ComputeOr<A>>>&)

/// Counts the visible keys within gaps of each query's largest logit (count_within_gaps of attention.hpp). Collective.
/// The results hold the queries of the rank, in the order of its segments. The gaps are equal on all ranks. Keys travel
/// to the queries, also with `layout.by_heads()`, once for `largest` and once per gap. Values do not travel. Throws as
/// mpi::attention and as count_within_gaps.
template <class A = float, class... P>
requires(detail::is_call<A, P...>()) void count_within_gaps(
    Communicator& comm, const Layout& layout, const std::type_identity_t<AttentionArguments<A>>& a,
    const std::type_identity_t<GapCounts<A>>& to, P&&... policies) {
  const detail::Policies<P...> given(policies...);
  const auto& score = detail::kept_score(given.score);
  const auto variant = detail::logit_variant<A>(given.mask, score);
  const Layout by_keys(layout.segments(), layout.ranks());
  AttentionArguments<A> logits = detail::without_values(a);
  const auto call_of = [&](const shared::Variant<A>& of_pass) {
    return detail::AttentionOverRanks<A>{
        "mpi::count_within_gaps", comm, by_keys, logits, of_pass, given.executor};
  };
  const auto call = call_of(variant);
  detail::PolicyFacts facts;
  const detail::Complaint complaint = detail::complaint_of(call.function, [&] {
    detail::check_gap_counts<A>(call.function, a, to);
    detail::check_rank_arguments(call.function, logits);
    facts = detail::checked_policies(call, variant);
  });
  auto agreement = detail::agreement_of<decltype(variant)>(call, call.key_shape());
  agreement.add("gaps", detail::fingerprint_of_gaps(to));
  agreement.add("a result of mask or score", facts.fingerprint);
  agreement.settle(comm, complaint);
  if (comm.ranks() == 1) return ssmax::count_within_gaps<A>(a, to, policies...);
  detail::compare_and_exchange(call, variant, [&] {
    const detail::Pieces pieces(comm, by_keys, detail::travel_unit(call.key_bytes()), facts.seen);
    detail::for_each_pass(
        to, variant, detail::LargestOfSegment<A>{to.largest, pieces.segments()}, logits,
        [&](const shared::Variant<A>& of_pass) { detail::ring_forward<A>(call_of(of_pass), pieces); },
        [&](const View<A, 3>& counts) { detail::invert_counts(counts, to.largest); });
  });
}

/// The same over a cache of the first `length` positions of a layout, as attention over a cache. The results are equal
/// on all ranks.
template <class A = float, class... P>
requires(detail::is_call<A, P...>()) void count_within_gaps(
    Communicator& comm, const Layout& layout, index_t length,
    const std::type_identity_t<AttentionArguments<A>>& a, const std::type_identity_t<GapCounts<A>>& to,
    P&&... policies) {
  const detail::Policies<P...> given(policies...);
  const auto& score = detail::kept_score(given.score);
  const auto variant = detail::logit_variant<A>(given.mask, score);
  AttentionArguments<A> logits = detail::without_values(a);
  auto cache = a.keys.is_given() ? a.keys.refer() : shared::AnyKeys<A>();
  cache.leave_out_values();
  const detail::ChunkOfKeys<A> all{cache, length, 0, {0, length}};
  const auto call_of = [&](const shared::Variant<A>& of_pass) {
    return detail::AttentionOverRanks<A>{
        "mpi::count_within_gaps", comm, layout, logits, of_pass, given.executor};
  };
  const auto call = call_of(variant);
  const bool has_rows = detail::agree_on_source(
      call, variant, all, given.has_mask, [&] { detail::check_gap_counts<A>(call.function, a, to); },
      detail::fingerprint_of_gaps(to));
  if (!has_rows) return;
  detail::exchange_or_abort(comm, call.function, [&] {
    detail::for_each_pass(
        to, variant, detail::LargestInPlace<A>{to.largest}, logits,
        [&](const shared::Variant<A>& of_pass) {
          const auto pass = call_of(of_pass);
          detail::SpreadDecode<A>(pass, all).run();
        },
        [&](const View<A, 3>& counts) { detail::invert_counts(counts, to.largest); });
  });
}

SSMAX_MISTAKES_OF(count_within_gaps, Communicator&, const Layout&,
                  const std::type_identity_t<AttentionArguments<detail::ComputeOr<A>>>&,
                  const std::type_identity_t<GapCounts<detail::ComputeOr<A>>>&)
SSMAX_MISTAKES_OF(count_within_gaps, Communicator&, const Layout&, index_t,
                  const std::type_identity_t<AttentionArguments<detail::ComputeOr<A>>>&,
                  const std::type_identity_t<GapCounts<detail::ComputeOr<A>>>&)

/// Computes the gradients of attention (attention_backward.hpp) of a sequence that the layout splits over ranks.
/// Collective. Gradients of 16 bits are sums in float, rounded once. q, k, v, out, dout, dq, dk and dv have one storage
/// type. Throws std::invalid_argument for `accumulate`, and for a layout of more than 16,384 segments.
///
/// | gradient | result on a rank |
/// |---|---|
/// | dq, dk, dv | the rows of this rank |
/// | ds, db, dslopes, dsinks: sums over queries | the whole gradient |
/// | dc of a PerQuery, dbias of a Bias: one value per query | the whole gradient, for the whole sequence |
/// | your score function, gradient_row missing or null | the gradient from the queries that this rank computed |
///
/// If several queries or heads share a row of dbias, the ranks add the row in the order of their first queries. The
/// row is bit-identical for every run with the same layout. It is also bit-identical to a single-process run if one
/// rank has all of these queries, and the queries belong to one batch entry and head.
template <class A = float, class... P>
requires(detail::is_call<A, P...>()) void attention_backward(
    Communicator& comm, const Layout& layout, const std::type_identity_t<BackwardArguments<A>>& a,
    const std::type_identity_t<AttentionGradients<A>>& g, P&&... policies) {
  const detail::Policies<P...> given(policies...);
  const detail::GradientVariantOf<A, decltype(given)> variant(given.scaling, given.mask, given.score);
  const detail::BackwardOverRanks<A> call{
      "mpi::attention_backward", comm, layout, a, variant, given.executor};
  detail::RowGradientSums rows(given.score);
  detail::PolicyFacts facts;
  const detail::Complaint complaint = detail::complaint_of(call.function, [&] {
    detail::check_rank_arguments(call.function, a, g);
    const index_t segments = std::ssize(layout.segments());
    if (segments > 16384) {
      detail::fail_value(call.function, "layout", "has segments", segments, "must be at most", 16384);
    }
    facts = detail::checked_policies(call, variant);
    rows.list(call.shape(), detail::computing_rank(call));
  });
  auto agreement = detail::agreement_of<decltype(variant)>(call, call.key_shape());
  agreement.add("a result of scaling, mask or score", facts.fingerprint);
  agreement.add("the set of queries that share a gradient row of the score", rows.fingerprint());
  agreement.add("the presence of dsinks", g.dsinks.empty() ? 0 : 1);
  agreement.add_if(a.q.extent(2) > 0, "the presence of dlse", detail::is_given(g.dlse) ? 1 : 0);
  agreement.settle(comm, complaint);
  if (comm.ranks() == 1) return ssmax::attention_backward<A>(a, g, policies...);
  detail::compare_and_exchange(call, variant, [&] {
    rows.begin(comm.rank());
    if (layout.is_by_heads()) {
      detail::backward_by_heads<A>(call, g, agreement.last_agreed() != 0);
    } else {
      const detail::Pieces pieces(comm, layout, detail::travel_keys, facts.seen);
      detail::RingBackward<A>(call, g, pieces).run();
    }
    rows.add_up(comm);
  });
}

SSMAX_MISTAKES_OF(attention_backward, Communicator&, const Layout&,
                  const std::type_identity_t<BackwardArguments<detail::ComputeOr<A>>>&,
                  const std::type_identity_t<AttentionGradients<detail::ComputeOr<A>>>&)

/// Appends new positions to the cache of this rank, which holds the rank's positions of the layout, in their order. The
/// tensors k and v [batch, kv_heads, new, channels] hold the positions [first, first + new) of the sequence, those of
/// other ranks included. With a rope, rotates keys to their positions in the sequence. A local call. Throws
/// std::invalid_argument if the layout lacks the positions, the cache lacks earlier positions of the rank, or a tensor
/// does not fit. The cache is then unchanged.
template <class K, class V>
void append(KvCache<K, V>& cache, const Layout& layout, int rank, index_t first,
            std::type_identity_t<View<const ComputeType<K>, 4>> k,
            std::type_identity_t<View<const ComputeType<K>, 4>> v,
            const Rope<ComputeType<K>>* rope = nullptr) {
  const char* function = "mpi::append";
  detail::check_view(function, "k", k);
  detail::check_view(function, "v", v);
  for (int i = 0; i < 3; ++i) detail::check_extent(function, "v", v, i, "k", k, i);
  detail::check_part(function, "first", first, k.extent(2), "leaves no room for k in the layout's positions,",
                     "positions", layout.positions());
  const index_t held = detail::check_held(function, cache, layout, rank, first);
  std::vector<index_t> rows,
      offsets;  // of the rank's positions: in k and v, and from the length of its sequences
  for (const Segment& segment : layout.segments()) {
    if (segment.rank != rank) continue;
    for (index_t at = std::max(segment.begin, first); at < std::min(segment.end, first + k.extent(2)); ++at) {
      rows.push_back(at - first);
      offsets.push_back(at - held);
    }
  }
  // A single append stores all positions or, after an error, no position.
  const auto new_k = detail::gathered_rows(k, rows), new_v = detail::gathered_rows(v, rows);
  using T = ComputeType<K>;
  cache.append(View<const T, 4>(new_k.data(), {k.extent(0), k.extent(1), std::ssize(rows), k.extent(3)}),
               View<const T, 4>(new_v.data(), {v.extent(0), v.extent(1), std::ssize(rows), v.extent(3)}),
               rope, {}, offsets);
}

/// @}
}  // namespace mpi

SSMAX_END
