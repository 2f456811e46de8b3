// Distributes the calls of the leader's runs over the threads of an SpmdTeam.
//
// 1. The leader publishes the calls of a run in `calls` and changes `stage`.
// 2. A helper that reads a new stage enters `inside`, reads `calls` and takes calls until all are taken.
// 3. The leader resets `calls` to null and waits until `inside` is 0.
//
// A helper enters before it reads, and the leader resets before it waits. These operations are sequentially
// consistent: either the helper reads null, or the leader waits for it. So a late helper never touches a run
// that has ended.
//
// `ended` counts the leader's calls. Each thread counts the calls that it has entered. A helper of call k
// returns when `ended` is larger than k, even if the leader is already several calls ahead.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "../../config.hpp"
#include "../checks/error.hpp"
#include "shared_calls.hpp"

SSMAX_BEGIN_DATA
namespace shared {  // the name `detail` would hide the code namespace's detail

struct TeamState {
  std::atomic<SharedCalls*> calls{nullptr};  // the calls of the leader's run, or null
  std::atomic<std::uint32_t> inside{0};      // number of helpers that may touch `calls`
  std::atomic<std::uint32_t> stage{0};       // changes when a run begins and when a call ends
  std::atomic<index_t> ended{0};             // number of the leader's calls that have ended
  std::vector<index_t> entered;              // calls per helper; helper i writes entry i only

  TeamState(const TeamState&) = delete;
  TeamState& operator=(const TeamState&) = delete;
  SSMAX_INLINE TeamState() = default;
  SSMAX_INLINE ~TeamState() = default;
};

}  // namespace shared

SSMAX_END

SSMAX_BEGIN_DETAIL

/// Number of reads, with a yield after each, before a thread sleeps.
inline constexpr int looks_before_sleep = 200;

/// Returns when `value` differs from `old`.
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

/// A guard that ends the leader's call, even if an exception leaves the call.
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

/// Makes all the calls of a run. Exception: the current thread makes a single call itself, and all calls if
/// it is inside a call of any run.
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
