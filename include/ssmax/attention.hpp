/// @defgroup attention Attention (attention.hpp)
/// Computes attention, forward. The keys are in views, or in a source of keys (key_source.hpp): a KvCache, pages,
/// memory of your own.
///
///     attention({.q = q, .k = k, .v = v, .out = out, .rope = &rope}, SSMax<float>{s}, Causal{}, pool);
///     attention({.q = q_new, .keys = cache, .out = out, .rope = &rope}, SSMax<float>{s}, Causal{}, pool);
///
///     out_i = Σ_j p_ij v_j                                    j: the keys that are visible to query i
///     p_i   = softmax(c_i · score(scale · (R q_i)·(R k_j)))   over the same keys
///     lse_i = ln Σ_j exp(c_i · score(scale · (R q_i)·(R k_j)))   natural logarithm; plus the sink's term
///
/// | tensor | shape |
/// |---|---|
/// | q | [batch, heads, queries, d] |
/// | k | [batch, kv_heads, keys, d] |
/// | v | [batch, kv_heads, keys, dv] |
/// | keys | a source of keys, in place of k and v |
/// | out | [batch, heads, queries, dv] |
/// | lse | [batch, heads, queries]; optional |
///
/// The last stride is 1. You choose the other strides, so [batch, position, head, channel] and packed qkv need no
/// copy. `heads` is a multiple of `kv_heads`. Head h reads kv head h / (heads / kv_heads).
///
/// `attention<A>` computes in A: in float unless you write A, in double with `attention<double>`. Each tensor has its
/// own storage type (storage.hpp). lse, sinks, states and the rope have type A. Exception: the bf16 path multiplies
/// bfloat16 operands.
///
/// | A | storage types |
/// |---|---|
/// | float | float, half, bfloat16, a type of your own; in caches also types of 8 bits (eight_bit.hpp) and Q8_0 |
/// | double | double |
///
/// The policies follow the arguments in any order, each at most once:
///
/// | policy | default | header |
/// |---|---|---|
/// | a scaling | Softmax | scaling.hpp |
/// | a mask | Full. Exception: over a source (below) | mask.hpp |
/// | a score function | Identity | score.hpp |
/// | an executor | Serial | execution.hpp |
///
/// | name | meaning |
/// |---|---|
/// | scale | 1/√d by default |
/// | R | the optional rotary embedding, at the positions of keys and queries |
/// | position of key j | j, or the position that the mask defines; R adds key_position |
/// | position of query i | i + keys - queries, or the position that the mask defines; R adds key_position |
/// | score | Identity, Softcap, Alibi, Bias, … or your own score function (score.hpp) |
/// | c_i | scaling({head, position, n}): n visible keys, the query's own position (row.hpp) |
/// | mask | Full, Causal (bottom-right), SlidingWindow, Documents, … or your own mask (mask.hpp) |
/// | sinks | optional, one number per head: adds exp(sink) to the denominator of the softmax |
/// | scaled_sinks | the sink is a logit: adds exp(c_i·sink) to the denominator instead |
///
/// | special value | result |
/// |---|---|
/// | no key is visible to a query | out is 0 and lse is -inf |
/// | the same, with `sinks` | out is 0 and lse is the sink |
/// | the same, with `scaled_sinks` | out is 0 and lse is -inf: the query has no multiplier |
/// | a sink of -inf | as without a sink |
/// | a sink of +inf | out is 0 and lse is +inf; a scaled sink: if c is above 0 |
/// | a sink of NaN | NaN in the rows of its head |
/// | NaN in a masked key or value | does not affect the result |
/// | NaN in a visible key | NaN in out and lse of the queries that attend to the key |
/// | NaN in a channel of a visible value | NaN in this channel of out, for the queries that attend to the key |
/// | c·log2(e)·z of a visible key is above the range of the compute type | NaN in out and lse of the query |
/// | c·log2(e)·z of a visible key is below this range | the key has the weight 0 |
///
/// **Over a source**, pass any mask, such as Causal{} for new positions:
///
///     cache.append(k_new, v_new, &rope);  // the keys of the new positions first
///     attention({.q = q_new, .keys = cache, .out = out, .rope = &rope}, scaling, Causal{}, pool);
///
/// | mask | visible keys |
/// |---|---|
/// | Causal{}, or another causal mask | for new positions: the keys up to the query's own position |
/// | Full{} | every key of the sequence, as in cross attention |
///
/// n and positions count the keys of the sequence in the source: query i has position length - queries + i. A sequence
/// may have no keys.
///
/// | a call over a source throws if | exception |
/// |---|---|
/// | a sequence has more than one query and no mask is given | |
/// | a sequence has fewer keys than queries | `more_queries_than_keys`, as in cross attention |
/// | the mask shows a key that the source no longer stores | |
/// | out or lse overlaps the memory of the source | |
///
/// | option | rope |
/// |---|---|
/// | default | rotates q to its positions in the sequence. Stored keys are rotated already. key_position must be 0 |
/// | `rotate_source_keys` | rotates q and keys in the call as for views, with key_position and the mask's positions |
///
/// The default ignores positions that a mask restarts, as Documents does. Exception: under a mask with
/// `rotated_to_positions` (query.hpp), such as Tree (mask_runs.hpp), the call rotates q to the mask's positions.
///
/// **Over a range of the keys**, with `state`: the call writes a state of every query in place of out and lse. Merge
/// the state with states over the other keys (attention_state.hpp). The mask and the score function receive indices
/// among all queries and all keys, and n counts all visible keys. Pass sinks to `finish`.
///
/// Attention computes an online softmax over key blocks, so its memory is linear in the sequence length. Attention
/// skips keys that are masked for every query of a query block.
///
/// | memory | condition |
/// |---|---|
/// | at most 1.1 MiB per thread | width 64 |
/// | at most 1.43 MiB per thread | width 64, bf16 path, keys rotated in the call |
/// | at most 32 MiB in addition, per call | the call splits the keys among threads |
///
/// Accuracy: when rounding to nearest, a weight is within 1 ulp. Attention adds products in chunks of 1024 keys and
/// then adds the chunks. In the other rounding modes (fesetround), ordinary logits have these bounds, with weights p:
///
/// | type of computation | error of out | error of lse |
/// |---|---|---|
/// | float | 5e-5·Σ p abs(v) | 5e-5·(1 + abs(lse)) |
/// | double | 5e-11·Σ p abs(v) | 5e-11·(1 + abs(lse)) |
///
/// Results are bit-identical for every executor and for all strides. A row is one query of one query head: for a kv
/// head, a call has queries · heads / kv_heads rows. Results are also bit-identical if you split the queries into
/// several calls that have each:
///
/// | calls | rows |
/// |---|---|
/// | float products | more than 16 |
/// | bf16 path | at least 5 |
/// | bf16 path on avx512_bf16 and neon_bf16, the calls rotate keys | more than 16 |
///
/// On targets with bfloat16 products, a bfloat16 call with at most 128 keys can take the short_keys path. Its results
/// can differ from those of a longer call.
///
/// With `batch_invariant`, results are bit-identical if you split the queries into any calls, also over a cache. A
/// query takes the bf16 path or prefill for any number of rows. docs/numerics.md has the price. The backward ignores
/// the option.
///
/// With `dropout`, a call takes prefill_bf16 if it is bf16 (below), else prefill. With `statistics`, no call takes
/// short_keys, and prefill_bf16 replaces decode_bf16. Without `dropout` and `batch_invariant`, the first path of this
/// table whose condition holds computes the call (explain.hpp reports the path). ε₁₆ is 2^-8. The errors are those
/// before out is rounded to its storage type.
///
/// | path | condition | rounded to bfloat16 | error of out | error of lse |
/// |---|---|---|---|---|
/// | short_keys | at most 128 keys, 4 rows or more; no `continues`; cache: below | - | as float | as float |
/// | prefill_bf16 | bf16 (below); rows: amx 5, neon 13, else 17 or more | weights | 2.1 ε₁₆·Σ p abs(v) | 1.1 ε₁₆ |
/// | decode_bf16 | bf16 (below); not amx; 5 to 16 rows; keys not rotated | weights | 2.1 ε₁₆·Σ p abs(v) | 1.1 ε₁₆ |
/// | decode | at most 16 rows | - | as float | as float |
/// | prefill | all other calls | - | as float | as float |
///
/// Over a cache, short_keys takes float products of more than 16 rows. Its results are bit-identical to prefill's.
///
/// "bf16" means: q, k and v are bfloat16, the target is amx, avx512_bf16 or neon_bf16, and `float_products` is false.
/// The keys and values of a cache may also have 8 bits (eight_bit.hpp): the path dequantizes their rows to bfloat16.
/// "Keys not rotated" means: the call has no rope, or a cache holds keys that are rotated already. The bf16 path
/// multiplies bfloat16 operands and adds the products in float. Logits, states and multipliers are float. The sum adds
/// the rounded weights. decode_bf16 is bit-identical to prefill_bf16. On neon_bf16, decode_bf16 takes 5 to 12 rows. The
/// bf16 path splits a rotated q or k into two bfloat16 numbers, high and low, which keep 16 bits of it. With
/// `rounded_rotation`, the path rounds a rotated q or k to one bfloat16 number. The result is then that of a call
/// without a rope over the rounded rows. The bf16 path treats subnormal numbers as 0. An infinity in a rotated q or k
/// gives NaN.
///
/// The errors above hold for ordinary logits. If products of channels cancel (massive activations), the rounding of the
/// logits adds 8·L·ε·Σ p abs(v) to the error of out and 4·L·ε to the error of lse. Here, ε is 2^-23, and 2^-18 for
/// split rows. L is the largest abs(c)·scale·Σ_t abs(q_t k_t) over the visible keys, and L·ε must be below 1.
///
/// **Results over a source, compared with one call over views of all keys.** A prompt in chunks is such a case: append,
/// attention, append, attention, …
///
/// | condition | result |
/// |---|---|
/// | each call has more than 16 rows, and the cache does not round | bit-identical |
/// | all calls have `batch_invariant`, and the cache does not round | bit-identical |
/// | bfloat16 with at most 128 keys | the bf16 path over a source, float over views |
/// | fewer rows | products are summed in another order: error ≤ 4·(d + 1024 + n / 1024 + L)·ε·Σ p abs(v) |
/// | the same on the bf16 path | within the bounds of both paths |
///
/// ε is 2^-23, or 2^-52 in double. A cache rounds rows of another type. It also rounds keys of half and bfloat16 after
/// rotating them. Calls on the decode path are bit-identical for any number of rows, which is at most 16.
///
/// A call allocates once, with sequences of their own lengths or with common keys twice, and with a large enough
/// workspace not at all. `out` and `lse` must not overlap the inputs. Exception: `out` may be q, with the same extents,
/// strides and type. The backward pass then lacks q, and a policy that throws leaves a part of q overwritten. To omit
/// lse, pass `View{}`: a null pointer with extents is an error. Throws std::invalid_argument for every error, before
/// anything is written.
#pragma once

