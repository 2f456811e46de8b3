// Makes the list of a call: its sequences, their paths, the phases, the tasks and the memory. Computes no product.
#pragma once

#include <algorithm>

#include "../../../workspace.hpp"
#include "cut.hpp"
#include "explain.hpp"
#include "paths.hpp"
#include "shared_keys.hpp"

SSMAX_BEGIN_DETAIL

template <class Operand, class Compute>
class ListMaker {
 public:
  ListMaker(WorkList<Compute>& list, const Problem<Compute>& problem, const Variant<Compute>& variant,
            const Result<Compute>& result, index_t threads)
      : list_(list),
        problem_(problem),
        variant_(variant),
        result_(result),
        threads_(threads),
        explains_(problem.caller.explanation != nullptr || traces_calls()) {}

  /// Takes memory for the arrays of the list from the workspace.
  void make(Workspace& workspace) {
    clear(list_);
    const index_t count = problem_.sequences();
    if (problem_.q.extent(2) == 0 || problem_.heads_per_kv_head() == 0 || count == 0) return;
    const bool shares = may_share(problem_, result_);
    if (shares || problem_.lengths.is_given()) make_sequences(workspace, shares);
    if (list_.has_groups()) {
      Arena states;
      take_states(states, problem_, list_.shared_queries);
      list_.state_bytes = states.used();
      add_phase(true);
    }
    add_phase(false);
    for (index_t i = 0; i < list_.phase_count; ++i)
      list_.run_bytes = std::max(list_.run_bytes, list_.phases[i].bytes);
    list_.run_bytes = add_bytes(list_.run_bytes, list_.state_bytes);
  }

 private:
  /// Lists and routes the sequences, and finds their shared keys.
  void make_sequences(Workspace& workspace, bool shares) {
    const index_t count = problem_.sequences();
    Arena counted;
    take_arrays(list_, counted, count);
    list_.list_bytes = counted.used();
    Arena making;
    SharingMemory(making, shares ? count : 0);
    list_.making_bytes = add_bytes(list_.list_bytes, making.used());
    std::byte* const memory = workspace.reserve(list_.making_bytes);
    Arena arena(memory);
    take_arrays(list_, arena, count);
    list_.listed = count;
    for (index_t b = 0; b < count; ++b) {
      Sequence& sequence = list_.sequences[b] = sequence_of(problem_, b);
      if (sequence.queries == 0) continue;
      const Route taken = route(problem_, result_, sequence, 1, explains_);
      sequence.path = taken.path;
      sequence.reason = taken.reason;
    }
    if (shares)
      problem_.keys.find_shared_keys()(list_, problem_, result_, explains_, memory + list_.list_bytes);
    if (list_.has_groups() || problem_.lengths.is_given()) return;
    list_.listed = 0;  // one entry has all sequences
    list_.list_bytes = 0;
  }

  /// Adds the phase of shared keys, or that of all other keys.
  void add_phase(bool are_together) {
    PhaseWorks& phase = list_.phases[list_.phase_count];
    phase = {list_.path_count, 0, 0, 0, 0, are_together};
    const Route uniform = list_.listed == 0 ? route(problem_, result_, explains_) : Route{};
    index_t pieces = 0;
    const auto add_paths = [&](std::span<const PathDriver<Compute>> drivers) {
      for (const PathDriver<Compute>& driver : drivers) {
        PathWorks<Compute>& path = list_.paths[list_.path_count];
        path.driver = &driver;
        path.reason = uniform.reason;
        path.rows = path.works_count = 0;
        path.works = list_.works_count;
        if (list_.listed > 0) {
          collect(path, are_together);
        } else if (driver.path == uniform.path) {
          add_works(path, {0, problem_.sequences(), 0, 0, 0, 0},
                    problem_.q.extent(2) * problem_.heads_per_kv_head(), uniform.reason);
        }
        if (path.works_count == 0) continue;
        const PathCut<Compute> cut(list_, problem_, variant_, phase, threads_);
        const std::span<Works> works =
            path.works_count == 1
                ? std::span<Works>(&path.only, 1)
                : std::span<Works>(list_.works + path.works, static_cast<std::size_t>(path.works_count));
        cut.cut(path, works);
        put_in_order(path, works, cut);
        pieces += std::max(path.pieces(path.split), path.pieces(path.together));
        phase.lane_bytes = std::max(phase.lane_bytes, path.lane_bytes);
        phase.bytes = add_bytes(phase.bytes, path.waiting_bytes);
        ++phase.count;
        ++list_.path_count;
      }
    };
    if constexpr (!std::same_as<Operand, Compute>) add_paths(compiled::paths_with<Operand, Compute>());
    add_paths(compiled::paths_with<Compute, Compute>());
    if (phase.count == 0) return;
    phase.lanes = std::min(threads_, pieces);
    phase.bytes =
        add_bytes(phase.bytes, multiply_bytes(static_cast<std::size_t>(phase.lanes), phase.lane_bytes));
    ++list_.phase_count;
  }

