// Checks the arguments and policies of attention and attention_backward, before anything is written.
#pragma once

#include <cmath>
#include <limits>

#include "../../checks/sequence_lengths.hpp"
#include "../../checks/sinks.hpp"
#include "../../checks/views.hpp"
#include "call.hpp"

SSMAX_BEGIN_DETAIL

/// Throws unless q and a source of keys have the same batch and width, and q's heads are a multiple of the kv heads.
/// Exception: packed queries of all sequences are one batch entry, so the batch may differ.
inline void check_queries(const char* function, const AnyView& q, const KeySourceShape& keys,
                          bool is_packed = false) {
  check_view(function, "q", q);
  const auto same = [&](int i, index_t extent) {
    if (extent != q.extent(i)) fail_extent(function, "k", i, extent, "q", q.extent(i));
  };
  if (!is_packed) same(0, keys.batch);
  same(3, keys.width);
  const index_t heads = q.extent(1);
  if (keys.kv_heads == 0 ? heads != 0 : heads % keys.kv_heads != 0) {
    fail_value(function, "q", "has heads", heads, "must be a multiple of the heads of k,", keys.kv_heads);
  }
}

inline void check_inputs(const char* function, const AnyView& q, const AnyView& k, const AnyView& v) {
  check_view(function, "q", q);
  check_view(function, "k", k);
  check_view(function, "v", v);
  check_queries(function, q, {k.extent(0), k.extent(1), k.extent(3), v.extent(3)});
  for (int i = 0; i < 3; ++i) check_extent(function, "v", v, i, "k", k, i);
}

/// Throws unless the leading extents of an output are those of q, and the last extent of out is value_width.
inline void check_result(const char* function, const char* name, const AnyView& out, const AnyView& q,
                         index_t value_width) {
  check_output(function, name, out);
  for (int i = 0; i < 3; ++i) check_extent(function, name, out, i, "q", q, i);
  if (out.rank() == 4 && out.extent(3) != value_width)
    fail_extent(function, name, 3, out.extent(3), "v", value_width);
}

/// Does the checks of the function above. Also throws if the output overlaps k or v.
inline void check_result(const char* function, const char* name, const AnyView& out, const AnyView& q,
                         const AnyView& k, const AnyView& v) {
  check_result(function, name, out, q, v.extent(3));
  check_no_overlap(function, name, out, "k", k);
  check_no_overlap(function, name, out, "v", v);
}

/// Checks out, which may be q, and, if given, lse. `keys` are the last arguments of check_result.
template <class A, class... K>
void check_out_and_lse(const char* function, const ForwardCall<A>& call, const K&... keys) {
  const InputRows<A>& q = call.problem.q;
  const OutputRows<A>& out = call.result.out;
  const View<A, 3>& lse = call.result.lse.view();
  check_result(function, "out", out, q, keys...);
  check_in_place_or_no_overlap(function, "out", out, "q", q, out.has_type_of(q));
  if (!is_given(lse)) return;
  check_result(function, "lse", lse, q, keys...);
  check_no_overlap(function, "lse", lse, "q", q);
  check_no_overlap(function, "lse", lse, "out", out);
}

/// Throws if an output overlaps the memory of a source. Exception: a source without the member `memory` is not
/// checked.
template <class A>
void check_no_overlap_with_source(const char* function, const char* name, const AnyView& out,
                                  const AnyKeys<A>& keys) {
  const auto [k, v] = keys.memory();
  check_no_overlap(function, name, out, "k", View<const std::byte, 1>(k.data(), {std::ssize(k)}));
  check_no_overlap(function, name, out, "v", View<const std::byte, 1>(v.data(), {std::ssize(v)}));
}

/// Throws unless the width is a multiple of the number of channels that an element holds.
inline void check_group(const char* function, const char* name, index_t width, index_t group) {
  if (width % group != 0) {
    fail_value(function, name, "has channels", width, "must be a multiple of the channels of an element,",
               group);
  }
}

/// Throws unless [first, first + count) lies within `all`.
inline void check_part(const char* function, const char* first_name, index_t first, index_t count,
                       const char* what, const char* all_name, index_t all) {
  if (all > max_counted) fail_value(function, all_name, "are", all, "must be at most", max_counted);
  if (first < 0) fail_value(function, first_name, "is", first, "must be at least", 0);
  if (all < count || first > all - count) fail_value(function, first_name, "is", first, what, all);
}

/// Does the checks of the function above. `all` may be 0: the part ends where it ends.
inline void check_last_part(const char* function, const char* first_name, index_t first, index_t count,
                            const char* what, const char* all_name, index_t all) {
  if (all == 0 && first >= 0 && first <= max_counted - count) return;
  check_part(function, first_name, first, count, what, all_name, all);
}

