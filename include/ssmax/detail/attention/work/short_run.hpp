// Computes the tasks of the short_keys path: tiles of queries. A lane takes runs of neighbouring tiles, which may
// belong to several kv heads.
#pragma once

#include <algorithm>

#include "../forward/short.hpp"
#include "path_run.hpp"

SSMAX_BEGIN_DETAIL

/// PathDriver::run of the short_keys path.
template <class Compute>
void run_tiles(PathRun<Compute>& run, std::byte* scratch) {
  const PhaseRun<Compute>& phase = run.phase;
  const Problem<Compute>& problem = phase.problem;
  const index_t at_once = run.split.at_once, pieces = run.works.pieces(run.split);
  auto taken = run.take(pieces);
  if (taken.first >= pieces) return;
  Arena arena(scratch);
  const ShortScratch<Compute> memory(arena, problem.width(), problem.value_width());
  ShortTask<Compute> task(problem, phase.variant, phase.result, memory);
  Sequence entry{};  // the batch entry, in a list without sequences
  for (; taken.first < pieces; taken = run.take(pieces)) {
    const index_t end = std::min(run.works.tasks, taken.end * at_once);
    for (index_t tile = taken.first * at_once; tile < end; ++tile) {
      const Works& works = works_of(phase.list, run.works, tile);
      const index_t tiles = works.blocks, of_sequence = problem.kv_heads() * tiles, at = tile - works.begin,
                    place = works.first + at / of_sequence, rest = at % of_sequence;
      if (phase.list.listed > 0) {
        task.attend(phase.list.sequences[place], rest / tiles, rest % tiles, tiles);
        continue;
      }
      if (entry.batch != place) entry = sequence_of(problem, place);
      task.attend(entry, rest / tiles, rest % tiles, tiles);
    }
  }
}

template <class Compute>
TaskSizes sizes_of_tiles(const Problem<Compute>& problem, index_t queries) {
  Arena count;
  const ShortScratch<Compute> counted(count, problem.width(), problem.value_width());
  return {count.used(), 0, key_block, queries};
}

template <class Compute>
QueryBlocks blocks_of_tiles(index_t) {
  const index_t size = ShortScratch<Compute>::tile_size();
  return {size, size, false};
}

SSMAX_END
