// Which keys of a block a tile needs, and which of them the mask hides from a query.
#pragma once

#include <algorithm>
#include <limits>

#include "../call/variant.hpp"

SSMAX_BEGIN_DETAIL

/// The visible keys of some queries, as far as ranges tell.
struct Hull {
  // Of no queries: any is empty, all is everything.
  KeyRange any{std::numeric_limits<index_t>::max(), 0};  // from the first to the last key that a query sees
  KeyRange all{0, std::numeric_limits<index_t>::max()};  // keys that all queries see

  void add(KeyRange keys) {
    all = {std::max(all.begin, keys.begin), std::min(all.end, keys.end)};
    if (keys.size() > 0) any = {std::min(any.begin, keys.begin), std::max(any.end, keys.end)};
  }
  void add(const Hull& other) {
    all = {std::max(all.begin, other.all.begin), std::min(all.end, other.all.end)};
    any = {std::min(any.begin, other.any.begin), std::max(any.end, other.any.end)};
  }
  /// Returns whether the range of some query leaves out a key of the block.
  bool masks(KeyRange block) const { return block.begin < all.begin || block.end > all.end; }
};

/// The keys of a block that each vector of a tile needs, in whole passes of `pass` keys, counted from the block's
/// begin.
struct NeededKeys {
  KeyRange of[tile_vectors]{};
  index_t vectors;  // that hold queries

  /// The tile has `queries` queries, `vector_length` per vector.
  NeededKeys(const Hull* hulls, index_t queries, index_t vector_length, KeyRange block, index_t pass)
      : vectors(std::min<index_t>(tile_vectors, (queries + vector_length - 1) / vector_length)) {
    for (index_t v = 0; v < vectors; ++v) {
      const index_t first = std::max(hulls[v].any.begin, block.begin) - block.begin;
      const index_t last = std::min(hulls[v].any.end, block.end) - block.begin;
      if (first < last) of[v] = {first / pass * pass, (last + pass - 1) / pass * pass};
    }
  }

  /// Calls f(vector count, first vector, key range) for rectangles that together cover the needed logits
  /// of `keys` keys.
  template <class F>
  void for_each_rectangle(index_t keys, const F& f) const {
    KeyRange part{};
    for (; part.begin < keys; part.begin = part.end) {
      part.end = keys;  // or the next key where a vector's range begins or ends
      for (index_t v = 0; v < vectors; ++v) {
        if (of[v].begin > part.begin) part.end = std::min(part.end, of[v].begin);
        if (of[v].end > part.begin) part.end = std::min(part.end, of[v].end);
      }
      const auto needs = [&](index_t v) { return of[v].begin <= part.begin && part.end <= of[v].end; };
      for (index_t v = 0; v < vectors; ++v) {
        index_t count = 0;
        while (v + count < vectors && needs(v + count)) ++count;
        if (count == 0) continue;
        f(count, v, part);
        v += count;
      }
    }
  }
};

/// Sets the logits of one vector to -inf where the key lies outside the query's range.
template <class A>
void mask_keys(const TileScratch<A>& memory, const Logits<A>& logits) {
  const KeyRange keys = logits.keys;
  A *first = memory.lane.first, *last = memory.lane.last;
  for (index_t lane = 0; lane < memory.kernels.width; ++lane) {
    const KeyRange seen = logits.rows[lane].keys;
    first[lane] = static_cast<A>(std::clamp<index_t>(seen.begin - keys.begin, 0, keys.size()));
    last[lane] = static_cast<A>(std::clamp<index_t>(seen.end - keys.begin, 0, keys.size()));
  }
  memory.kernels.hide(logits.s, keys.size(), first, last);
}

SSMAX_END
