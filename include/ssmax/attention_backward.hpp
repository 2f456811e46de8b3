/// @defgroup attention_backward Attention, backward (attention_backward.hpp)
/// Computes the gradients of attention. From the gradient of `out`, and optionally of `lse`, attention_backward
/// computes the gradients of q, k and v. It also computes those of the scaling, the score function and the sinks.
/// attention.hpp has the formula of the forward pass and the names.
///
///     attention_backward({.q = q, .k = k, .v = v, .out = out, .lse = lse, .rope = &rope},
///                        {.dout = dout, .dq = dq, .dk = dk, .dv = dv}, SSMax<float>{s, b}.gradient(ds, db),
///                        Causal{}, Softcap{50}, pool);
///
///     p_ij  = exp(c_i·z'_ij - lse_i)        the weights, recomputed; z' = score(z)
///     δ_i   = ⟨dout_i, out_i⟩ - dlse_i
///     u_ij  = p_ij (⟨dout_i, v_j⟩ - δ_i)
///     dz_ij = c_i u_ij · score'(z_ij)
///     dq_i  = Rᵀ scale Σ_j dz_ij (R k_j)
///     dk_j  = Rᵀ scale Σ_i dz_ij (R q_i)    over all query heads of a kv head
///     dv_j  = Σ_i p_ij dout_i               over all query heads of a kv head
///     dc_i  = Σ_j u_ij z'_ij                for every c_i, 0 and negative ones included; the scaling receives
///                                           it: SSMax{s, b}.gradient(ds, db), …
///     dsink = -Σ_i exp(sink - lse_i) δ_i    sink = -inf: 0; sink = +inf: the limit, Σ_i dlse_i
///
/// With `scaled_sinks`, w_i = -exp(c_i·sink - lse_i) δ_i, dsink = Σ_i c_i w_i, and dc_i has the additional term
/// sink·w_i.
///
/// | gradient | written | with `accumulate` |
/// |---|---|---|
/// | dq, dk, dv | overwritten | added |
/// | ds, db, dp, dslopes, dbias, dsinks | added: set them to 0 before the first call | added |
///
/// `accumulate` adds in the type that the call computes in, and rounds the sum once to the storage type. For float and
/// double, the result is bit-identical to old value + gradient. "Gradient" is what a call without `accumulate` writes.
///
/// The views k and v hold keys [first_key, first_key + k.extent(2)) of all_keys. The views q, out and lse hold queries
/// [first_query, first_query + q.extent(2)) of all_queries. out and lse are those over all keys. If you split the keys
/// or the queries into several calls, add the gradients of the calls:
///
/// | gradient | add over |
/// |---|---|
/// | dq | the ranges of keys |
/// | dk, dv | the ranges of queries |
/// | parameters of the scaling and the score function | all calls |
/// | dsinks | the ranges of queries, for one range of keys only |
///
/// The call with first_key 0 adds the term of a scaled sink to dc.
///
/// If no key is visible to a query, the gradients of the query are 0. Exception: its sink has a gradient through lse.
/// The gradient of a masked key is 0. NaN in a masked key or value does not affect the result. NaN in a query, or in
/// a key or value that is visible to the query, makes all gradients NaN that depend on it.
///
/// Memory is linear in the sequence. Each kv head at work takes the memory of the first four lines. At most one
/// kv head per thread is at work. Exception: sequences of few blocks have up to eight per thread. For width 64
/// and 32768 queries and keys, the first line is 25.3 MiB. A query here is a row: a query of one query head. The
/// figures are for computation in float. Computation in double takes twice as much.
///
/// | bytes per query | bytes per key | condition |
/// |---|---|---|
/// | 4·d + 40 | 4·(d + dv) + 1 | every call |
/// | 4·d more | 4·(d + dv) more | half or bfloat16, or `accumulate` |
/// | 0 | 4·(d + dv) more | float products of copied keys: half or bfloat16, or the call rotates keys |
/// | 0 | 4·d + 2·dv more; if the call rotates keys, 8·d + 2·dv more | bf16 path |
/// | 32 more, for all queries of the call | 0 | a parameter has a gradient |
///
/// A call in float or double also copies keys if their number or d is not a multiple of 8. Exception: of 4 on AVX2,
/// SIMD128 and scalar.
///
/// A call allocates once. Exception: with a workspace that is large enough, a call does not allocate. Results are
/// bit-identical for every executor. The backward pass uses no atomic additions.
///
/// Accuracy: the backward pass adds products over 2048 keys or 1920 queries, and then adds the sums. The relative
/// error of a weight includes the error of lse: in float, an lse of 1000 is rounded by 3e-5. The terms of dc = Σ u·z
/// cancel, because Σ u is 0. If `out` was rounded to 16 bits, Σ u differs from 0. The error of dc is then this
/// difference times the size of the logits.
///
/// The bf16 path computes a call if q, k, v and dout are bfloat16 and the target is amx, avx512_bf16 or neon_bf16.
/// Exception: `float_products` selects float. The bounds are before the gradients are rounded to bfloat16, with
/// ε₁₆ = 2^-8, in addition to the errors above.
///
/// | gradient | rounded to bfloat16 | bound of the error |
/// |---|---|---|
/// | dv | weights p | 2.1 ε₁₆ · Σ_i p_ij abs(dout_i) |
/// | dq | dz; with a rope also k | 2.1 ε₁₆ · scale Σ_j abs(dz_ij) abs(k_j) |
/// | dk | dz; with a rope also q | 2.1 ε₁₆ · scale Σ_i abs(dz_ij) abs(q_i) |
/// | dc | - | 1.1 ε₁₆ · abs(dc_i), so ds, db and others: the sum of the bounds of the rows |
///
/// With a rope, the bounds of dq and dk are larger by ε₁₆, and abs means the norm of a rotated pair of channels. With
/// `rounded_rotation`, the bounds hold against the gradients of the rounded rows.
/// Logits, δ and u are float. The bf16 path adds dc before it rounds. For logits, it splits a rotated q or k into two
/// bfloat16 numbers, high and low, which keep 16 bits of it. This adds 2^-16 · scale Σ_j abs(u_ij) Σ_t abs(q_it k_jt)
/// to the bound of dc. For dk and dq, it uses the high part only. The lse of the prefill_bf16 path is the logarithm of
/// a sum of rounded weights. Its error is up to 1.1 ε₁₆, and all weights of a row are off by the same factor. (An exact
/// lse would need one more number in every state, also in merged states.) Products treat subnormal numbers as 0. An
/// infinity in a rotated q or k gives NaN.
///
/// Outputs must not overlap the inputs or each other. Columns of one packed matrix do not overlap. Exception: the
/// call does not compare ds, db, dslopes and other parameter gradients with the tensors. Throws std::invalid_argument
/// for every error, before anything is written.
#pragma once