#include "attention_arguments.hpp"
#include "detail/attention/desk/build.hpp"
#include "detail/attention/desk/gap_counts.hpp"
#include "detail/attention/desk/mistakes.hpp"
#include "detail/attention/desk/policies.hpp"
#include "detail/attention/desk/user_variant.hpp"
#include "execution.hpp"
#include "mask.hpp"
#include "scaling.hpp"
#include "score.hpp"

/// @addtogroup attention
/// @{
SSMAX_BEGIN_CODE

/// Computes attention, forward. The top of attention.hpp has the formula, the shapes and the error bounds. `policies`
/// are a scaling, a mask, a score and an executor, in any order, each at most once. Their defaults are Softmax, Full,
/// Identity and Serial. A is the type of computation: float unless written.
///
///     attention({.q = q, .k = k, .v = v, .out = out, .rope = &rope}, SSMax<float>{s, b}, Causal{}, Softcap{50}, pool);
template <class A = float, class... P>
requires(detail::is_call<A, P...>()) void attention(const std::type_identity_t<AttentionArguments<A>>& a,
                                                    P&&... policies) {
  const detail::Policies<P...> given(policies...);
  const detail::VariantOf<A, decltype(given)> variant(given.scaling, given.mask, given.score);
  shared::ForwardCall<A> call{};
  detail::build_call("attention", a, a.keys, call);
  call.facts.has_mask = given.has_mask;
  compiled::open_call(call, variant);
  a.q.functions()->run(call.problem, variant, call.result, a.workspace, given.executor);
}

