/// @defgroup decode Decoding (decode.hpp)
/// decode computes attention of new queries over a cache or another source of keys. It is attention over a source
/// (attention_source.hpp) with two differences: the mask is Causal unless given, and each sequence must have at
/// least as many keys as queries.
///
///     cache.append(k_new, v_new, &rope);
///     decode<float>({.q = q_new, .out = out}, cache, scaling, Causal{}, {.rope = &rope}, pool);
///
/// Numbers are widened in registers and computed in float, or in double for a source of double. Exception: five or more
/// bfloat16 queries per kv head take the bf16 path (attention.hpp), if keys and values are bfloat16 or have 8 bits
/// (eight_bit.hpp), and if the processor has the path. With `batch_invariant`, any number of queries takes the bf16
/// path.
///
/// n and positions count the keys of the sequence in the cache. Queries are rotated to their places in the
/// sequence, also under masks whose positions restart. Exception: under Tree (tree_mask.hpp), queries are rotated to
/// the positions of the tree.
///
/// Calls on the decode path are bit-identical for any number of rows, which is at most 16 per kv head.
///
/// Prefill in chunks (append, decode, append, decode, …) compared with one call of attention:
///
/// | condition | result |
/// |---|---|
/// | each call has more than 16 queries per kv head, and the cache does not round | bit-identical |
/// | bfloat16 with at most 128 keys | decode takes the bf16 path, attention computes in float |
/// | every call has `batch_invariant`, and the cache does not round | bit-identical |
/// | fewer queries | products are summed in another order: error ≤ 4·(d + 1024 + n / 1024 + L)·ε·Σ p·abs(v) |
/// | the same on the bf16 path | within the bounds of both paths (attention.hpp) |
///
/// ε is 2^-23, for double 2^-52. L is the largest abs(c)·scale·Σ_t abs(q_t k_t) over the visible keys: large where
/// products of channels cancel (massive activations). The bound holds if L·ε is below 1.
///
/// A cache rounds rows of another type. It also rounds keys of half and bfloat16 after rotating them.
#pragma once

#include <type_traits>
#include <utility>

#include "attention_source.hpp"

/// @addtogroup decode
/// @{
SSMAX_BEGIN_CODE

/// Writes out = attention of the new queries over each sequence of the cache or source. The queries have the last
/// positions of each sequence: append their keys first. Options and errors are those of attention over a source.
/// Also throws std::invalid_argument if a sequence has fewer keys than queries.
template <class T, class K, class S, class M, class C, class E = Serial>
requires KeySource<K> && Scaling<S> && Mask<M> && Score<C> && Executor<E>
void decode(const std::type_identity_t<DecodeArguments<T>>& a, const K& cache, const S& scaling,
            const M& mask, const C& score, const std::type_identity_t<AttentionOptions<T>>& options = {},
            E&& executor = E{}) {
  static_assert(detail::SourceFits<T, K>,
                "ssmax::decode: double queries need a cache of double and a result of double, other queries "
                "float, half or bfloat16");
  const detail::UserVariant<detail::ComputeType<T>, S, M, C> variant(scaling, mask, score);
  const detail::SourceCall<T> call("decode", a, cache, options, variant);
  detail::check_new_queries("decode", call.problem);
  compiled::run_attention<detail::SourceOperands<T, K>>(call.problem, variant, call.result, options.workspace,
                                                        detail::AnyExecutor(executor));
}

/// The same without a score.
template <class T, class K, class S = Softmax, class M = Causal, class E = Serial>
requires KeySource<K> && Scaling<S> && Mask<M> && Executor<E>
void decode(const std::type_identity_t<DecodeArguments<T>>& arguments, const K& cache, const S& scaling = {},
            const M& mask = {}, const std::type_identity_t<AttentionOptions<T>>& options = {},
            E&& executor = E{}) {
  decode<T>(arguments, cache, scaling, mask, Identity{}, options, std::forward<E>(executor));
}

SSMAX_END
/// @}