#include "attention.hpp"
#include "detail/attention/desk/user_gradient_variant.hpp"

/// @addtogroup attention_backward
/// @{
SSMAX_BEGIN_CODE

/// Computes the gradients of attention. The top of attention_backward.hpp has the formulas and the error bounds. The
/// policies and the options are those of the forward pass. A learnable scaling or score adds to its own gradients. A is
/// the type of computation: float unless written.
template <class A = float, class... P>
requires(detail::is_call<A, P...>()) void attention_backward(
    const std::type_identity_t<BackwardArguments<A>>& a, const std::type_identity_t<AttentionGradients<A>>& g,
    P&&... policies) {
  const detail::Policies<P...> given(policies...);
  const detail::GradientVariantOf<A, decltype(given)> variant(given.scaling, given.mask, given.score);
  shared::BackwardCall<A> call{};
  detail::build_call("attention_backward", a, g, call);
  compiled::open_call(call, variant);
  g.dout.functions()->run(call.problem, variant, a.workspace, given.executor);
}

SSMAX_MISTAKES_OF(attention_backward, const std::type_identity_t<BackwardArguments<detail::ComputeOr<A>>>&,
                  const std::type_identity_t<AttentionGradients<detail::ComputeOr<A>>>&)

SSMAX_END
/// @}