inline void check_query_part(const char* function, const Rows& q, const CallFacts& facts) {
  check_last_part(function, "first_query", facts.first_query, q.extent(2),
                  "leaves no room for q in all_queries,", "all_queries", facts.all_queries);
}

/// Throws if an option has no effect in a call, or if the scale is not finite. Exceptions: float_products,
/// rounded_rotation and batch_invariant choose among paths, and are accepted by every call.
template <class A>
void check_options(const char* function, const Problem<A>& problem, const CallFacts& facts,
                   std::span<const A> sinks, bool scaled_sinks) {
  if (!std::isfinite(problem.scale))
    fail_format("ssmax::%s: scale is %g, must be finite", function, problem.scale);
  const DropoutOption<A>& dropout = problem.dropout;
  if (const double p = dropout.p; !(p >= 0 && p < 1))
    fail_format("ssmax::%s: dropout.p is %g, must be at least 0 and below 1", function, p);
  if (!dropout.seeds.empty() && std::ssize(dropout.seeds) != problem.sequences())
    fail_value(function, "dropout.seeds", "has size", std::ssize(dropout.seeds), "sequences are",
               problem.sequences());
  const bool has_rope = problem.rope.cosine != nullptr;
  if (facts.rotate_source_keys && !problem.in_cache)
    fail_format("ssmax::%s: rotate_source_keys is true, must be false without a source of keys", function);
  if (facts.rotate_source_keys && !has_rope)
    fail_format("ssmax::%s: rotate_source_keys is true, must be false without a rope", function);
  if (problem.key_position != 0 && problem.in_cache && !facts.rotate_source_keys)
    fail_value(function, "key_position", "is", problem.key_position, "the source's is", 0);
  if (problem.key_position != 0 && !has_rope)
    fail_value(function, "key_position", "is", problem.key_position, "without a rope it must be", 0);
  if (scaled_sinks && sinks.empty() && problem.q.extent(1) > 0)
    fail_format("ssmax::%s: scaled_sinks is true, must be false without sinks", function);
}

/// Throws if a call computes a part of its queries or keys, or continues a state. `must` ends with "must be".
inline void check_is_whole(const char* function, const CallFacts& facts,
                           const char* must = "without a state it must be") {
  const auto is_0 = [&](const char* name, index_t number) {
    if (number != 0) fail_value(function, name, "is", number, must, 0);
  };
  is_0("first_key", facts.first_key);
  is_0("all_keys", facts.all_keys);
  is_0("first_query", facts.first_query);
  is_0("all_queries", facts.all_queries);
  is_0("continues", facts.continues ? 1 : 0);
}

/// Checks the tensors and the sinks of a call over keys in views, but not the lengths of its sequences. O(1).
template <class A>
void check_tensors(const char* function, const ForwardCall<A>& call) {
  check_inputs(function, call.problem.q, call.views.k, call.views.v);
  if (call.facts.is_example) return;
  check_out_and_lse(function, call, call.views.k, call.views.v);
  if (call.problem.statistics != nullptr) call.problem.statistics->check(function, call);
  check_sinks(function, call.result.sinks, call.result.out, call.result.lse.view());
}

/// Does the same for a call over a source.
template <class A>
void check_source_tensors(const char* function, const ForwardCall<A>& call) {
  const AnyKeys<A>& source = call.problem.keys;
  const KeySourceShape& keys = source.shape();
  check_group(function, "k", keys.width, source.k_type().group);
  check_group(function, "v", keys.value_width, source.v_type().group);
  check_queries(function, call.problem.q, keys, call.problem.lengths.is_packed());
  if (call.facts.is_example) return;
  const View<A, 3>& lse = call.result.lse.view();
  check_out_and_lse(function, call, keys.value_width);
  check_no_overlap_with_source(function, "out", call.result.out, source);
  check_no_overlap_with_source(function, "lse", lse, source);
  if (call.problem.statistics != nullptr) call.problem.statistics->check(function, call);
  check_sinks(function, call.result.sinks, call.result.out, lse);
}

