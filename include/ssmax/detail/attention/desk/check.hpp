// Checks the arguments and policies of attention, attention_partial and decode, before anything is written.
#pragma once

#include <cmath>
#include <limits>

#include "../../../attention_state.hpp"
#include "../../checks/key_storage.hpp"
#include "../../checks/sequence_lengths.hpp"
#include "../../checks/sinks.hpp"
#include "../../checks/views.hpp"
#include "user_variant.hpp"

SSMAX_BEGIN_CODE

template <class T>
struct AttentionArguments;
template <class T>
struct PartialArguments;
template <class T>
struct DecodeArguments;
template <class T>
struct BackwardArguments;
template <class T>
struct AttentionGradients;
template <class T>
struct AttentionOptions;

SSMAX_END

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
template <class Out, class Q, class Compute, class... Keys>
void check_out_and_lse(const char* function, const View<Out, 4>& out, const View<Compute, 3>& lse,
                       const View<const Q, 4>& q, const Keys&... keys) {
  check_result(function, "out", out, q, keys...);
  check_in_place_or_no_overlap(function, "out", out, "q", q);
  if (!is_given(lse)) return;
  check_result(function, "lse", lse, q, keys...);
  check_no_overlap(function, "lse", lse, "q", q);
  check_no_overlap(function, "lse", lse, "out", out);
}

/// Throws if an output overlaps the memory of a source. Exception: a source without the member `memory` is not
/// checked.
template <class K>
void check_no_overlap_with_source(const char* function, const char* name, const AnyView& out, const K& keys) {
  if constexpr (requires { keys.memory(); }) {
    const auto [k, v] = keys.memory();
    check_no_overlap(function, name, out, "k", View<const SourceKey<K>, 1>(k));
    check_no_overlap(function, name, out, "v", View<const SourceValue<K>, 1>(v));
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
  check_last_part(function, "first_query", a.first_query, a.q.extent(2), "leaves no room for q in queries,",
                  "queries", a.queries);
}

/// The kinds of functions that take AttentionOptions.
enum class CallKind { views, partial, backward, source };

/// Throws if an option has no effect in a call, or if the scale is not finite. Exceptions: float_products,
/// rounded_rotation and batch_invariant choose among paths, and are accepted by every call.
template <class T>
void check_options(const char* function, CallKind kind, const AttentionOptions<T>& options, index_t heads) {
  const bool has_rope = options.rope != nullptr;
  if (options.scale && !std::isfinite(*options.scale))
    fail_format("ssmax::%s: scale is %g, must be finite", function, *options.scale);
  if (options.rotate_source_keys && kind != CallKind::source)
    fail_format("ssmax::%s: rotate_source_keys is true, must be false without a source of keys", function);
  if (options.rotate_source_keys && !has_rope)
    fail_format("ssmax::%s: rotate_source_keys is true, must be false without a rope", function);
  if (options.key_position != 0 && kind == CallKind::source && !options.rotate_source_keys)
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

/// Checks the tensors and the sinks of a call, but not the lengths of its sequences. O(1).
template <class T>
void check_tensors(const char* function, const AttentionArguments<T>& a, const AttentionOptions<T>& options) {
  check_inputs(function, a.q, a.k, a.v);
  check_out_and_lse(function, a.out, a.lse, a.q, a.k, a.v);
  check_sinks(function, options.sinks, a.out, a.lse);
}

template <class T>
void check_arguments(const char* function, const AttentionArguments<T>& a,
                     const AttentionOptions<T>& options) {
  check_tensors(function, a, options);
  check_options(function, CallKind::views, options, a.q.extent(1));
  check_lengths(function, options.lengths, a.q, a.k);
}

template <class T>
void check_arguments(const char* function, const PartialArguments<T>& a, const AttentionOptions<T>& options) {
  check_no_lengths(function, options.lengths);
  check_inputs(function, a.q, a.k, a.v);
  check_options(function, CallKind::partial, options, a.q.extent(1));
  const StateNames names{"state.shift", "state.sum", "state.o"};
  check_state(function, names, a.state);
  check_no_overlap_of_parts(function, names, a.state);
  check_result(function, "state.shift", a.state.shift, a.q, a.k, a.v);
  check_result(function, "state.sum", a.state.sum, a.q, a.k, a.v);
  check_result(function, "state.o", a.state.o, a.q, a.k, a.v);
  check_no_overlap(function, "state.shift", a.state.shift, "q", a.q);
  check_no_overlap(function, "state.sum", a.state.sum, "q", a.q);
  check_no_overlap(function, "state.o", a.state.o, "q", a.q);
  check_part(function, "first_key", a.first_key, a.k.extent(2), "leaves no room for k in keys,", "keys",
             a.keys);
  check_query_part(function, a);
}

/// Checks the tensors and the sinks of a call over a source, but not the lengths of its sequences. O(1).
template <class T, class K>
void check_source_tensors(const char* function, const DecodeArguments<T>& a, const K& source,
                          const AttentionOptions<T>& options) {
  const KeySourceShape keys = source.shape();
  check_group<SourceKey<K>>(function, "k", "has channels", keys.width);
  check_group<SourceValue<K>>(function, "v", "has channels", keys.value_width);
  check_queries(function, a.q, keys, options.lengths.is_packed());
  check_out_and_lse(function, a.out, a.lse, a.q, keys.value_width);
  check_no_overlap_with_source(function, "out", a.out, source);
  check_no_overlap_with_source(function, "lse", a.lse, source);
  check_sinks(function, options.sinks, a.out, a.lse);
}

template <class T, class K>
void check_arguments(const char* function, const DecodeArguments<T>& a, const K& source,
                     const AttentionOptions<T>& options) {
  check_source_tensors(function, a, source, options);
  check_source_lengths(function, options.lengths, a.q, source.shape().batch);
  check_options(function, CallKind::source, options, a.q.extent(1));
}

/// Throws if a mask of a call without lengths is given with lengths.
template <class M>
void check_mask_takes_lengths(const char* function, const M&, const SequenceLengths& lengths) {
  if constexpr (describes_call_without_lengths<M>) {
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

/// Throws unless every sequence of a source holds the positions of the queries.
template <class Compute>
void check_new_queries(const char* function, const Problem<Compute>& problem) {
  for (index_t b = 0; b < problem.sequences(); ++b) {
    const QueryShape shape = sequence_of(problem, b).shape;
    if (shape.queries > shape.keys)
      fail_value(function, "q", "has positions", shape.queries, "a sequence of the cache has", shape.keys);
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
template <class Compute, class K, class M>
void check_stored_keys(const char* function, const Problem<Compute>& problem, const K& source,
                       const M& mask) {
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
    if constexpr (has_forgotten<K>) {
      const KeyRange forgotten = source.forgotten(b);
      check_masked(function, mask, b, shape, {std::max(forgotten.begin, stored.begin), forgotten.end});
    }
  }
}

SSMAX_END
