// Defines LaneScratch, one thread's memory for queries in lanes: one query per lane, tile_lanes queries per tile.
#pragma once

#include <algorithm>

#include "../../memory/arena.hpp"
#include "../terms/variant.hpp"
#include "visibility.hpp"

SSMAX_BEGIN_DETAIL

template <class Compute>
LaneNumbers<Compute> take_lane_numbers(Arena& arena, index_t tile_lanes) {
  LaneNumbers<Compute> lane;
  for (Compute** numbers : {&lane.q_factor, &lane.row_factor, &lane.rescale, &lane.multiplier, &lane.slope,
                            &lane.distance, &lane.first, &lane.last, &lane.dc, &lane.zero, &lane.one}) {
    *numbers = arena.take<Compute>(tile_lanes);
  }
  if (lane.zero != nullptr) {  // null while the arena counts bytes
    std::fill_n(lane.zero, tile_lanes, Compute{0});
    std::fill_n(lane.one, tile_lanes, Compute{1});
  }
  return lane;
}

/// The scratch memory of one thread for a query block. Operand is the type of the products' operands.
template <class Compute, class Operand = Compute>
struct LaneScratch : TileScratch<Compute> {
  using TileScratch<Compute>::kernels;
  using TileScratch<Compute>::tile_lanes;

  /// Takes memory for `queries` queries with `a_depth` channels per lane. `d` and `dv` are the widths of keys and
  /// values.
  LaneScratch(Arena& an_arena, index_t queries, index_t d, index_t dv, index_t a_depth)
      : TileScratch<Compute>(take_tile_scratch(an_arena, detail::kernels<PrefillKernels<Compute>>())),
        arena(an_arena),
        depth(a_depth),
        tiles(ceil_div(queries, tile_lanes)),
        pitch(round_up(std::max({d, dv, depth / tuple_size<Compute, Operand>}), 16)) {}

  static TileScratch<Compute> take_tile_scratch(Arena& arena, const PrefillKernels<Compute>& kernels) {
    const index_t tile_lanes = kernels.width * tile_vectors;
    return {kernels,
            tile_lanes,
            arena.take<const Compute*>(kernels.width),
            arena.take<Compute>(kernels.width * key_block),
            take_lane_numbers<Compute>(arena, tile_lanes),
            arena.take<Compute>(kernels.width * key_block)};
  }

  Arena& arena;   // the memory of the members below and of derived structs
  index_t depth;  // channels of the product of q and k
  index_t tiles;
  index_t pitch;  // numbers per row of K or V: a multiple of the vector length of every target
  QueryRow* rows = arena.take<QueryRow>(tiles * tile_lanes);
  Hull* hulls = arena.take<Hull>(tiles * tile_vectors);  // over all keys
  // Under a mask with runs only:
  Hull* block_hulls = arena.take<Hull>(tiles * tile_vectors);  // over the last key block
  /// 1 for a vector whose rows have the same runs, else the vector length.
  index_t* distinct_rows = arena.take<index_t>(tiles * tile_vectors);
  /// One bit per visible_block keys of a chunk.
  std::uint32_t* visible_blocks = arena.take<std::uint32_t>(tiles);
  KeyRange* masked_keys = arena.take<KeyRange>(tiles);  // keys that are masked for every query of the tile
  Operand* q = arena.take<Operand>(tiles * depth * tile_lanes);  // [tiles][depth / tuple][tile_lanes][tuple]
  Compute* staged = arena.take<Compute>(kernels.width * pitch);  // staging buffer of queries and of results
  // On the bf16 path only, from the derived scratch:
  Compute* multipliers = nullptr;  // forward pass: [tiles · tile_lanes], multipliers of logits
  Compute* widened_row = nullptr;  // [2][d]: a row to be rotated, and its rounding error
};

SSMAX_END