/// Checks a call that computes a state.
template <class A>
void check_partial(const char* function, const ForwardCall<A>& call) {
  const Result<A>& result = call.result;
  const CallFacts& facts = call.facts;
  check_no_lengths(function, call.problem.lengths);
  check_inputs(function, call.problem.q, call.views.k, call.views.v);
  if (!result.sinks.empty()) {
    fail_value(function, "sinks", "have extent", std::ssize(result.sinks),
               "finish takes the sinks of a state, here it must be", 0);
  }
  const StateNames& names = names_of_state;
  check_state(function, names, result.state);
  check_no_overlap_of_parts(function, names, result.state);
  const auto check = [&](const char* name, const AnyView& part) {
    check_result(function, name, part, call.problem.q, call.views.k, call.views.v);
    check_no_overlap(function, name, part, "q", call.problem.q);
  };
  for_each_row_number(names, result.state, check);
  check(names.o, result.state.o);
  const auto left_out = [&](const char* name, const AnyView& view) {
    if (is_given(view))
      fail_value(function, name, "has rows", view.extent(2), "finish writes it: must be", 0);
  };
  left_out("out", result.out);
  left_out("lse", result.lse.view());
  for_each_statistic(result.statistics, left_out);
  check_part(function, "first_key", facts.first_key, call.views.k.extent(2),
             "leaves no room for k in all_keys,", "all_keys", facts.all_keys);
  check_query_part(function, call.problem.q, facts);
}

/// Returns whether an AttentionState or a StateOption has a tensor.
template <class State>
bool has_state(const State& state) {
  return is_given(state.shift) || is_given(state.sum) || is_given(state.o);
}

/// Throws if a call over a source has keys in views, or a state.
template <class A>
void check_has_no_views(const char* function, const ForwardCall<A>& call) {
  if (is_given(call.views.k)) fail_format("ssmax::%s: k and keys are given, must be one of them", function);
  if (is_given(call.views.v)) fail_format("ssmax::%s: v and keys are given, must be one of them", function);
  if (has_state(call.result.state))
    fail_format("ssmax::%s: state is given, a source of keys takes out", function);
}

/// Checks the arguments of a call over a source, but not its policies.
template <class A>
void check_source_arguments(const char* function, const ForwardCall<A>& call) {
  const Problem<A>& problem = call.problem;
  check_has_no_views(function, call);
  check_source_tensors(function, call);
  check_is_whole(function, call.facts);
  check_source_lengths(function, problem.lengths, problem.q, problem.keys.shape().batch);
  check_options(function, problem, call.facts, call.result.sinks, call.result.scaled_sinks);
}

/// Checks the arguments of a call over views, but not its policies.
template <class A>
void check_arguments(const char* function, const ForwardCall<A>& call) {
  const Problem<A>& problem = call.problem;
  if (has_state(call.result.state)) {
    check_partial(function, call);
  } else {
    check_tensors(function, call);
    check_is_whole(function, call.facts);
    check_lengths(function, problem.lengths, problem.q, call.views.k);
  }
  check_options(function, problem, call.facts, call.result.sinks, call.result.scaled_sinks);
  if (call.facts.more_queries_than_keys) {
    fail_format("ssmax::%s: more_queries_than_keys is true, must be false without a source of keys",
                function);
  }
}

/// Calls f(shape) for the shapes that policies must fit: that of the longest sequence, if sequences have their own
/// lengths, or those of the batch entries.
template <class Compute, class F>
void for_each_shape(const Problem<Compute>& problem, const F& f) {
  if (problem.lengths.is_given()) return f(longest_shape(problem));
  const index_t entries = problem.in_cache ? problem.sequences() : std::min<index_t>(problem.sequences(), 1);
  for (index_t batch = 0; batch < entries; ++batch) {
    if (batch == 0 || problem.keys.length(batch) != problem.keys.length(0))
      f(sequence_of(problem, batch).shape);
  }
}

