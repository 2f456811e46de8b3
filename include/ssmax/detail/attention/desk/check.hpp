// Checks the arguments and policies of attention and attention_backward, before anything is written.
#pragma once

#include <cmath>
#include <limits>

#include "../../../attention_arguments.hpp"
#include "../../checks/sequence_lengths.hpp"
#include "../../checks/sinks.hpp"
#include "../../checks/views.hpp"
#include "user_variant.hpp"

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
template <class A, class... Keys>
void check_out_and_lse(const char* function, const AttentionArguments<A>& a, const Keys&... keys) {
  check_result(function, "out", a.out, a.q, keys...);
  check_in_place_or_no_overlap(function, "out", a.out, "q", a.q, a.out.kind() == a.q.kind());
  if (!is_given(a.lse)) return;
  check_result(function, "lse", a.lse, a.q, keys...);
  check_no_overlap(function, "lse", a.lse, "q", a.q);
  check_no_overlap(function, "lse", a.lse, "out", a.out);
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

template <class Arguments>
void check_query_part(const char* function, const Arguments& a) {
  check_last_part(function, "first_query", a.first_query, a.q.extent(2),
                  "leaves no room for q in all_queries,", "all_queries", a.all_queries);
}

/// The kinds of calls.
enum class CallKind { views, partial, backward, source };

/// Throws if an option has no effect in a call, or if the scale is not finite. Exceptions: float_products,
/// rounded_rotation and batch_invariant choose among paths, and are accepted by every call.
template <class Options>
void check_options(const char* function, CallKind kind, const Options& options, index_t heads) {
  const bool has_rope = options.rope != nullptr;
  bool rotates_source_keys = false;
  if constexpr (requires { options.rotate_source_keys; }) rotates_source_keys = options.rotate_source_keys;
  if (options.scale && !std::isfinite(*options.scale))
    fail_format("ssmax::%s: scale is %g, must be finite", function, *options.scale);
  if (rotates_source_keys && kind != CallKind::source)
    fail_format("ssmax::%s: rotate_source_keys is true, must be false without a source of keys", function);
  if (rotates_source_keys && !has_rope)
    fail_format("ssmax::%s: rotate_source_keys is true, must be false without a rope", function);
  if (options.key_position != 0 && kind == CallKind::source && !rotates_source_keys)
    fail_value(function, "key_position", "is", options.key_position, "the source's is", 0);
  if (options.key_position != 0 && !has_rope)
    fail_value(function, "key_position", "is", options.key_position, "without a rope it must be", 0);
  if (kind == CallKind::partial && !options.sinks.empty()) {
    fail_value(function, "sinks", "have extent", std::ssize(options.sinks),
               "finish takes the sinks of a state, here it must be", 0);
  }
  if (options.scaled_sinks && options.sinks.empty() && heads > 0)
    fail_format("ssmax::%s: scaled_sinks is true, must be false without sinks", function);
}

/// Throws if a call computes a part of its queries or keys, or continues a state. `must` ends with "must be".
template <class Arguments>
void check_is_whole(const char* function, const Arguments& a,
                    const char* must = "without a state it must be") {
  const auto is_0 = [&](const char* name, index_t number) {
    if (number != 0) fail_value(function, name, "is", number, must, 0);
  };
  is_0("first_key", a.first_key);
  is_0("all_keys", a.all_keys);
  is_0("first_query", a.first_query);
  is_0("all_queries", a.all_queries);
  if constexpr (requires { a.continues; }) is_0("continues", a.continues ? 1 : 0);
}

/// Checks the tensors and the sinks of a call, but not the lengths of its sequences. O(1).
template <class A>
void check_tensors(const char* function, const AttentionArguments<A>& a) {
  check_inputs(function, a.q, a.k, a.v);
  check_out_and_lse(function, a, a.k, a.v);
  check_sinks(function, a.sinks, a.out, a.lse);
}

/// Checks the arguments of a call over keys in views.
template <class A>
void check_arguments(const char* function, const AttentionArguments<A>& a) {
  check_tensors(function, a);
  check_options(function, CallKind::views, a, a.q.extent(1));
  check_is_whole(function, a);
  check_lengths(function, a.lengths, a.q, a.k);
}

/// Checks the arguments of a call that computes a state.
template <class A>
void check_partial_arguments(const char* function, const AttentionArguments<A>& a) {
  check_no_lengths(function, a.lengths);
  check_inputs(function, a.q, a.k, a.v);
  check_options(function, CallKind::partial, a, a.q.extent(1));
  const StateNames names{"state.shift", "state.sum", "state.o"};
  check_state(function, names, a.state);
  check_no_overlap_of_parts(function, names, a.state);
  const auto check = [&](const char* name, const AnyView& part) {
    check_result(function, name, part, a.q, a.k, a.v);
    check_no_overlap(function, name, part, "q", a.q);
  };
  check("state.shift", a.state.shift);
  check("state.sum", a.state.sum);
  check("state.o", a.state.o);
  if (is_given(a.out))
    fail_value(function, "out", "has rows", a.out.extent(2), "finish writes it: must be", 0);
  if (is_given(a.lse))
    fail_value(function, "lse", "has rows", a.lse.extent(2), "finish writes it: must be", 0);
  check_part(function, "first_key", a.first_key, a.k.extent(2), "leaves no room for k in all_keys,",
             "all_keys", a.all_keys);
  check_query_part(function, a);
}

/// Checks the tensors and the sinks of a call over a source, but not the lengths of its sequences. O(1).
template <class A>
void check_source_tensors(const char* function, const AttentionArguments<A>& a, const AnyKeys<A>& source) {
  const KeySourceShape& keys = source.shape();
  check_group(function, "k", keys.width, source.k_type().group);
  check_group(function, "v", keys.value_width, source.v_type().group);
  check_queries(function, a.q, keys, a.lengths.is_packed());
  check_out_and_lse(function, a, keys.value_width);
  check_no_overlap_with_source(function, "out", a.out, source);
  check_no_overlap_with_source(function, "lse", a.lse, source);
  check_sinks(function, a.sinks, a.out, a.lse);
}

template <class A>
bool has_state(const AttentionArguments<A>& a) {
  return is_given(a.state.shift) || is_given(a.state.sum) || is_given(a.state.o);
}

/// Throws if a call over a source has keys in views, or a state.
template <class A>
void check_has_no_views(const char* function, const AttentionArguments<A>& a) {
  if (is_given(a.k)) fail_format("ssmax::%s: k and keys are given, must be one of them", function);
  if (is_given(a.v)) fail_format("ssmax::%s: v and keys are given, must be one of them", function);
  if (has_state(a)) fail_format("ssmax::%s: state is given, a source of keys takes out", function);
}

/// Checks the arguments of a call over a source.
template <class A>
void check_arguments(const char* function, const AttentionArguments<A>& a, const AnyKeys<A>& source) {
  check_has_no_views(function, a);
  check_source_tensors(function, a, source);
  check_is_whole(function, a);
  check_source_lengths(function, a.lengths, a.q, source.shape().batch);
  check_options(function, CallKind::source, a, a.q.extent(1));
}

/// Throws if a mask of a call without lengths is given with lengths.
template <class M>
void check_mask_takes_lengths(const char* function, const M&, const SequenceLengths& lengths) {
  if constexpr (refuses_lengths<M>) {
    if (!lengths.is_given()) return;
    fail_format("ssmax::%s: the masks Lengths and Documents do not take lengths, given for %td sequences",
                function, lengths.count());
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
template <class Compute, class P>
void check_policies(const char* function, const Problem<Compute>& problem, const Rope<Compute>* rope,
                    const P& variant) {
  check_mask_takes_lengths(function, variant.mask, problem.lengths);
  for_each_shape(problem, [&](const QueryShape& shape) {
    check_mask(variant.mask, shape);
    check_score(variant.score, shape);
    check_scaling(function, variant.scaling, shape);
  });
  if (rope == nullptr) return;
  const index_t key_position = problem.key_position;
  // Larger than every table. Sums of this number and smaller numbers do not overflow.
  constexpr index_t furthest = std::numeric_limits<index_t>::max() / 4;
  if (key_position < -furthest || key_position > furthest) {
    fail_value(function, "key_position", "is", key_position, "positions are at most", furthest);
  }
  for (index_t batch = 0; batch < problem.sequences(); ++batch) {
    const Sequence sequence = sequence_of(problem, batch);
    const QueryShape& shape = sequence.shape;
    if (!P::has_positions && !problem.lengths.is_given() && batch > 0 && shape.keys == problem.keys.length(0))
      continue;  // entry 0 was checked
    const index_t first = problem.first_query, queries = sequence.queries;
    if (queries == 0 || shape.keys == 0) continue;
    const index_t d = problem.width();
    const KeyRange stored = problem.rotates_keys() ? sequence.stored : KeyRange{};
    if constexpr (P::has_positions) {
      const index_t first_head = problem.q.first_head(), end_head = problem.q.end_head();
      for (index_t head = first_head; head < end_head; ++head) {
        for (index_t i = first; i < first + queries; ++i) {
          rope->check(function, "q", rope_position(problem, variant, Query{batch, head, i, shape}), 1, d);
        }
      }
      for (index_t head = first_head; head < end_head; head += problem.heads_per_kv_head()) {
        const Query any{batch, head, 0, shape};
        for (index_t key = stored.begin; key < stored.end; ++key) {
          rope->check(function, "k", key_position + detail::key_position(variant.mask, any, key), 1, d);
        }
      }
    } else {
      if (stored.size() > 0) rope->check(function, "k", key_position + stored.begin, stored.size(), d);
      rope->check(function, "q", key_position + shape.keys - shape.queries + first, queries, d);
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
template <class M>
void check_masked(const char* function, const M& mask, index_t batch, const QueryShape& shape,
                  KeyRange lost) {
  if (lost.size() <= 0) return;
  for (index_t h = 0; h < shape.heads; ++h) {
    for (index_t i = 0; i < shape.queries; ++i) {
      const Query query{batch, h, i, shape};
      const KeyRange keys = visible_keys(mask, query);
      const KeyRange both{std::max(keys.begin, lost.begin), std::min(keys.end, lost.end)};
      if (both.size() <= 0) continue;
      if (const index_t key = first_visible(mask, query, both); key < both.end) {
        fail_format("ssmax::%s: mask shows key %td, k no longer stores keys [%td, %td)", function, key,
                    lost.begin, lost.end);
      }
    }
  }
}

/// Throws unless a source still stores all keys that are visible to the queries. Calls the mask's members O(queries)
/// times. Exception: a mask with `sees` and without `run` is called for each key that the source has forgotten.
template <class Compute, class M>
void check_stored_keys(const char* function, const Problem<Compute>& problem, const M& mask) {
  for (index_t b = 0; b < problem.sequences(); ++b) {
    const Sequence sequence = sequence_of(problem, b);
    const QueryShape& shape = sequence.shape;
    const KeyRange stored = sequence.stored;
    if (shape.keys > max_counted)
      fail_value(function, "k", "has length", shape.keys, "must be at most", max_counted);
    check_equal(function, "k", "stores keys up to", stored.end, "the length is", shape.keys);
    if (stored.begin < 0 || stored.begin > stored.end)
      fail_value(function, "k", "stores keys from", stored.begin, "must be within 0 and", stored.end);
    check_masked(function, mask, b, shape, {0, stored.begin});
    const KeyRange forgotten = problem.keys.forgotten(b);
    check_masked(function, mask, b, shape, {std::max(forgotten.begin, stored.begin), forgotten.end});
  }
}

SSMAX_END
