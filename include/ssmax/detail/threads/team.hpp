// How the threads of an SpmdTeam share the calls of the leader's runs.
//
// The leader publishes the calls of a run in `calls` and raises `stage`. A helper that sees another stage enters
// `inside`, reads `calls` and takes calls until none is left. The leader withdraws `calls` and waits until `inside`
// is 0. Entering before reading, and withdrawing before waiting, are sequentially consistent: either the helper
// finds no calls, or the leader waits for it. So a helper that is late never touches a run that has ended.
//
// `ended` counts the leader's calls. Each thread counts the calls that it has entered. A helper of call k returns
// when `ended` is larger than k, also when the leader is already several calls ahead.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "../../config.hpp"
#include "../checks/error.hpp"
#include "shared_calls.hpp"

SSMAX_BEGIN_DATA
namespace shared {  // not `detail`, which would hide the one of the code namespace

struct TeamState {
  std::atomic<SharedCalls*> calls{nullptr};  // of the leader's run, if there is one
  std::atomic<std::uint32_t> inside{0};      // helpers that may touch `calls`
  std::atomic<std::uint32_t> stage{0};       // changes when a run begins and when a call ends
  std::atomic<index_t> ended{0};             // the leader's calls that have ended
  std::vector<index_t> entered;              // each helper's calls: helper i writes entry i only

  TeamState(const TeamState&) = delete;
  TeamState& operator=(const TeamState&) = delete;
  SSMAX_INLINE TeamState() = default;
  SSMAX_INLINE ~TeamState() = default;
};

}  // namespace shared

SSMAX_END

SSMAX_BEGIN_DETAIL

/// How often a thread looks, giving way to others, before it sleeps.
inline constexpr int looks_before_sleep = 200;

/// Returns when `value` is no longer `old`.
inline void await_change(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
  for (int i = 0; i < looks_before_sleep; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    std::this_thread::yield();
  }
  value.wait(old, std::memory_order_acquire);
}

inline void next_stage(shared::TeamState& team) {
  team.stage.fetch_add(1, std::memory_order_release);
  team.stage.notify_all();
}

/// Makes calls of the leader's runs until the leader has ended this helper's call.
inline void help(shared::TeamState& team, index_t ith) {
  const index_t call = team.entered[static_cast<std::size_t>(ith)]++;
  for (;;) {
    const std::uint32_t stage = team.stage.load(std::memory_order_acquire);
    if (team.ended.load(std::memory_order_acquire) > call) return;
    team.inside.fetch_add(1);
    if (shared::SharedCalls* calls = team.calls.load()) take_calls(*calls);
    if (team.inside.fetch_sub(1) == 1) team.inside.notify_one();
    await_change(team.stage, stage);
  }
}

/// Ends the leader's call, also when an exception leaves it.
class LeaderCall {
 public:
  explicit LeaderCall(shared::TeamState& team) : team_(team) {}
  LeaderCall(const LeaderCall&) = delete;
  LeaderCall& operator=(const LeaderCall&) = delete;
  ~LeaderCall() {
    team_.ended.fetch_add(1, std::memory_order_release);
    next_stage(team_);
  }

 private:
  shared::TeamState& team_;
};

/// Makes all the calls. Inside a call of a run the calls are made here and now, as ThreadPool does.
inline void run_on(shared::TeamState& team, shared::SharedCalls& calls) {
  if (calls.n == 1 || shared::inside_shared_call) {
    take_calls(calls);
    return;
  }
  team.calls.store(&calls);
  next_stage(team);
  take_calls(calls);
  team.calls.store(nullptr);
  for (std::uint32_t inside; (inside = team.inside.load()) != 0;) await_change(team.inside, inside);
}

SSMAX_END