SSMAX_MISTAKES_OF(attention, const std::type_identity_t<AttentionArguments<detail::ComputeOr<A>>>&)

/// Counts the visible keys within gaps of each query's largest logit. z is a logit after the score function and before
/// the multiplier c, as in RowStatistics.
///
///     largest(b, h, i) = max_j z_j        counts(g, b, h, i) = number of visible keys j with z_j >= largest - gaps[g]
///
///     count_within_gaps({.q = q, .keys = cache}, {.gaps = gaps, .largest = largest, .counts = counts}, Causal{});
///
/// Reads q, the keys and the options of `a`, over views or a source. Reads the mask, the score and the executor. The
/// members v, out, lse, sinks, dropout and statistics may be given and have no effect. The scaling has no effect
/// either, because c does not change z.
///
/// Computes the logits once for `largest` and once per gap, each time with the same bits. So the largest key counts for
/// each gap, and a gap of 0 counts the keys that are equal to it. The difference `largest` - gap is rounded to A. z has
/// the errors of RowStatistics. Without a score function, attention may round z in another order.
///
/// | query | largest | counts |
/// |---|---|---|
/// | no key is visible | -inf | 0 |
/// | a visible z is NaN or above the range of A | NaN | NaN |
/// | a z of -inf, or below the range of A | as masked | as masked |
/// | at least 2^23 keys count, in float | exact | rounded |
///
/// Throws std::invalid_argument before anything is written: as attention, for a `state`, and for a gap that is NaN or
/// below 0. The results must not overlap each other, q, the keys or the gaps. Source: arXiv:2605.12697.
template <class A = float, class... P>
requires(detail::is_call<A, P...>()) void count_within_gaps(
    const std::type_identity_t<AttentionArguments<A>>& a, const std::type_identity_t<GapCounts<A>>& to,
    P&&... policies) {
  const char* function = "count_within_gaps";
  const detail::Policies<P...> given(policies...);
  const auto& score = detail::kept_score(given.score);
  detail::check_gap_counts<A>(function, a, to);
  AttentionArguments<A> logits = detail::without_values(a);
  shared::ForwardCall<A> call{};
  const auto pass = [&](const shared::Variant<A>& variant) {
    call = {};
    detail::build_call(function, logits, a.keys, call);
    call.problem.keys.leave_out_values();
    call.facts.has_mask = given.has_mask;
    compiled::open_call(call, variant);
    a.q.functions()->run(call.problem, variant, call.result, a.workspace, given.executor);
  };
  const auto finish = [&](const View<A, 3>& counts) {
    for (index_t b = 0; b < call.problem.sequences(); ++b) {
      const shared::Sequence rows = detail::sequence_of(call.problem, b);
      detail::invert_counts(counts, to.largest, rows.entry, rows.first_row, rows.queries);
    }
  };
  detail::for_each_pass(to, detail::logit_variant<A>(given.mask, score),
                        detail::LargestInPlace<A>{to.largest}, logits, pass, finish);
}

SSMAX_MISTAKES_OF(count_within_gaps, const std::type_identity_t<AttentionArguments<detail::ComputeOr<A>>>&,
                  const std::type_identity_t<GapCounts<detail::ComputeOr<A>>>&)

SSMAX_END
/// @}
