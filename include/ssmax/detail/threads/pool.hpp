// How the threads of a ThreadPool share the calls of one run.
//
// The caller publishes its calls and says how many workers it wants. A worker that wakes in time takes a
// place. All, the caller too, then take the next index until none is left. The caller waits for the
// workers that took a place, not for those that still sleep: it withdraws the places left over, so that a
// run whose calls are over sooner than a thread wakes costs no waiting. Nobody spins: who has nothing to
// do sleeps on a condition variable.
//
// The state is data, laid out alike in every unit; the functions are compiled anew for each set of flags. So
// a pool made by a unit with -mavx2 may be used by one without, and the reverse: a worker runs the loop of
// the unit that made the pool, and the calls of the unit that calls run.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "../../config.hpp"
#include "../checks/error.hpp"
#include "shared_calls.hpp"

SSMAX_BEGIN_DATA
namespace shared {  // not `detail`, which would hide the one of the code namespace

struct PoolState {
  std::mutex turn;  // held throughout a run: those of other threads wait here

  std::mutex mutex;  // guards the next four
  SharedCalls* calls = nullptr;
  index_t wanted = 0;   // places for workers that nobody has taken
  index_t working = 0;  // places that are taken
  bool ending = false;
  std::condition_variable work, rest;  // there is some for a worker; none is working any more

  std::vector<std::thread> workers;

  PoolState(const PoolState&) = delete;
  PoolState& operator=(const PoolState&) = delete;
  SSMAX_INLINE PoolState() = default;
  SSMAX_INLINE ~PoolState() = default;
};

}  // namespace shared

SSMAX_END

SSMAX_BEGIN_DETAIL

/// A type of this namespace, because std::thread compiles code for the type of what it runs.
struct PoolWorker {
  shared::PoolState& pool;

  void operator()() const {
    std::unique_lock lock(pool.mutex);
    for (;;) {
      pool.work.wait(lock, [this] { return pool.wanted > 0 || pool.ending; });
      if (pool.ending) return;
      --pool.wanted;
      ++pool.working;
      shared::SharedCalls& calls = *pool.calls;
      lock.unlock();
      take_calls(calls);
      lock.lock();
      pool.wanted = 0;  // no call is left: whoever sleeps may go on
      if (--pool.working == 0) pool.rest.notify_one();
    }
  }
};

inline void start_workers(shared::PoolState& pool, index_t threads) {
  if (threads < 1) fail_value("ThreadPool", "threads", "is", threads, "must be at least", 1);
  for (index_t i = 1; i < threads; ++i) pool.workers.emplace_back(PoolWorker{pool});
}

inline void end_workers(shared::PoolState& pool) {
  {
    const std::lock_guard lock(pool.mutex);
    pool.ending = true;
  }
  pool.work.notify_all();
  for (std::thread& worker : pool.workers) worker.join();
}

/// Makes all the calls. Inside a call of a pool they are made here and now: to wait for a turn
/// could be to wait for oneself.
inline void run_on(shared::PoolState& pool, shared::SharedCalls& calls) {
  if (shared::inside_shared_call) {
    take_calls(calls);
    return;
  }
  const std::lock_guard turn(pool.turn);
  const auto workers = static_cast<index_t>(pool.workers.size());
  const index_t wanted = std::min(workers, calls.n - 1);
  {
    const std::lock_guard lock(pool.mutex);
    pool.calls = &calls;
    pool.wanted = wanted;
  }
  if (wanted == workers) {
    pool.work.notify_all();
  } else {
    for (index_t i = 0; i < wanted; ++i) pool.work.notify_one();
  }
  take_calls(calls);
  std::unique_lock lock(pool.mutex);
  pool.wanted = 0;
  pool.rest.wait(lock, [&pool] { return pool.working == 0; });
}

SSMAX_END