  /// Adds the works of the groups, or of the sequences, that take the path.
  void collect(PathWorks<Compute>& path, bool are_together) {
    const auto add = [&](const Sequence& sequence, index_t first, index_t count) {
      if (sequence.path != path.driver->path || sequence.queries == 0) return;
      const index_t rows = sequence.queries * problem_.heads_per_kv_head() * count;
      const double cost = static_cast<double>(rows) * static_cast<double>(sequence.stored.size());
      add_works(path, {first, count, 0, 0, 0, cost}, rows, sequence.reason);
    };
    if (are_together) {
      for (index_t i = 0; i < list_.group_count; ++i)
        add(list_.members[list_.groups[i].first], list_.groups[i].first, list_.groups[i].count);
    } else {
      for (index_t i = 0; i < list_.listed; ++i) add(list_.sequences[i], i, 1);
    }
  }
  void add_works(PathWorks<Compute>& path, Works works, index_t rows, const char* reason) {
    works.rows = rows;
    if (rows > path.rows) path.reason = reason;
    path.rows = std::max(path.rows, rows);
    if (path.works_count++ == 0) path.only = works;
    if (list_.listed > 0) list_.works[list_.works_count++] = works;
  }

  /// Sorts the works of a path. Neighbours of equal cost with one query block become one.
  void put_in_order(PathWorks<Compute>& path, std::span<Works> works, const PathCut<Compute>& cut) {
    if (!path.driver->keeps_order) sort_by_cost(works);
    index_t kept = 0, begin = 0;
    for (const Works& some : works) {
      Works* const last = kept > 0 ? &works[static_cast<std::size_t>(kept - 1)] : nullptr;
      if (last != nullptr && !cut.are_together() && some.blocks == 1 && some.rows == last->rows &&
          some.cost == last->cost && some.first == last->first + last->count) {
        ++last->count;
      } else {
        works[static_cast<std::size_t>(kept++)] = some;
        works[static_cast<std::size_t>(kept - 1)].begin = begin;
      }
      begin += cut.tasks_of(some);
    }
    path.works_count = kept;
    if (kept == 1) path.only = works.front();
    if (list_.listed > 0) list_.works_count = path.works + kept;
  }

  WorkList<Compute>& list_;
  const Problem<Compute>& problem_;
  const Variant<Compute>& variant_;
  const Result<Compute>& result_;
  const index_t threads_;
  const bool explains_;  // false in most calls
};

SSMAX_END

SSMAX_BEGIN_COMPILED

template <class Operand, class Compute>
void make_list(const shared::Problem<Compute>& problem, const shared::Variant<Compute>& variant,
               const shared::Result<Compute>& result, index_t threads, Workspace& workspace,
               shared::WorkList<Compute>& list) {
  detail::ListMaker<Operand, Compute>(list, problem, variant, result, threads).make(workspace);
  if (problem.caller.explanation != nullptr)
    *problem.caller.explanation = detail::explanation_of(list, problem);
}

SSMAX_END
