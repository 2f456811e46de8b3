// One thread's memory for queries in lanes.
#pragma once

#include <algorithm>

#include "../../memory/arena.hpp"
#include "../call/variant.hpp"
#include "visibility.hpp"

SSMAX_BEGIN_DETAIL

/// What one thread needs to hold queries in lanes, in groups of whole vectors: forward and backward alike.
template <class A, class E = A>
struct LaneScratch : ColumnScratch<A> {
  using ColumnScratch<A>::kernels;
  using ColumnScratch<A>::group;

  /// `depth` channels of a query in lanes.
  LaneScratch(Arena& arena, index_t queries, index_t d, index_t dv, index_t depth)
      : ColumnScratch<A>(column_scratch(arena, detail::kernels<PrefillKernels<A>>())),
        groups((queries + group - 1) / group),
        rows(arena.take<QueryRow>(groups * group)),
        columns(arena.take<Column>(groups * tile_vectors)),
        q(arena.take<E>(groups * depth * group)),
        pitch((std::max({d, dv, depth / tuple_size<A, E>}) + 15) / 16 * 16),
        staged(arena.take<A>(kernels.width * pitch)) {}

  static ColumnScratch<A> column_scratch(Arena& arena, const PrefillKernels<A>& kernels) {
    const index_t group = kernels.width * tile_vectors;
    return {kernels, group, arena.take<const A*>(kernels.width), arena.take<A>(4 * group),
            arena.take<A>(kernels.width * key_block)};
  }

  index_t groups;
  QueryRow* rows;   // [groups · group]
  Column* columns;  // [groups · tile_vectors]
  E* q;             // [groups][depth / tuple][group][tuple]
  index_t pitch;    // of rows of K or V: a multiple of every target's vectors
  A* staged;        // [width][pitch]: queries on their way into lanes, results on their way out
};

SSMAX_END
