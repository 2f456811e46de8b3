// What one call of attention has to do: where queries, keys and values lie, how far they reach, and what each query
// sees.
#pragma once

#include <numbers>
#include <span>

#include "../../mask.hpp"
#include "../../rope.hpp"
#include "../../scaling.hpp"
#include "../../score.hpp"
#include "../../view.hpp"
#include "../storage.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// Keys are summed in blocks, blocks in chunks, chunks into the result, at the same places whatever the queries, the
/// threads and the way a sequence was cut into calls: that is what makes the bits the same. 128 keys of logits for 48
/// queries are 24 KiB, which a first-level cache holds; 1024 keys of float and width 64 are 0.5 MiB, 16 µs of reading:
/// enough for a task, little enough to share among threads.
inline constexpr index_t key_block = 128, key_chunk = 1024;

/// Keys and values in storage X, [batch, kv_heads, row, channel].
template <class X>
struct KeyValues {
  View<const X, 4> k, v;
  std::span<const index_t> lengths{};  // keys of each batch entry, if they differ
  index_t keys = 0;                    // or of every one
  index_t first = 0;                   // the key that row 0 holds
  bool ring = false;                   // key i lies in row i % capacity, older ones are gone

  index_t length(index_t batch) const {
    return lengths.empty() ? keys : lengths[static_cast<std::size_t>(batch)];
  }
  KeyRange held(index_t batch) const {
    const index_t end = ring ? length(batch) : std::min(length(batch), first + k.extent(2));
    return {ring ? std::max<index_t>(0, end - k.extent(2)) : first, end};
  }
  index_t row(index_t key) const { return ring ? key % k.extent(2) : key - first; }
};

/// Calls f(key, row, count) for every stretch of keys whose rows are neighbours.
template <class X, class F>
void for_each_stretch(const KeyValues<X>& keys, KeyRange range, const F& f) {
  while (range.begin < range.end) {
    const index_t row = keys.row(range.begin);
    const index_t count = std::min(range.size(), keys.k.extent(2) - row);
    f(range.begin, row, count);
    range.begin += count;
  }
}

template <class T, class X>
struct Problem {
  View<const T, 4> q;
  KeyValues<X> keys;
  double scale = 1;
  const Rope<Compute<T>>* rope = nullptr;
  bool rotate_keys = true;  // a cache's were when they were stored
  index_t key_position = 0;

  QueryShape shape(index_t batch) const {
    return {q.extent(0), q.extent(1), q.extent(2), keys.length(batch)};
  }
  index_t width() const { return q.extent(3); }
  index_t value_width() const { return keys.v.extent(3); }
  index_t kv_heads() const { return keys.k.extent(1); }
  /// Where a query's rotation puts it. A cache's keys lie at their places in the sequence, whatever the mask says.
  template <class M>
  index_t rope_position(const M& mask, const Query& query) const {
    return key_position + (rotate_keys ? query_position(mask, query) : query.position());
  }
  index_t group() const {
    return q.extent(1) / std::max<index_t>(kv_heads(), 1);
  }                                                       // query heads of a kv head
  index_t rows() const { return q.extent(2) * group(); }  // queries of a kv head
};

/// The arguments of a call that users can extend.
template <class S, class M, class C>
struct Policies {
  const S& scaling;
  const M& mask;
  const C& score;

  static constexpr bool has_score = !std::same_as<C, Identity>;
  static constexpr bool has_predicate = detail::has_predicate<M>;
  static constexpr bool has_positions = defines_positions<M>;
};

struct QueryRow {
  Query query{};
  KeyRange keys{};        // that it may see and that are held
  double multiplier = 0;  // c
};

/// The queries of a kv head, one after the other: its heads are neighbours, so that rows of one vector see nearly the same
/// keys.
template <class T, class X>
class QueryCursor {
 public:
  QueryCursor(const Problem<T, X>& problem, index_t batch, index_t kv_head, index_t row)
      : first_head_(kv_head * problem.group()),
        last_head_(first_head_ + problem.group() - 1),
        query_{batch, first_head_ + row % problem.group(), row / problem.group(), problem.shape(batch)} {}

  const Query& operator*() const { return query_; }
  void next() {
    if (query_.head++ == last_head_) {
      query_.head = first_head_;
      ++query_.index;
    }
  }

 private:
  index_t first_head_, last_head_;
  Query query_;
};

/// What a query sees of the keys `held`, and its multiplier.
template <class P>
QueryRow query_row(const P& policies, const Query& query, KeyRange held) {
  const KeyRange visible = visible_keys(policies.mask, query);
  const index_t n = visible_count(policies.mask, query, visible);
  QueryRow row{query, {}, 0};
  if (n == 0) return row;
  row.keys = {std::max(visible.begin, held.begin), std::min(visible.end, held.end)};
  if (row.keys.size() <= 0) row.keys = {};
  index_t last = visible.end - 1;
  while (!sees(policies.mask, query, last)) --last;
  const index_t position = key_position(policies.mask, query, last);
  row.multiplier = static_cast<double>(policies.scaling(Row{query.head, position, n}));
  return row;
}

/// Asks for n elements to be brought to the second-level cache.
template <class X>
SSMAX_INLINE void fetch(const X* p, index_t n) {
#if defined(__GNUC__) || defined(__clang__)
  constexpr index_t line = 64 / static_cast<index_t>(sizeof(X));
  for (index_t i = 0; i < n; i += line) __builtin_prefetch(p + i, 0, 2);
#endif
}

/// The query itself, widened and rotated: where it lies if that is nothing, else in scratch.
template <class T, class X, class P, class A = Compute<T>>
const A* load_query(const Problem<T, X>& problem, const P& policies, const Query& query, A* scratch) {
  const View<const T, 4>& q = problem.q;
  const index_t d = problem.width();
  const A* wide = widened(
      q.data_handle() + query.batch * q.stride(0) + query.head * q.stride(1) + query.index * q.stride(2), d,
      scratch);
  if (problem.rope == nullptr) return wide;
  problem.rope->rotate(wide, d, scratch, d, 1, d, problem.rope_position(policies.mask, query), false);
  return scratch;
}

/// Keys [range) widened and rotated, contiguous from `out`.
template <class T, class X, class P, class A = Compute<T>>
void load_keys(const Problem<T, X>& problem, const P& policies, index_t batch, index_t kv_head,
               KeyRange range, A* out) {
  const View<const X, 4>& k = problem.keys.k;
  const index_t d = k.extent(3);
  const Query query{batch, kv_head * problem.group(), 0, problem.shape(batch)};
  const bool rotated = problem.rope != nullptr && problem.rotate_keys;
  for_each_stretch(problem.keys, range, [&](index_t key, index_t row, index_t count) {
    const X* in = k.data_handle() + batch * k.stride(0) + kv_head * k.stride(1) + row * k.stride(2);
    for (index_t i = 0; i < count; ++i, out += d) {
      const A* wide = widened(in + i * k.stride(2), d, out);
      if (rotated) {
        const index_t position = problem.key_position + key_position(policies.mask, query, key + i);
        problem.rope->rotate(wide, d, out, d, 1, d, position, false);
      } else if (wide != out) {
        std::copy_n(wide, d, out);
      }
    }
  });
}

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
