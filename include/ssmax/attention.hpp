/// @defgroup attention Attention (attention.hpp)
/// Attention, forward, over all keys or a part of them. attention_source.hpp has attention over a source of keys.
///
///     out_i = Σ_j p_ij v_j,                                   over the keys j that i sees
///     p_i   = softmax(c_i · score(scale · (R q_i)·(R k_j)))   likewise
///
/// Shapes: q [batch, heads, queries, d], k [batch, kv_heads, keys, d], v [batch, kv_heads, keys, dv], out
/// [batch, heads, queries, dv], lse [batch, heads, queries] if wanted. Last stride 1, other strides free,
/// so that [batch, position, head, channel] and packed qkv need no copy. heads is a multiple of kv_heads;
/// head h reads kv head h / (heads / kv_heads). T is float, double, half or bfloat16, or Elements where the types of
/// tensors differ (elements.hpp); half and bfloat16 are computed in float (`detail::Compute<T>`, the type of lse and
/// sinks: float, but double for double), but for the products of bfloat16 below.
///
///     scale   1/√d unless given
///     R       the rotary embedding, if given: key j at key_position + j, query i at
///             key_position + i + keys - queries, or where the mask says
///     score   Identity, Softcap, Alibi, Bias, … or the user's own (score.hpp)
///     c_i     scaling({head, position, n}): n visible keys, the query's own position (row.hpp)
///     mask    Full, Causal (bottom-right), SlidingWindow, Documents, … or the user's own (mask.hpp)
///     sinks   if given, one number per head: softmax's denominator has one term more, exp(sink) or, with
///             scaled_sinks, as of a key with that logit, exp(c_i·sink). -inf is no sink, +inf takes
///             everything (out 0, lse +inf; scaled by a c above 0), NaN spreads
///
/// lse_i = ln Σ_j exp(c_i · score(…)) (+ the sink's term), natural logarithm. A query that sees nothing
/// gives out 0 and lse -inf, or the sink; it has no c, so a scaled sink leaves it at -inf.
///
/// Keys are taken in blocks with an online softmax, so memory is linear in the sequence: at most 1.1 MiB a
/// thread at width 64 (1.4 where 16-bit products take rotated keys), and 32 MiB where keys are split among
/// threads. Keys that no query of a group sees are not computed. Hidden keys never enter a result: NaN in them
/// stays there. NaN in visible ones spreads.
///
/// Accuracy: products in T, summed over 1024 keys, then over all of them; weights to an ulp. That is for
/// rounding to nearest. In the other modes (fesetround), where logits are ordinary, the error of out is at
/// most 5e-5·Σ p |v| and that of lse 5e-5·(1 + |lse|); in double, 5e-11 takes the place of 5e-5. The bits
/// are the same for every executor, for other strides, and however the queries are cut into calls of more
/// than 16 queries per kv head. Exception: bfloat16 with 16-bit products, where a call has at most 128 keys.
///
/// bfloat16 q, k and v on a processor with 16-bit products (targets amx, avx512_bf16, neon_bf16), five queries or
/// more per kv head: q, k, v and the weights go into the products as bfloat16, which are summed in float. Logits, states
/// and multipliers are float; weights are rounded once and summed as rounded. With ε = 2^-8 the error of out,
/// before it is rounded to bfloat16, is at most 2.1 ε·Σ p |v|, that of lse at most 1.1 ε. By pair dots, up to
/// 16 queries per kv head sum their weights before they are rounded: ε·Σ p |v|, and float's lse; with a rope on
/// keys, they are computed in float. A rotated q or k is taken in two parts of 8 bits, so that a multiplier
/// enlarges no more than it does in float. Subnormal numbers count as 0; an infinite number in a rotated q or k
/// makes NaN. Calls with at most 128 keys, other than of a cache, are computed in float, and so is all where
/// `float_products` in the options asks for it, within the bounds above.
///
/// One allocation a call, none with a workspace. `out` and `lse` must lie apart from the inputs. lse is left
/// out as `View{}` alone: null with extents is an error. Errors are std::invalid_argument, thrown before
/// anything is written.
#pragma once

#include <optional>
#include <span>

#include "attention_state.hpp"
#include "detail/attention/call/build.hpp"
#include "detail/attention/call/untyped.hpp"
#include "detail/attention/call/user_variant.hpp"
#include "detail/attention/forward/driver.hpp"
#include "elements.hpp"
#include "execution.hpp"
#include "explain.hpp"
#include "mask.hpp"
#include "rope.hpp"
#include "scaling.hpp"
#include "score.hpp"
#include "sequence_lengths.hpp"
#include "view.hpp"
#include "workspace.hpp"

/// @addtogroup attention
/// @{
SSMAX_BEGIN_CODE

/// What attention reads and writes.
template <class T>
struct AttentionArguments {
  View<const detail::QueryElement<T>, 4> q{};  ///< [batch, heads, queries, d].
  View<const detail::KeyElement<T>, 4> k{};    ///< [batch, kv_heads, keys, d].
  View<const detail::ValueElement<T>, 4> v{};  ///< [batch, kv_heads, keys, dv].
  View<detail::OutElement<T>, 4> out{};        ///< [batch, heads, queries, dv].
  View<detail::Compute<T>, 3> lse{};           ///< [batch, heads, queries], or left out.
};

