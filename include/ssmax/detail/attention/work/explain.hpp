// Writes and prints the explanation of a call. Only the drivers include this file.
#pragma once

#include <concepts>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "list.hpp"
#include "route.hpp"

SSMAX_BEGIN_DETAIL

/// Returns whether every call is printed. Reads SSMAX_TRACE once per process.
inline bool traces_calls() {
  static const bool traces = [] {
    const char* value = std::getenv("SSMAX_TRACE");
    return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
  }();
  return traces;
}

inline void print(const Explanation& e) {
  char line[max_of_a_line];
  write_line(e, line);
  std::fprintf(stderr, "%s\n", line);
}

/// Returns what holds for any works of a list.
template <class Compute>
SSMAX_COLD Explanation explanation_of_call(const WorkList<Compute>& list, const Problem<Compute>& problem) {
  Explanation e;
  e.function = problem.caller.function;
  e.target = target_in_use();
  e.workspace_bytes = bytes_of(list);
  return e;
}

/// Returns the explanation of one path of a phase.
template <class Compute>
SSMAX_COLD Explanation explanation_of(const WorkList<Compute>& list, const PhaseWorks& phase,
                                      const PathWorks<Compute>& works, const Problem<Compute>& problem) {
  const Split split = split_of(works, problem);
  const bool keeps_order = works.driver->keeps_order;
  const Path path = works.driver->path;
  const bool is_bf16 = path == Path::prefill_bf16 || path == Path::decode_bf16 || path == Path::backward_bf16;
  Explanation e = explanation_of_call(list, problem);
  e.path = path;
  e.operands = is_bf16 ? "bfloat16" : std::same_as<Compute, double> ? "double" : "float";
  e.rows = works.rows;
  e.reason = works.reason;
  e.query_block = works.queries;
  e.key_block = works.sizes.block_keys;
  e.tile_lanes = works.sizes.tile_lanes;
  e.tasks = keeps_order ? works.pieces(split) : works.tasks;
  e.key_chunks = split.chunks;
  e.heads_together = keeps_order ? 1 : split.at_once * split.heads;
  e.threads = phase.lanes;
  e.shared_sequences = list.shared_sequences;
  return e;
}

/// Returns the explanation of the path of a list that runs last.
template <class Compute>
SSMAX_COLD Explanation explanation_of(const WorkList<Compute>& list, const Problem<Compute>& problem) {
  if (list.phase_count == 0) return explanation_of_call(list, problem);
  return explanation_of(list, list.phases[list.phase_count - 1], list.paths[list.path_count - 1], problem);
}

/// Prints one line for every path of a list, in the order of the phases.
template <class Compute>
SSMAX_COLD void print_list(const WorkList<Compute>& list, const Problem<Compute>& problem) {
  if (list.phase_count == 0) print(explanation_of(list, problem));
  for (const PhaseWorks& phase : std::span(list.phases, static_cast<std::size_t>(list.phase_count)))
    for (const PathWorks<Compute>& works : paths_of(list, phase))
      print(explanation_of(list, phase, works, problem));
}

SSMAX_END
