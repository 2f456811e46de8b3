/// @defgroup attention_source Attention over a source of keys (attention_source.hpp)
/// @ingroup attention
/// Attention of queries over the keys of a source (key_source.hpp): a KvCache, pages, memory of the caller's own.
///
///     attention<float>({.q = q, .out = out}, source, SSMax<float>{s}, Full{}, {.rope = &rope}, pool);
///
/// Formula and options are those of attention.hpp. n and positions come from the sequences of the source: query i of
/// the call stands at position length - queries + i of its sequence. Queries may outnumber the keys, as in cross
/// attention. A sequence without keys is allowed. decode.hpp has the call for the newest positions of a sequence.
///
/// The source's keys are taken as rotated: a rope rotates q alone, to its positions in the sequence, and key_position
/// must be 0. With `rotate_source_keys` in the options, the rope rotates keys and queries in the call, and key_position
/// and positions of the mask count as they do for keys in views.
///
/// Products are made in float, whatever the source stores, or in double for double. Exception: where the processor has
/// 16-bit products, five or more bfloat16 queries of a kv head take keys and values of bfloat16 into such products
/// (attention.hpp).
///
/// The bits are those of attention over views of the same keys, where a call has more than 16 queries per kv head.
/// Exception: bfloat16 with at most 128 keys takes 16-bit products here and float in attention. With fewer queries,
/// products are summed in another order where a run of the source's keys ends (decode.hpp has the bound).
#pragma once

#include <concepts>
#include <type_traits>
#include <utility>

#include "attention.hpp"
#include "key_source.hpp"

/// @addtogroup attention_source
/// @{
SSMAX_BEGIN_CODE

/// Queries of a call whose keys are in a source, and its results. With Elements for T, Key and Value are not used.
template <class T>
struct DecodeArguments {
  View<const detail::QueryElement<T>, 4> q{};  ///< [batch, heads, queries, width].
  View<detail::OutElement<T>, 4> out{};        ///< [batch, heads, queries, value_width].
  View<detail::Compute<T>, 3> lse{};           ///< [batch, heads, queries], or left out.
};

/// Writes out = attention of q over each sequence of the source. Throws std::invalid_argument, before anything is
/// written, where an extent differs from the source's, where the mask shows a key that the source no longer stores, and
/// where out or lse overlaps the source's memory.
template <class T, class K, class S, class M, class C, class E = Serial>
requires KeySource<K> && Scaling<S> && Mask<M> && Score<C> && Executor<E>
void attention(const std::type_identity_t<DecodeArguments<T>>& a, const K& source, const S& scaling,
               const M& mask, const C& score, const std::type_identity_t<AttentionOptions<T>>& options = {},
               E&& executor = E{}) {
  static_assert(
      detail::SourceFits<T, K>,
      "ssmax::attention: double queries need a source of double and a result of double, other queries "
      "float, half or bfloat16");
  const detail::UserVariant<detail::Compute<T>, S, M, C> variant(scaling, mask, score);
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
