// Finds the keys of a block that are visible to a tile, and applies the mask to its logits.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "../terms/variant.hpp"

SSMAX_BEGIN_DETAIL

/// The keys of a block that each vector of a tile needs. Key ranges are whole passes of `pass` keys and count from
/// the first key of the block.
struct NeededKeys {
  const Hull* hulls;  // of the vectors of the tile
  KeyRange block;
  KeyRange of[tile_vectors]{};
  index_t vectors;  // vectors with queries

  /// Computes the needed keys of a tile of `queries` queries, with `vector_length` queries per vector.
  NeededKeys(const Hull* a_hulls, index_t queries, index_t vector_length, KeyRange a_block, index_t pass)
      : hulls(a_hulls),
        block(a_block),
        vectors(std::min<index_t>(tile_vectors, ceil_div(queries, vector_length))) {
    for (index_t v = 0; v < vectors; ++v) {
      const index_t first = std::max(hulls[v].any.begin, block.begin) - block.begin;
      const index_t last = std::min(hulls[v].any.end, block.end) - block.begin;
      if (first < last) of[v] = {first / pass * pass, round_up(last, pass)};
    }
  }

  bool any() const {
    return std::any_of(of, of + vectors, [](KeyRange keys) { return keys.size() > 0; });
  }

  /// Calls f(vector count, first vector, key range) for rectangles that together cover the needed logits of `keys`
  /// keys.
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

/// Prepares the functions below for the rows in `lanes` lanes. Has no effect unless the mask has runs.
template <class Compute, class Memory>
void list_runs(const Variant<Compute>& variant, const Memory& memory, index_t lanes) {
  if (!variant.has_runs) return;
  const index_t width = memory.kernels.width;
  for (index_t i = 0; i < lanes; i += width) {
    memory.distinct_rows[i / width] = variant.has_same_runs(memory.rows + i, width) ? 1 : width;
    memory.block_hulls[i / width].all = {};
  }
  std::fill_n(memory.masked_keys, memory.tiles, KeyRange{});
}

/// Calls f(first row, number of rows, vector) for the vectors of a tile. The number of rows is 1 if all rows of the
/// vector have the same runs.
template <class Memory, class F>
void for_each_vector(const Memory& memory, index_t tile, index_t lanes, const F& f) {
  const index_t width = memory.kernels.width, first = tile * memory.tile_lanes;
  for (index_t i = 0; i < std::min(lanes, memory.tile_lanes); i += width) {
    f(memory.rows + first + i, memory.distinct_rows[(first + i) / width], i / width);
  }
}

/// Returns the hulls of a tile's vectors for a key block. A hull covers all keys or, under a mask with runs, the
/// keys of the block. `lanes` is the number of lanes of the tile in use.
template <class Compute, class Memory>
const Hull* hulls_of(const Variant<Compute>& variant, const Memory& memory, index_t tile, index_t lanes,
                     KeyRange block) {
  if (!variant.has_runs) return memory.hulls + tile * tile_vectors;
  Hull* hulls = memory.block_hulls + tile * tile_vectors;
  for_each_vector(memory, tile, lanes, [&](const QueryRow* rows, index_t count, index_t v) {
    // A hull is often valid for several blocks: the runs that all rows share are longer than a block.
    if (hulls[v].masks(block)) hulls[v] = variant.hull(rows, count, block);
  });
  return hulls;
}

/// The number of keys per bit of `visible_blocks`: the smallest key block.
inline constexpr index_t visible_block = key_block / 2;
static_assert(key_chunk / visible_block <= 32);

/// Under a mask with runs: finds the blocks of a chunk that are visible to each tile. `lanes` lanes hold queries.
/// Returns whether any block is visible.
template <class Compute, class Memory>
bool find_visible_blocks(const Variant<Compute>& variant, const Memory& memory, index_t lanes,
                         KeyRange chunk) {
  const KeyRange keys{chunk.begin / key_chunk * key_chunk, chunk.end};
  std::uint32_t any = 0;
  for (index_t tile = 0; tile * memory.tile_lanes < lanes; ++tile) {
    std::uint32_t& blocks = memory.visible_blocks[tile] = 0;
    KeyRange& masked = memory.masked_keys[tile];
    if (masked.begin <= keys.begin && keys.end <= masked.end) continue;
    masked = {keys.end, std::numeric_limits<index_t>::max()};
    for_each_vector(memory, tile, lanes - tile * memory.tile_lanes,
                    [&](const QueryRow* rows, index_t count, index_t) {
                      blocks |= variant.visible_blocks(rows, count, keys, visible_block);
                      masked.end = std::min(masked.end, variant.next_visible(rows, count, keys.end));
                    });
    any |= blocks;
  }
  return any != 0;
}

/// Returns the keys of a range from the first to the last visible block. Requires that the range lies in the chunk
/// of the last call of find_visible_blocks.
inline KeyRange visible_part(std::uint32_t visible_blocks, KeyRange keys) {
  const index_t chunk = keys.begin / key_chunk * key_chunk;
  const index_t first = (keys.begin - chunk) / visible_block, last = (keys.end - 1 - chunk) / visible_block;
  const std::uint32_t blocks = visible_blocks & ((std::uint32_t{2} << last) - (std::uint32_t{1} << first));
  if (blocks == 0) return {keys.begin, keys.begin};
  return {std::max(keys.begin, chunk + std::countr_zero(blocks) * visible_block),
          std::min(keys.end, chunk + std::bit_width(blocks) * visible_block)};
}

/// Sets the logits of one vector to -inf where the key lies outside the query's range.
template <class Compute>
void mask_keys(const TileScratch<Compute>& memory, const Logits<Compute>& logits) {
  const KeyRange keys = logits.keys;
  Compute *first = memory.lane.first, *last = memory.lane.last;
  for (index_t lane = 0; lane < memory.kernels.width; ++lane) {
    const KeyRange seen = logits.rows[lane].keys;
    first[lane] = static_cast<Compute>(std::clamp<index_t>(seen.begin - keys.begin, 0, keys.size()));
    last[lane] = static_cast<Compute>(std::clamp<index_t>(seen.end - keys.begin, 0, keys.size()));
  }
  memory.kernels.mask_logits(logits.s, keys.size(), first, last);
}

SSMAX_END
