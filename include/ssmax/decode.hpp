/// @defgroup decode Decoding (decode.hpp)
/// Attention of new queries against a cache or another source of keys: attention over a source (attention_source.hpp),
/// where every sequence holds at least as many keys as there are queries, and the mask is Causal unless given.
///
///     cache.append(k_new, v_new, &rope);
///     decode<float>({.q = q_new, .out = out}, cache, scaling, Causal{}, {.rope = &rope}, pool);
///
/// decode widens the storage type in registers and computes in float, or in double where the storage is double.
/// n and positions come from the sequence of the cache, not from the call. Exception: where the processor has 16-bit
/// products, five or more bfloat16 queries of a kv head take a bfloat16 cache into such products (attention.hpp).
///
/// Prefill in chunks (append, decode, append, decode …) gives the bits of one call of attention on all of
/// it, where every call has more than 16 queries per kv head and the cache rounds nothing. (It rounds what
/// comes in another type, and keys of 16 bits once they are rotated.) That holds for a ring as well. Exception:
/// with at most 128 keys of bfloat16, decode takes 16-bit products and attention computes in float. With
/// fewer queries, products are summed in another order: |error| <= 4·(d + 1024 + n / 1024)·ε·Σ p |v|,
/// and in practice that of attention itself. Queries are rotated to their places in the sequence, as the keys
/// were, also under masks whose positions restart.
#pragma once

#include <concepts>
#include <type_traits>
#include <utility>

#include "attention_source.hpp"

/// @addtogroup decode
/// @{
SSMAX_BEGIN_CODE

/// Writes out = attention of the new queries over each sequence of the cache, or of another source of keys. The queries
/// stand at the last positions of each sequence, whose keys have been appended already. Options and errors are those of
/// attention over a source. Throws std::invalid_argument where a sequence has fewer keys than there are queries.
template <class T, class K, class S, class M, class C, class E = Serial>
requires KeySource<K> && Scaling<S> && Mask<M> && Score<C> && Executor<E>
void decode(const std::type_identity_t<DecodeArguments<T>>& a, const K& cache, const S& scaling,
            const M& mask, const C& score, const std::type_identity_t<AttentionOptions<T>>& options = {},
            E&& executor = E{}) {
  static_assert(detail::SourceFits<T, K>,
                "ssmax::decode: double queries need a cache of double and a result of double, other queries "
                "float, half or bfloat16");
  const detail::UserVariant<detail::Compute<T>, S, M, C> variant(scaling, mask, score);
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
