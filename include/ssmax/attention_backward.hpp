/// @defgroup attention_backward Attention, backward (attention_backward.hpp)
/// Attention, backward: from the gradient of `out` (and of `lse`, if wanted) to those of q, k and v, of
/// the scaling's s and b, of the score's parameters and of the sinks. What attention computes, and all
/// names, are in attention.hpp.
///
///     p_ij  = exp(c_i·z'_ij - lse_i)        the weights, computed again
///     δ_i   = ⟨dout_i, out_i⟩ - dlse_i
///     u_ij  = p_ij (⟨dout_i, v_j⟩ - δ_i)
///     dz_ij = c_i u_ij · score'(z_ij)
///     dq_i  = Rᵀ scale Σ_j dz_ij (R k_j)
///     dk_j  = Rᵀ scale Σ_i dz_ij (R q_i)    over all query heads of a kv head
///     dv_j  = Σ_i p_ij dout_i               likewise
///     dc_i  = Σ_j u_ij z'_ij                also where c_i is 0 or negative; handed to the scaling:
///                                           SSMax{s, b}.gradient(ds, db), …
///     dsink = -Σ_i exp(sink - lse_i) δ_i    0 for a sink of -inf; Σ_i dlse_i, the limit, for one of +inf
///
/// With scaled_sinks, w_i = -exp(c_i·sink - lse_i) δ_i, dsink = Σ_i c_i w_i, and dc_i has one term more,
/// sink·w_i.
///
/// dq, dk and dv are overwritten. Exception: with `accumulate`, the call adds the gradients to dq, dk and dv. The sum
/// is formed in the type that T is computed in, and rounded once to T: for float and double, the result has the bits
/// of old value + gradient, where the gradient is what a call without `accumulate` writes. Gradients of parameters
/// (ds, db, dp, dslopes, dbias, dsinks) are always added: zero them before the first call. A query that sees
/// nothing has no gradient (but its sink may have one, through lse). Hidden keys get none, and nothing of them is read into a result: NaN in them stays there.
/// NaN in what a query sees, or in its own numbers, spreads to what depends on it.
///
/// Memory is linear in the sequence. Every kv head at work (as many as threads, or fewer) takes 4·d + 32
/// bytes a query and 4·(d + dv) a key, which is 26 MiB at width 64 with 32768 of both; as much again for
/// keys under a rope. Where T is half or bfloat16, or with `accumulate`, 4·d bytes a query and 4·(d + dv) a key are
/// added. Where something is learnt, 32 bytes a query of
/// the call are added. One allocation a call, none with a workspace. The same bits for every executor,
/// without atomic additions.
///
/// Accuracy: products are summed in T over 2048 keys or 1920 queries, then over all of them. A weight is as
/// good as lse: an lse of 1000 in float is rounded by 3e-5, and so is every weight of its row. In dc = Σ
/// u·z terms cancel, as Σ u = 0: where `out` was rounded to 16 bits, Σ u is not quite 0, and dc errs by
/// that times the size of the logits.
///
/// bfloat16 on a processor with 16-bit products (targets amx, avx512_bf16, neon_bf16): q, k, v and dout go into
/// the products as bfloat16, weights p and gradients dz are rounded to it for theirs, and all is summed in
/// float. Logits, δ and u are float, and dc is summed up before anything is rounded. A rotated q or k comes in
/// two parts of 8 bits for the logits, so that a multiplier enlarges no more than it does in float, and as its
/// first part for dk and dq. An lse that attention wrote with such products is that of rounded weights, off by
/// up to 1.1 ε, where ε = 2^-8; so are all weights of its row, by the same factor. (A sum of unrounded weights
/// for lse would be one more number of every state, the partial ones that are merged included.) Beside what is
/// said above, and before they are rounded to bfloat16, the errors are at most
///
///     dv   2.1 ε · Σ_i p_ij |dout_i|
///     dq   2.1 ε · scale Σ_j |dz_ij| |k_j|     and ε more under RoPE, as norms of turned pairs
///     dk   2.1 ε · scale Σ_i |dz_ij| |q_i|     likewise
///     dc   1.1 ε · |dc_i|                      so ds, db and the like: of each row's share of them
///
/// Subnormal numbers count as 0 in products; an infinite number in a rotated q or k makes NaN. `float_products`
/// in the options asks for float's arithmetic instead. Memory then is 6·d + 4·dv bytes a key more, 12·d under
/// RoPE.
///
/// Outputs must lie apart from the inputs and from each other; columns of one packed matrix do. (ds, db,
/// dslopes and the like are not compared with tensors.) Errors are std::invalid_argument, thrown before
/// anything is written.
#pragma once

