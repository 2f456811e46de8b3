// What every executor must do with calls. Tests of executors share it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <ssmax/execution.hpp>
#include <thread>
#include <vector>

#include "catch.hpp"

namespace executor_calls {

using ssmax::index_t;

/// How often each index is called. The counts are not atomic: the thread sanitizer confirms that no two threads
/// share one, and that run's caller may read them.
template <ssmax::Executor E>
std::vector<int> counts(E&& executor, index_t n) {
  std::vector<int> result(static_cast<std::size_t>(n));
  executor.run(n, [&](index_t i) { ++result[static_cast<std::size_t>(i)]; });
  return result;
}

inline std::vector<int> once(index_t n) { return std::vector<int>(static_cast<std::size_t>(n), 1); }

template <ssmax::Executor E>
void check_each_once(E&& executor) {
  for (const index_t n : {0, 1, 2, 3, 4, 5, 8, 63, 1001}) {
    CAPTURE(n);
    CHECK(counts(executor, n) == once(n));
  }
}

/// The threads that make `n` calls none of which ends before all have begun.
template <ssmax::Executor E>
std::set<std::thread::id> threads_at_once(E&& executor, index_t n) {
  std::mutex mutex;
  std::condition_variable changed;
  std::set<std::thread::id> threads;
  index_t begun = 0;
  bool all = true;
  executor.run(n, [&](index_t) {
    std::unique_lock lock(mutex);
    threads.insert(std::this_thread::get_id());
    ++begun;
    changed.notify_all();
    all = changed.wait_for(lock, std::chrono::seconds(20), [&] { return begun == n; }) && all;
  });
  CHECK(all);
  return threads;
}

}  // namespace executor_calls
