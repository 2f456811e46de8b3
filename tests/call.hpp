// The options of a call as one value, which test helpers pass on and add to the arguments of a call.
#pragma once

#include <optional>
#include <ssmax/attention_arguments.hpp>
#include <type_traits>
#include <utility>

namespace ssmax {

/// The members of arguments that are options, for tensors of T.
template <class T>
struct AttentionOptions {
  using A = ComputeType<T>;

  std::optional<double> scale{};
  const Rope<A>* rope = nullptr;
  index_t key_position = 0;
  KeptSpan<const A> sinks{};
  Workspace* workspace = nullptr;
  bool float_products = false;
  bool rounded_rotation = false;
  bool batch_invariant = false;
  bool scaled_sinks = false;
  bool rotate_source_keys = false;
  bool more_queries_than_keys = false;
  Dropout dropout{};
  RowStatistics<A> statistics{};
  SequenceLengths lengths{};
  Explanation* explanation = nullptr;
};

/// Returns the arguments with the options of others.
template <class Arguments, class Options>
Arguments with_options(Arguments to, const Options& from) {
  to.scale = from.scale;
  to.rope = from.rope;
  to.key_position = from.key_position;
  to.sinks = from.sinks;
  to.workspace = from.workspace;
  to.float_products = from.float_products;
  to.rounded_rotation = from.rounded_rotation;
  to.batch_invariant = from.batch_invariant;
  to.scaled_sinks = from.scaled_sinks;
  to.dropout = from.dropout;
  to.lengths = from.lengths;
  to.explanation = from.explanation;
  if constexpr (requires { to.statistics; }) to.statistics = from.statistics;
  if constexpr (requires { to.rotate_source_keys; }) to.rotate_source_keys = from.rotate_source_keys;
  if constexpr (requires { to.more_queries_than_keys; }) {
    if (from.more_queries_than_keys) to.more_queries_than_keys = true;
  }
  return to;
}

/// Returns the arguments of a call with options.
template <class T>
AttentionArguments<ComputeType<T>> with(AttentionArguments<ComputeType<T>> a,
                                        const AttentionOptions<T>& options) {
  return with_options(std::move(a), options);
}
template <class T>
BackwardArguments<ComputeType<T>> backward_with(BackwardArguments<ComputeType<T>> a,
                                                const AttentionOptions<T>& options) {
  return with_options(std::move(a), options);
}

/// Returns the arguments of a call over views.
template <class Q, class K, class V, class Out, class A = ComputeType<std::remove_const_t<Q>>>
AttentionArguments<A> over_views(View<Q, 4> q, View<K, 4> k, View<V, 4> v, View<Out, 4> out,
                                 View<std::type_identity_t<A>, 3> lse = {}) {
  return {.q = q, .k = k, .v = v, .out = out, .lse = lse};
}
template <class Q, class K, class V, class Out, class A = ComputeType<std::remove_const_t<Q>>>
BackwardArguments<A> backward_over_views(View<Q, 4> q, View<K, 4> k, View<V, 4> v, View<Out, 4> out,
                                         View<const std::type_identity_t<A>, 3> lse) {
  return {.q = q, .k = k, .v = v, .out = out, .lse = lse};
}

/// Returns the arguments of the backward of such a call that are gradients.
template <class Out, class Q, class K, class V, class A = ComputeType<Q>>
AttentionGradients<A> gradients_into(View<Out, 4> dout, View<const std::type_identity_t<A>, 3> dlse,
                                     View<Q, 4> dq, View<K, 4> dk, View<V, 4> dv) {
  return {.dout = dout, .dlse = dlse, .dq = dq, .dk = dk, .dv = dv};
}

/// Returns the arguments of a call over a source.
template <class A, class K>
AttentionArguments<A> over(AttentionArguments<A> a, const K& source) {
  a.keys = source;
  return a;
}

}  // namespace ssmax