/// What may be left out. The functions of attention, its backward and decode share it.
template <class T>
struct AttentionOptions {
  std::optional<double> scale{};                   ///< 1/√d unless given.
  const Rope<detail::Compute<T>>* rope = nullptr;  ///< Rotates q and, unless a source holds them, keys.
  index_t key_position = 0;                        ///< Of the first key, for the rope.
  std::span<const detail::Compute<T>> sinks{};     ///< One number per head.
  Workspace* workspace = nullptr;                  ///< Memory kept between calls.
  bool float_products = false;                     ///< bfloat16: products in float on every processor.
  bool scaled_sinks = false;                       ///< Sinks are logits, times c. (Not in finish.)
  bool rotate_source_keys =
      false;  ///< A source's keys are not rotated yet: the rope rotates them in the call.
  /// Each sequence's own numbers of queries and keys. (Not in attention_partial, finish and over MPI.)
  SequenceLengths lengths{};
  Explanation* explanation = nullptr;  ///< Written, if given: how the call is computed. (Not in finish.)
};

/// For attention_partial: k and v hold keys [first_key, first_key + k.extent(2)) of `keys`, q holds queries
/// [first_query, first_query + q.extent(2)) of `queries`.
template <class T>
struct PartialArguments {
  View<const detail::QueryElement<T>, 4> q{};  ///< [batch, heads, queries of the part, d].
  View<const detail::KeyElement<T>, 4> k{};    ///< [batch, kv_heads, keys of the part, d].
  View<const detail::ValueElement<T>, 4> v{};  ///< [batch, kv_heads, keys of the part, dv].
  index_t first_key = 0,                       ///< Where the part begins.
      keys = 0;                                ///< How many keys there are in all.
  AttentionState<detail::Compute<T>> state{};  ///< Written: the softmax's state of every query.
  index_t first_query = 0,                     ///< Where q begins.
      queries = 0;                             ///< How many queries there are in all; 0: q holds the last.
  /// Whether the state holds what keys before these gave. Parts that begin at multiples of 1024 keys, each
  /// continuing the one before, give the bits of all keys at once.
  bool continues = false;
};

/// Attention, forward: formula, shapes and bounds are at the top of attention.hpp. Write the element type,
/// arguments do not deduce it:
///
///     attention<float>({.q = q, .k = k, .v = v, .out = out}, SSMax<float>{s, b}, Causal{}, Softcap{50},
///                      {.rope = &rope}, pool);
template <class T, class S, class M, class C, class E = Serial>
requires Scaling<S> && Mask<M> && Score<C> && Executor<E>
void attention(const std::type_identity_t<AttentionArguments<T>>& a, const S& scaling, const M& mask,
               const C& score, const std::type_identity_t<AttentionOptions<T>>& options = {},
               E&& executor = E{}) {
  static_assert(
      detail::CallElements<T>,
      "ssmax::attention: T is float, double, half, bfloat16, or Elements of types that one type computes");
  const detail::UserVariant<detail::Compute<T>, S, M, C> variant(scaling, mask, score);
  const detail::AttentionCall<T> call("attention", a, options, variant);
  compiled::run_attention<detail::OperandsOf<T>>(call.problem, variant, call.result, options.workspace,
                                                 detail::AnyExecutor(executor));
}

/// The same without a score.
template <class T, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && Mask<M> && Executor<E>
void attention(const std::type_identity_t<AttentionArguments<T>>& arguments, const S& scaling = {},
               const M& mask = {}, const std::type_identity_t<AttentionOptions<T>>& options = {},
               E&& executor = E{}) {
  attention<T>(arguments, scaling, mask, Identity{}, options, std::forward<E>(executor));
}

/// Attention of all queries or a part of them over a part of the keys, to be merged with attention over the
/// other parts. Mask and score speak of all `queries` and all `keys`, and n counts all keys that a query sees.
/// Options as for attention; sinks are for finish.
template <class T, class S, class M, class C, class E = Serial>
requires Scaling<S> && Mask<M> && Score<C> && Executor<E>
void attention_partial(const std::type_identity_t<PartialArguments<T>>& a, const S& scaling, const M& mask,
                       const C& score, const std::type_identity_t<AttentionOptions<T>>& options = {},
                       E&& executor = E{}) {
  static_assert(detail::CallElements<T>,
                "ssmax::attention_partial: T is float, double, half, bfloat16, or Elements of types that one "
                "type computes");
  const detail::UserVariant<detail::Compute<T>, S, M, C> variant(scaling, mask, score);
  const detail::AttentionCall<T> call("attention_partial", a, options, variant);
  compiled::run_attention<detail::OperandsOf<T>>(call.problem, variant, call.result, options.workspace,
                                                 detail::AnyExecutor(executor));
}

/// The same without a score.
template <class T, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && Mask<M> && Executor<E>
void attention_partial(const std::type_identity_t<PartialArguments<T>>& arguments, const S& scaling = {},
                       const M& mask = {}, const std::type_identity_t<AttentionOptions<T>>& options = {},
                       E&& executor = E{}) {
  attention_partial<T>(arguments, scaling, mask, Identity{}, options, std::forward<E>(executor));
}

SSMAX_END
/// @}
