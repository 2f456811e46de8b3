// Which parts of a block of keys a group of queries needs, as rectangles, and what in them is hidden: for
// forward and backward alike.
#pragma once

#include <algorithm>
#include <limits>

#include "../call/variant.hpp"

SSMAX_BEGIN_DETAIL

/// A vector of queries.
struct Column {
  // A range that no query has been added to: any is empty, all is everything.
  KeyRange any{std::numeric_limits<index_t>::max(), 0};  // keys that one of them sees
  KeyRange all{0, std::numeric_limits<index_t>::max()};  // keys that all of them see, as far as ranges tell

  void add(KeyRange keys) {
    all = {std::max(all.begin, keys.begin), std::min(all.end, keys.end)};
    if (keys.size() > 0) any = {std::min(any.begin, keys.begin), std::max(any.end, keys.end)};
  }
  void add(const Column& other) {
    all = {std::max(all.begin, other.all.begin), std::min(all.end, other.all.end)};
    any = {std::min(any.begin, other.any.begin), std::max(any.end, other.any.end)};
  }
  /// Whether some query's range leaves out a key of the block.
  bool hides(KeyRange block) const { return block.begin < all.begin || block.end > all.end; }
};

/// The keys of a block that each vector of a group needs, in whole passes of `pass` keys, counted from
/// the block's begin.
struct NeededKeys {
  KeyRange of[tile_vectors]{};
  index_t vectors;  // that hold queries

  /// `columns` are the group's; it has `queries` queries, `width` to a vector.
  NeededKeys(const Column* columns, index_t queries, index_t width, KeyRange block, index_t pass)
      : vectors(std::min<index_t>(tile_vectors, (queries + width - 1) / width)) {
    for (index_t v = 0; v < vectors; ++v) {
      const index_t first = std::max(columns[v].any.begin, block.begin) - block.begin;
      const index_t last = std::min(columns[v].any.end, block.end) - block.begin;
      if (first < last) of[v] = {first / pass * pass, (last + pass - 1) / pass * pass};
    }
  }

  /// Calls f(vector count, first vector, key range) for rectangles that together cover the needed logits
  /// of `keys` keys.
  template <class F>
  void for_each_rectangle(index_t keys, const F& f) const {
    KeyRange part{};
    for (; part.begin < keys; part.begin = part.end) {
      part.end = keys;  // or the next place where something begins or ends
      for (index_t v = 0; v < vectors; ++v) {
        if (of[v].begin > part.begin) part.end = std::min(part.end, of[v].begin);
        if (of[v].end > part.begin) part.end = std::min(part.end, of[v].end);
      }
      const auto needs = [&](index_t v) { return of[v].begin <= part.begin && part.end <= of[v].end; };
      for (index_t v = 0; v < vectors; ++v) {
        index_t width = 0;
        while (v + width < vectors && needs(v + width)) ++width;
        if (width == 0) continue;
        f(width, v, part);
        v += width;
      }
    }
  }
};

/// One vector of queries: logits of keys outside of each query's range become -inf.
template <class A>
void hide_keys(const ColumnScratch<A>& memory, A* s, KeyRange keys, const QueryRow* rows) {
  A* first = memory.lanes + 2 * memory.group;
  A* last = memory.lanes + 3 * memory.group;
  for (index_t lane = 0; lane < memory.kernels.width; ++lane) {
    first[lane] = static_cast<A>(std::clamp<index_t>(rows[lane].keys.begin - keys.begin, 0, keys.size()));
    last[lane] = static_cast<A>(std::clamp<index_t>(rows[lane].keys.end - keys.begin, 0, keys.size()));
  }
  memory.kernels.hide(s, keys.size(), first, last);
}

SSMAX_END
