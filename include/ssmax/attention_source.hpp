/// @defgroup attention_source Attention over a source of keys (attention_source.hpp)
/// @ingroup attention
/// Attention of queries over the keys of a source (key_source.hpp): a KvCache, pages, memory of your own.
///
///     attention<float>({.q = q, .out = out}, source, SSMax<float>{s}, Full{}, {.rope = &rope}, pool);
///
/// Formula and options are those of attention.hpp. n and positions count the keys of the sequence in the source:
/// query i has position length - queries + i. There may be more queries than keys, as in cross attention. A
/// sequence may have no keys. decode.hpp has the call for the newest positions of a sequence.
///
/// | option | rope |
/// |---|---|
/// | default | rotates q to its positions in the sequence. The keys of the source are already rotated. key_position must be 0 |
/// | `rotate_source_keys` | rotates keys and queries in the call, with key_position and the mask's positions, as for views |
///
/// Exception: under a mask with `rotated_to_positions` (query.hpp), the default rotates q to the mask's positions.
///
/// Products are computed in float for every storage type, or in double for double. Exception: five or more bfloat16
/// queries per kv head take the bf16 path (attention.hpp), if keys and values are bfloat16 or have 8 bits
/// (eight_bit.hpp), and if the processor has the path. With `batch_invariant`, any number of queries takes the bf16
/// path.
///
/// Compared with attention over views of the same keys:
///
/// | condition | result |
/// |---|---|
/// | more than 16 queries per kv head | bit-identical |
/// | both calls have `batch_invariant` | bit-identical |
/// | bfloat16 with at most 128 keys | the bf16 path here, float in attention |
/// | fewer queries | products are summed in another order: decode.hpp has the bound |
#pragma once

#include <type_traits>
#include <utility>

#include "attention.hpp"
#include "key_source.hpp"

/// @addtogroup attention_source
/// @{
SSMAX_BEGIN_CODE

/// Queries and results of a call over a source. If T is Elements, Key and Value are not used.
template <class T>
struct DecodeArguments {
  View<const detail::QueryElement<T>, 4> q{};  ///< [batch, heads, queries, width].
  View<detail::OutElement<T>, 4> out{};        ///< [batch, heads, queries, value_width].
  View<detail::ComputeType<T>, 3> lse{};       ///< [batch, heads, queries], or left out.
};

/// Writes out = attention of q over each sequence of the source. Throws std::invalid_argument before the first
/// write if an extent differs from the source's, if the mask shows a key that the source no longer stores, or if
/// out or lse overlaps the source's memory.
template <class T, class K, class S, class M, class C, class E = Serial>
requires KeySource<K> && Scaling<S> && Mask<M> && Score<C> && Executor<E>
void attention(const std::type_identity_t<DecodeArguments<T>>& a, const K& source, const S& scaling,
               const M& mask, const C& score, const std::type_identity_t<AttentionOptions<T>>& options = {},
               E&& executor = E{}) {
  static_assert(
      detail::SourceFits<T, K>,
      "ssmax::attention: double queries need a source of double and a result of double, other queries "
      "float, half or bfloat16");
  const detail::UserVariant<detail::ComputeType<T>, S, M, C> variant(scaling, mask, score);
  const detail::SourceCall<T> call("attention", a, source, options, variant);
  compiled::run_attention<detail::SourceOperands<T, K>>(call.problem, variant, call.result, options.workspace,
                                                        detail::AnyExecutor(executor));
}

/// The same without a score.
template <class T, class K, class S = Softmax, class M = Full, class E = Serial>
requires KeySource<K> && Scaling<S> && Mask<M> && Executor<E>
void attention(const std::type_identity_t<DecodeArguments<T>>& arguments, const K& source,
               const S& scaling = {}, const M& mask = {},
               const std::type_identity_t<AttentionOptions<T>>& options = {}, E&& executor = E{}) {
  attention<T>(arguments, source, scaling, mask, Identity{}, options, std::forward<E>(executor));
}

SSMAX_END
/// @}
