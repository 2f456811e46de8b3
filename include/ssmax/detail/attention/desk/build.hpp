// Builds Problem and Result. Apart from narrow.hpp, no other file fills their members. AttentionCall checks the
// arguments first.
#pragma once

#include <algorithm>
#include <cmath>

#include "check.hpp"
#include "narrow.hpp"

SSMAX_BEGIN_DETAIL

// ---- Problem. -----------------------------------------------------------------------------------------------

template <class Options>
double logit_scale(const Options& options, index_t d) {
  return options.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<index_t>(d, 1))));
}

/// Fills the problem of all queries of a call, but not its keys.
template <class A, class Options>
void build_problem(const char* function, const InputRows<A>& q, const Options& options, Problem<A>& problem) {
  problem.q = q;
  problem.q.make_addressable();
  problem.scale = logit_scale(options, q.extent(3));
  problem.key_position = options.key_position;
  problem.float_products = options.float_products;
  problem.rounded_rotation = options.rounded_rotation;
  problem.batch_invariant = options.batch_invariant;
  problem.lengths = options.lengths;
  problem.caller = {function, options.explanation};
  if (options.rope != nullptr) problem.rope = options.rope->tables();
  if (problem.rope.cosine != nullptr) problem.rotation = Rotation::in_call;
}

/// Fills the problem of all queries of a call over a source of keys, which `problem.keys` has. The keys were rotated
/// when they were stored. Exception: `rotate_source_keys` rotates the keys in the call.
template <class M, class A, class Options>
void build_source_problem(const char* function, const InputRows<A>& q, const Options& options,
                          Problem<A>& problem) {
  build_problem(function, q, options, problem);
  if (problem.has_rope() && !options.rotate_source_keys)
    problem.rotation = rotated_to_positions<M> ? Rotation::stored_by_mask : Rotation::stored;
  problem.in_cache = true;
}

/// Returns the problem of all queries of a call. The source of `keys` must outlive the result.
template <class A, class Options>
Problem<A> make_problem(const char* function, const InputRows<A>& q, const AnyKeys<A>& keys,
                        const Options& options) {
  Problem<A> problem{.keys = keys};
  build_problem(function, q, options, problem);
  return problem;
}
template <class M, class A, class Options>
Problem<A> make_source_problem(const char* function, const InputRows<A>& q, const AnyKeys<A>& keys,
                               const Options& options) {
  Problem<A> problem{.keys = keys};
  build_source_problem<M>(function, q, options, problem);
  return problem;
}

// ---- Keys in views. -----------------------------------------------------------------------------------------

/// Returns the keys of a call in views, of which k holds keys [first, first + k.extent(2)) of `all`.
template <class A>
ViewKeys<A> keys_in(const StoredTensor<A>& k, const StoredTensor<A>& v, index_t all, index_t first = 0,
                    const SequenceLengths& lengths = {}) {
  return {addressable<Rows>(k), addressable<Rows>(v), k.functions(), v.functions(), all, first, lengths};
}

/// Returns the keys of a public function. `all_keys` may be 0: k holds the last keys.
template <class Arguments>
auto keys_of(const Arguments& a) {
  return keys_in(a.k, a.v, a.all_keys == 0 ? a.first_key + a.k.extent(2) : a.all_keys, a.first_key,
                 a.lengths);
}

/// Fills the problem of a call over keys in views, with the positions of its queries.
template <class A, class Arguments>
void build_views_problem(const char* function, const Arguments& a, const ViewKeys<A>& keys,
                         Problem<A>& problem) {
  problem.keys = AnyKeys<A>(keys);
  build_problem<A>(function, a.q, a, problem);
  const index_t last = a.first_query + a.q.extent(2);
  problem.first_query = a.first_query;
  problem.queries_after = a.all_queries == 0 ? 0 : a.all_queries - last;
}
template <class A, class Arguments>
Problem<A> make_views_problem(const char* function, const Arguments& a, const ViewKeys<A>& keys) {
  Problem<A> problem{};
  build_views_problem(function, a, keys, problem);
  return problem;
}

// ---- Result. ------------------------------------------------------------------------------------------------

/// Returns a result that is a state, to be merged with other states.
template <class Compute>
Result<Compute> make_state_result(const AttentionState<Compute>& state, bool continues) {
  Result<Compute> result{.state = addressable(state)};
  if (continues) result.start = result.state;
  return result;
}

/// Returns a result that is normalized. out and lse hold the heads from `first_head` on.
template <class A, class Options>
Result<A> make_result(const OutputRows<A>& out, const View<A, 3>& lse, const Options& options,
                      index_t first_head = 0) {
  return {.out = from_head(addressable(out), first_head),
          .lse = {lse, first_head},
          .sinks = options.sinks,
          .scaled_sinks = options.scaled_sinks};
}

template <class A>
Result<A> make_result(const AttentionArguments<A>& a) {
  if (has_state(a)) return make_state_result(a.state, a.continues);
  return make_result<A>(a.out, a.lse, a);
}

// ---- Calls. -------------------------------------------------------------------------------------------------

/// A call of attention. The constructor throws std::invalid_argument for invalid arguments. The arguments must outlive
/// the call.
template <class A>
class AttentionCall {
  ViewKeys<A> keys_{};  // `problem` refers to this source

 public:
  Problem<A> problem{};
  Result<A> result{};

  /// V is the type that holds the policies.
  template <class V>
  AttentionCall(const char* function, const AttentionArguments<A>& a, const V& variant, bool has_mask) {
    if (a.keys.is_given()) {
      problem.keys = a.keys.refer();
      check_arguments(function, a, problem.keys);
      build_source_problem<typename V::MaskType, A>(function, a.q, a, problem);
    } else {
      check_views(function, a);
      keys_ = keys_of(a);
      build_views_problem(function, a, keys_, problem);
    }
    result = make_result(a);
    check_policies(function, problem, a.rope, variant);
    if (!problem.in_cache) return;
    check_new_queries(function, problem, a.more_queries_than_keys, has_mask);
    check_stored_keys(function, problem, variant.mask);
  }
  AttentionCall(const AttentionCall&) = delete;
  AttentionCall& operator=(const AttentionCall&) = delete;

 private:
  static void check_views(const char* function, const AttentionArguments<A>& a) {
    if (has_state(a)) {
      check_partial_arguments(function, a);
    } else {
      check_arguments(function, a);
    }
    if (a.more_queries_than_keys)
      fail_format("ssmax::%s: more_queries_than_keys is true, must be false without a source of keys",
                  function);
  }
};

SSMAX_END