/// Checks that the mask, the scaling and the score fit every batch entry, and that positions lie within the rope's
/// tables. If sequences have their own lengths, the policies must fit the longest sequence.
///
/// | rope | mask | cost |
/// |---|---|---|
/// | no | any | O(batch entries) |
/// | yes | without positions | O(batch entries) |
/// | yes | with positions | O(queries · heads + keys · kv heads) per batch entry |
template <class Compute>
void check_policies(const char* function, const Problem<Compute>& problem, const Variant<Compute>& variant) {
  if (variant.refuses_lengths && problem.lengths.is_given()) {
    fail_format("ssmax::%s: the masks Lengths and Documents do not take lengths, given for %td sequences",
                function, problem.lengths.count());
  }
  for_each_shape(problem, [&](const QueryShape& shape) {
    variant.check_mask(shape);
    variant.check_logits(function, shape);
  });
  const RopeTables<Compute>& rope = problem.rope;
  if (rope.cosine == nullptr) return;
  const index_t key_position = problem.key_position;
  // Larger than every table. Sums of this number and smaller numbers do not overflow.
  constexpr index_t furthest = std::numeric_limits<index_t>::max() / 4;
  if (key_position < -furthest || key_position > furthest) {
    fail_value(function, "key_position", "is", key_position, "positions are at most", furthest);
  }
  const auto check = [&](const char* name, index_t first, index_t count) {
    check_rope(function, name, rope, first, count, problem.width(), problem.sequences());
  };
  for (index_t batch = 0; batch < problem.sequences(); ++batch) {
    const Sequence sequence = sequence_of(problem, batch);
    const QueryShape& shape = sequence.shape;
    if (!variant.has_positions && !problem.lengths.is_given() && batch > 0 &&
        shape.keys == problem.keys.length(0))
      continue;  // entry 0 was checked
    const index_t first = problem.first_query, queries = sequence.queries;
    if (queries == 0 || shape.keys == 0) continue;
    const KeyRange stored = problem.rotates_keys() ? sequence.stored : KeyRange{};
    if (!variant.has_positions) {
      if (stored.size() > 0) check("k", key_position + stored.begin, stored.size());
      check("q", key_position + shape.keys - shape.queries + first, queries);
      continue;
    }
    const index_t first_head = problem.q.first_head(), end_head = problem.q.end_head();
    for (index_t head = first_head; head < end_head; ++head) {
      for (index_t i = first; i < first + queries; ++i)
        check("q", rope_place(problem, variant, Query{batch, head, i, shape}).position, 1);
    }
    for (index_t head = first_head; head < end_head; head += problem.heads_per_kv_head()) {
      const Query any{batch, head, 0, shape};
      for (index_t key = stored.begin; key < stored.end; ++key)
        check("k", key_position + variant.key_position(any, key), 1);
    }
  }
}

/// Throws if a sequence of a source has fewer keys than queries, unless the call allows it. Without a mask, throws if
/// a sequence has several queries.
template <class A>
void check_new_queries(const char* function, const Problem<A>& problem, bool more_queries_than_keys,
                       bool has_mask) {
  for (index_t b = 0; b < problem.sequences(); ++b) {
    const QueryShape shape = sequence_of(problem, b).shape;
    if (shape.queries > shape.keys && !more_queries_than_keys) {
      fail_format(
          "ssmax::%s: q has %td positions of sequence %td, which has %td keys: append the keys first, or set "
          "more_queries_than_keys",
          function, shape.queries, b, shape.keys);
    }
    if (shape.queries > 1 && !has_mask) {
      fail_format(
          "ssmax::%s: no mask is given for the %td queries of sequence %td of a source: pass Causal{} (new "
          "positions) or Full{} (every query sees every key)",
          function, shape.queries, b);
    }
  }
}

/// Throws if one of the keys `lost` of a sequence is visible to a query.
template <class Compute>
void check_masked(const char* function, const Variant<Compute>& variant, index_t batch,
                  const QueryShape& shape, KeyRange lost) {
  if (lost.size() <= 0) return;
  for (index_t h = 0; h < shape.heads; ++h) {
    for (index_t i = 0; i < shape.queries; ++i) {
      const index_t key = variant.first_visible(Query{batch, h, i, shape}, lost);
      if (key == lost.end) continue;
      fail_format("ssmax::%s: mask shows key %td, k no longer stores keys [%td, %td)", function, key,
                  lost.begin, lost.end);
    }
  }
}

/// Throws unless a source still stores all keys that are visible to the queries. Calls the mask's members O(queries)
/// times. Exception: a mask with `sees` and without `run` is called for each key that the source has forgotten.
template <class Compute>
void check_stored_keys(const char* function, const Problem<Compute>& problem,
                       const Variant<Compute>& variant) {
  for (index_t b = 0; b < problem.sequences(); ++b) {
    const Sequence sequence = sequence_of(problem, b);
    const QueryShape& shape = sequence.shape;
    const KeyRange stored = sequence.stored;
    if (shape.keys > max_counted)
      fail_value(function, "k", "has length", shape.keys, "must be at most", max_counted);
    check_equal(function, "k", "stores keys up to", stored.end, "the length is", shape.keys);
    if (stored.begin < 0 || stored.begin > stored.end)
      fail_value(function, "k", "stores keys from", stored.begin, "must be within 0 and", stored.end);
    check_masked(function, variant, b, shape, {0, stored.begin});
    const KeyRange forgotten = problem.keys.forgotten(b);
    check_masked(function, variant, b, shape, {std::max(forgotten.begin, stored.begin), forgotten.end});
  }
}

SSMAX_END
