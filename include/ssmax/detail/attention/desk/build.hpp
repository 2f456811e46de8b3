// Builds Problem and Result. Apart from narrow.hpp, no other file fills their members. AttentionCall and SourceCall
// check the arguments first.
#pragma once

#include <algorithm>
#include <cmath>

#include "../../../attention_state.hpp"
#include "../operands/stored_products.hpp"
#include "check.hpp"
#include "narrow.hpp"

SSMAX_BEGIN_DETAIL

/// The source of keys of a call of attention<T> over views.
template <class T>
using KeyShareOf = KeyShare<KeyElement<T>, ValueElement<T>>;

// ---- Problem. -----------------------------------------------------------------------------------------------

template <class T>
double logit_scale(const AttentionOptions<T>& options, index_t d) {
  return options.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<index_t>(d, 1))));
}

/// Returns the problem of all queries of a call. The source of `keys` must outlive the result.
template <class T, class Q>
Problem<ComputeType<T>> make_problem(const View<const Q, 4>& q, const AnyKeys<ComputeType<T>>& keys,
                                     const AttentionOptions<T>& options) {
  Problem<ComputeType<T>> problem{.q = addressable(q),
                                  .keys = keys,
                                  .scale = logit_scale(options, q.extent(3)),
                                  .key_position = options.key_position,
                                  .float_products = options.float_products,
                                  .rounded_rotation = options.rounded_rotation,
                                  .batch_invariant = options.batch_invariant,
                                  .lengths = options.lengths};
  if (options.rope != nullptr) problem.rope = options.rope->tables();
  if (problem.rope.cosine != nullptr) problem.rotation = Rotation::in_call;
  return problem;
}

/// Returns the problem of all queries of a call over a source of keys. The keys were rotated when they were stored.
/// Exception: `rotate_source_keys` rotates the keys in the call.
template <class M, class T, class Q, class K>
Problem<ComputeType<T>> make_source_problem(const View<const Q, 4>& q, const K& keys,
                                            const AttentionOptions<T>& options) {
  Problem<ComputeType<T>> problem = make_problem(q, AnyKeys<ComputeType<T>>(keys), options);
  problem.stored_products = source_products<ComputeType<T>, SourceKey<K>, SourceValue<K>>();
  if (problem.has_rope() && !options.rotate_source_keys)
    problem.rotation = rotated_to_positions<M> ? Rotation::stored_by_mask : Rotation::stored;
  problem.in_cache = true;
  return problem;
}

/// Returns the problem for the arguments of a public function. q may hold a part of the queries.
template <class T, class Arguments>
Problem<ComputeType<T>> make_problem(const Arguments& a, const KeyShareOf<T>& keys,
                                     const AttentionOptions<T>& options) {
  const Problem<ComputeType<T>> problem = make_problem(a.q, AnyKeys<ComputeType<T>>(keys), options);
  if constexpr (requires { a.first_query; }) {
    return queries_among(problem, a.first_query, a.queries == 0 ? a.first_query + a.q.extent(2) : a.queries);
  }
  return problem;
}

/// Returns the problem of a forward pass over keys in views: adds the products with stored keys.
template <class T>
Problem<ComputeType<T>> for_forward(Problem<ComputeType<T>> problem) {
  problem.stored_products = stored_products<ComputeType<T>, KeyElement<T>, ValueElement<T>>();
  return problem;
}

/// Returns the problem with the name of the public function and the place of its explanation.
template <class T>
Problem<ComputeType<T>> called_by(const char* function, const AttentionOptions<T>& options,
                                  Problem<ComputeType<T>> problem) {
  problem.caller = {function, options.explanation};
  return problem;
}

// ---- Keys in views. -----------------------------------------------------------------------------------------

/// Returns the source of keys [first, first + k.extent(2)) of `keys`.
template <class K, class V>
KeyShare<K, V> keys_in(const View<const K, 4>& k, const View<const V, 4>& v, index_t keys,
                       index_t first = 0) {
  return {.k = addressable(k), .v = addressable(v), .keys = keys, .first = first};
}

/// Returns the source of the keys of a public function, with the lengths of its sequences if the options have lengths.
template <class Arguments, class T>
KeyShareOf<T> keys_of(const Arguments& a, const AttentionOptions<T>& options) {
  index_t first = 0, keys = a.k.extent(2);
  if constexpr (requires { a.first_key; }) {
    first = a.first_key;
    keys = a.keys == 0 ? first + keys : a.keys;
  }
  KeyShareOf<T> share = keys_in(a.k, a.v, keys, first);
  share.lengths = options.lengths;
  return share;
}

// ---- Result. ------------------------------------------------------------------------------------------------

/// Returns a result that is normalized. out and lse hold the heads from `first_head` on.
template <class T, class Out>
Result<ComputeType<T>> make_result(const View<Out, 4>& out, const View<ComputeType<T>, 3>& lse,
                                   const AttentionOptions<T>& options, index_t first_head = 0) {
  return {.out = {addressable(out), first_head},
          .lse = {lse, first_head},
          .sinks = options.sinks,
          .scaled_sinks = options.scaled_sinks};
}

/// Returns a result that is a state, to be merged with other states.
template <class Compute>
Result<Compute> make_state_result(const AttentionState<Compute>& state, bool continues) {
  Result<Compute> result{.state = addressable(state)};
  if (continues) result.start = result.state;
  return result;
}

template <class Arguments, class T>
Result<ComputeType<T>> make_result(const Arguments& a, const AttentionOptions<T>& options) {
  return make_result(a.out, a.lse, options);
}
template <class T>
Result<ComputeType<T>> make_result(const PartialArguments<T>& a, const AttentionOptions<T>&) {
  return make_state_result(a.state, a.continues);
}

// ---- Calls. -------------------------------------------------------------------------------------------------

/// A call of attention or attention_partial. The constructor throws std::invalid_argument for invalid arguments.
template <class T>
class AttentionCall {
  const KeyShareOf<T> keys_;  // `problem` refers to this source

 public:
  const Problem<ComputeType<T>> problem;
  const Result<ComputeType<T>> result;

  template <class Arguments, class V>
  AttentionCall(const char* function, const Arguments& a, const AttentionOptions<T>& options,
                const V& variant)
      : keys_((check_arguments(function, a, options), keys_of(a, options))),
        problem(called_by(function, options, for_forward<T>(make_problem<T>(a, keys_, options)))),
        result(make_result(a, options)) {
    check_policies(function, problem, options.rope, variant);
  }
  AttentionCall(const AttentionCall&) = delete;
  AttentionCall& operator=(const AttentionCall&) = delete;
};

/// A call of attention over a source of keys, or of decode. The constructor throws std::invalid_argument for invalid
/// arguments. `source` must outlive the call.
template <class T>
struct SourceCall {
  const Problem<ComputeType<T>> problem;
  const Result<ComputeType<T>> result;

  template <class K, class S, class M, class C>
  SourceCall(const char* function, const DecodeArguments<T>& a, const K& source,
             const AttentionOptions<T>& options, const UserVariant<ComputeType<T>, S, M, C>& variant)
      : problem((check_arguments(function, a, source, options),
                 called_by(function, options, make_source_problem<M>(a.q, source, options)))),
        result(make_result(a, options)) {
    check_policies(function, problem, options.rope, variant);
    check_stored_keys(function, problem, source, variant.mask);
  }
};

SSMAX_END
