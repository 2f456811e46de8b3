// Distributes the calls of one run over the threads of a ThreadPool.
//
// 1. The caller publishes its calls and the number of workers that it wants.
// 2. A worker that wakes in time takes one of these places.
// 3. The caller and the workers take the next index until all indices are taken.
// 4. The caller withdraws the free places and waits for the workers that took one.
//
// The caller does not wait for workers that still sleep. So a run that ends before a thread wakes costs no
// waiting. Idle workers sleep on a condition variable and never spin.
//
// The state is data with the same layout in every unit. The functions are compiled anew for each set of
// flags. So units with and without -mavx2 may use the same pool. A worker runs the loop of the unit that made
// the pool, and the calls of the unit that calls run.
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
namespace shared {  // the name `detail` would hide the code namespace's detail

struct PoolState {
  std::mutex turn;  // held during a run: runs of other threads wait for it

  std::mutex mutex;  // guards the next four members
  SharedCalls* calls = nullptr;
  index_t wanted = 0;   // free places for workers
  index_t working = 0;  // taken places
  bool ending = false;
  std::condition_variable work, rest;  // work: a place is free; rest: no worker is working

  std::vector<std::thread> workers;

  PoolState(const PoolState&) = delete;
  PoolState& operator=(const PoolState&) = delete;
  SSMAX_INLINE PoolState() = default;
  SSMAX_INLINE ~PoolState() = default;
};

}  // namespace shared

SSMAX_END

SSMAX_BEGIN_DETAIL

/// The function object of a worker thread. The type is in this namespace because std::thread compiles code
/// for it.
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
      pool.wanted = 0;  // all calls are taken: sleeping workers are not needed
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

/// Makes all the calls of a run. Inside a call of any run, the current thread makes the calls itself: waiting
/// for its turn could deadlock.
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