#include "attention.hpp"
#include "detail/attention/backward/driver.hpp"
#include "detail/attention/call/build_backward.hpp"
#include "detail/attention/call/user_gradient_variant.hpp"

/// @addtogroup attention_backward
/// @{
SSMAX_BEGIN_CODE

/// What the forward read and wrote: of all queries and keys, or of a part of either. k and v hold keys
/// [first_key, first_key + k.extent(2)) of `keys`, q and what has its rows hold queries
/// [first_query, first_query + q.extent(2)) of `queries`; out and lse are those over all keys. The gradients
/// of parts add up: dq over parts of the keys, dk and dv over parts of the queries, the parameters' over all;
/// dsinks belong to one part of the keys only, and what a scaled sink adds to dc is counted with first_key 0.
template <class T>
struct BackwardArguments {
  View<const detail::QueryElement<T>, 4> q{};  ///< [batch, heads, queries, d].
  View<const detail::KeyElement<T>, 4> k{};    ///< [batch, kv_heads, keys, d].
  View<const detail::ValueElement<T>, 4> v{};  ///< [batch, kv_heads, keys, dv].
  View<const detail::OutElement<T>, 4> out{};  ///< [batch, heads, queries, dv], as attention wrote it.
  View<const detail::Compute<T>, 3> lse{};     ///< [batch, heads, queries], as attention wrote it.
  index_t first_key = 0,                       ///< Where k begins.
      keys = 0,                                ///< How many keys there are in all; 0: k holds the last.
      first_query = 0,                         ///< Where q begins.
      queries = 0;                             ///< How many queries there are in all; 0: q holds the last.
};

/// Shapes: those of out, lse, q, k and v. dlse (as `View{}`) and dsinks may be left out. dsinks has one
/// number per head and needs options.sinks.
template <class T>
struct AttentionGradients {
  View<const detail::OutElement<T>, 4> dout{};  ///< The gradient that arrives at out.
  View<const detail::Compute<T>, 3> dlse{};     ///< The one that arrives at lse, or left out.
  View<detail::QueryElement<T>, 4> dq{};        ///< Written: the gradient of q.
  View<detail::KeyElement<T>, 4> dk{};          ///< Written: that of k.
  View<detail::ValueElement<T>, 4> dv{};        ///< Written: that of v.
  std::span<detail::Compute<T>> dsinks{};       ///< Added to, or left out.
  /// Adds the gradients to dq, dk and dv instead of overwriting them. dq, dk and dv must hold numbers before the call.
  /// dsinks and the gradients of parameters are added in either case. mpi::attention_backward throws if it is true.
  bool accumulate = false;
};

/// Attention, backward: formulas and bounds are at the top of attention_backward.hpp. Write the element type,
/// arguments do not deduce it:
///
///     attention_backward<float>({.q = q, .k = k, .v = v, .out = out, .lse = lse},
///                               {.dout = dout, .dq = dq, .dk = dk, .dv = dv},
///                               SSMax<float>{s, b}.gradient(ds, db), Causal{}, Softcap{50},
///                               {.rope = &rope}, pool);
///
/// Mask, score, options are those of the forward.
template <class T, class S, class M, class C, class E = Serial>
requires Scaling<S> && Mask<M> && Score<C> && Executor<E>
void attention_backward(const std::type_identity_t<BackwardArguments<T>>& a,
                        const std::type_identity_t<AttentionGradients<T>>& g, const S& scaling, const M& mask,
                        const C& score, const std::type_identity_t<AttentionOptions<T>>& options = {},
                        E&& executor = E{}) {
  static_assert(detail::CallElements<T>,
                "ssmax::attention_backward: T is float, double, half, bfloat16, or Elements of types that "
                "one type computes");
  const detail::UserGradientVariant<detail::Compute<T>, S, M, C> variant(scaling, mask, score);
  const detail::BackwardCall<T> call("attention_backward", a, g, options, variant);
  compiled::run_backward<detail::OperandsOf<T>>(call.problem, variant, options.workspace,
                                                detail::AnyExecutor(executor));
}

/// The same without a score.
template <class T, class S = Softmax, class M = Full, class E = Serial>
requires Scaling<S> && Mask<M> && Executor<E>
void attention_backward(const std::type_identity_t<BackwardArguments<T>>& arguments,
                        const std::type_identity_t<AttentionGradients<T>>& gradients, const S& scaling = {},
                        const M& mask = {}, const std::type_identity_t<AttentionOptions<T>>& options = {},
                        E&& executor = E{}) {
  attention_backward<T>(arguments, gradients, scaling, mask, Identity{}, options, std::forward<E>(executor));
}

SSMAX_END
/// @}
