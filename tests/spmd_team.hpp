// A team of threads, as a program has it that owns its threads.
#pragma once

#include <ssmax/execution.hpp>
#include <thread>
#include <vector>

namespace spmd_team {

/// Executes `body(executor)` in every thread of a team of nth, the caller among them. `missing` of the others stay away.
template <class Body>
void in_every_thread(ssmax::SpmdTeam& team, const Body& body, ssmax::index_t missing = 0) {
  const auto enter = [&](ssmax::index_t ith) { body(ssmax::Spmd(team, ith)); };
  std::vector<std::thread> helpers;
  for (ssmax::index_t ith = 1 + missing; ith < team.concurrency(); ++ith) helpers.emplace_back(enter, ith);
  enter(0);
  for (std::thread& helper : helpers) helper.join();
}

/// The result of `function(executor)`, which the team enters together.
template <class Function>
auto led(ssmax::SpmdTeam& team, const Function& function) {
  using Result = decltype(function(ssmax::Spmd(team, 0)));
  std::vector<Result> result;
  in_every_thread(team, [&](const ssmax::Spmd& executor) {
    executor.lead_or_help([&] { result.push_back(function(executor)); });
  });
  return result.at(0);
}

}  // namespace spmd_team
