// Executors: every call once, nested or from several threads at once, exceptions, and threads that sleep.

#include <ssmax/execution.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <fstream>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__linux__)
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "allocation_count.hpp"
#include "catch.hpp"
#include "executor_calls.hpp"
#include "refusal.hpp"

namespace execution_test {

using namespace ssmax;
using namespace executor_calls;

/// Another's pool: from the last call to the first, on a thread of its own.
struct Backwards {
  int runs = 0;

  index_t concurrency() const { return 1; }
  template <class F>
  void run(index_t n, const F& f) {
    ++runs;
    std::thread([&] {
      for (index_t i = n - 1; i >= 0; --i) f(i);
    }).join();
  }
};
struct WithoutRun {
  index_t concurrency() const { return 1; }
};
struct WithoutConcurrency {
  template <class F>
  void run(index_t, const F&) {}
};

static_assert(ssmax::Executor<Serial> && ssmax::Executor<const Serial&>);
static_assert(ssmax::Executor<ThreadPool> && ssmax::Executor<ThreadPool&>);
static_assert(!ssmax::Executor<const ThreadPool&>);
static_assert(ssmax::Executor<Backwards&>);
static_assert(!ssmax::Executor<WithoutRun> && !ssmax::Executor<WithoutConcurrency> && !ssmax::Executor<int>);
static_assert(!std::is_copy_constructible_v<ThreadPool> && !std::is_move_constructible_v<ThreadPool>);
static_assert(!std::is_convertible_v<index_t, ThreadPool>);

const std::vector<index_t> pool_sizes{1, 2, 3, 4, 9};

TEST_CASE("every call is made once", "[execution]") {
  check_each_once(Serial{});
  for (const index_t threads : pool_sizes) {
    CAPTURE(threads);
    ThreadPool pool(threads);
    CHECK(pool.concurrency() == threads);
    check_each_once(pool);
  }
}

TEST_CASE("a user's executor is used without a copy", "[execution]") {
  Backwards executor;
  check_each_once(executor);
  CHECK(executor.runs == 9);
}

TEST_CASE("many short runs lose no call", "[execution]") {
  ThreadPool pool(4);
  for (index_t run = 0; run < 3000; ++run) {
    if (const index_t n = run % 7; counts(pool, n) != once(n)) FAIL("lost or repeated in run " << run);
  }
}

TEST_CASE("a pool without runs ends", "[execution]") {
  for (int i = 0; i < 20; ++i) ThreadPool pool(1 + i % 5);
}

TEST_CASE("as many calls run at once as there are threads, and the caller is one of them", "[execution]") {
  for (const index_t threads : pool_sizes) {
    CAPTURE(threads);
    ThreadPool pool(threads);
    for (int repetition = 0; repetition < 3; ++repetition) {
      const auto seen = threads_at_once(pool, threads);
      CHECK(static_cast<index_t>(seen.size()) == threads);
      CHECK(seen.contains(std::this_thread::get_id()));
    }
    CHECK(threads_at_once(pool, 1) == std::set{std::this_thread::get_id()});
  }
}

TEST_CASE("a run inside a call is made by the thread of that call", "[execution]") {
  for (const index_t threads : pool_sizes) {
    CAPTURE(threads);
    ThreadPool pool(threads);
    std::vector<std::vector<int>> inner(7);
    std::atomic<int> elsewhere{0};
    pool.run(7, [&](index_t i) {
      const auto here = std::this_thread::get_id();
      inner[static_cast<std::size_t>(i)] = counts(pool, 11);
      pool.run(5, [&](index_t) { elsewhere += std::this_thread::get_id() != here; });
    });
    for (const auto& result : inner) CHECK(result == once(11));
    CHECK(elsewhere == 0);
    if (threads > 1) CHECK(threads_at_once(pool, threads).size() > 1);  // the caller is outside again
  }
}

TEST_CASE("two pools may run inside each other", "[execution]") {
  ThreadPool a(3), b(3);
  std::atomic<int> calls{0};
  a.run(4, [&](index_t) { b.run(4, [&](index_t) { a.run(4, [&](index_t) { ++calls; }); }); });
  CHECK(calls == 64);
}

struct Refused {
  index_t index;
};

/// Runs n calls of which those from `first` on throw; returns the index that the caller is told of, or -1.
template <ssmax::Executor E>
index_t refused_index(E&& executor, index_t n, index_t first, std::atomic<index_t>& calls) {
  try {
    executor.run(n, [&](index_t i) {
      ++calls;
      if (i >= first) throw Refused{i};
    });
  } catch (const Refused& refused) {
    return refused.index;
  }
  return -1;
}

TEST_CASE("an exception ends a serial run", "[execution]") {
  std::atomic<index_t> calls{0};
  CHECK(refused_index(Serial{}, 10, 3, calls) == 3);
  CHECK(calls == 4);
}

TEST_CASE("an exception reaches the caller when all calls have ended", "[execution]") {
  for (const index_t threads : pool_sizes) {
    CAPTURE(threads);
    ThreadPool pool(threads);
    for (const index_t n : {1, 2, 7, 40}) {
      std::atomic<index_t> calls{0};
      CHECK(refused_index(pool, n, n - 1, calls) == n - 1);
      CHECK(calls == n);
      calls = 0;
      CHECK(refused_index(pool, n, n / 2, calls) >= n / 2);
      CHECK(calls == n);
      CHECK(counts(pool, n) == once(n));  // it is as good as before
    }
    std::atomic<index_t> inner_calls{0}, outer_calls{0};
    const auto nested = [&](index_t) {
      ++outer_calls;
      pool.run(6, [&](index_t i) {
        ++inner_calls;
        if (i == 2) throw std::runtime_error("inner");
      });
    };
    CHECK_THROWS_WITH(pool.run(5, nested), "inner");
    CHECK(outer_calls == 5);
    CHECK(inner_calls == 30);
  }
}

TEST_CASE("runs from several threads take turns", "[execution]") {
  for (const index_t threads : {1, 3}) {
    CAPTURE(threads);
    ThreadPool pool(threads);
    std::atomic<int> running{-1};  // the caller whose run it is
    std::atomic<int> wrong{0};
    const auto caller = [&](int self) {
      for (int run = 0; run < 200; ++run) {
        std::vector<int> seen(9);
        std::atomic<index_t> left{9};
        pool.run(9, [&](index_t i) {
          int nobody = -1;
          if (!running.compare_exchange_strong(nobody, self) && nobody != self) ++wrong;
          ++seen[static_cast<std::size_t>(i)];
          if (--left == 0) running = -1;
        });
        if (seen != once(9)) ++wrong;
      }
    };
    std::thread first(caller, 1), second(caller, 2);
    caller(3);
    first.join();
    second.join();
    CHECK(wrong == 0);
  }
}

TEST_CASE("no thread is busy after a run", "[execution]") {
  ThreadPool pool(4);
  CHECK(threads_at_once(pool, 4).size() == 4);
  const std::clock_t before = std::clock();  // of all threads of this process
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const double milliseconds = 1e3 * static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
  CAPTURE(milliseconds);
  CHECK(milliseconds < 10);
}

TEST_CASE("a run does not allocate", "[execution]") {
  ThreadPool pool(4);
  std::atomic<index_t> sum{0};
  const long before = allocation_count();
  for (int run = 0; run < 100; ++run) {
    pool.run(20, [&](index_t i) { pool.run(2, [&](index_t j) { sum += i + j; }); });
  }
  const long during = allocation_count() - before;
  CHECK(during == 0);
  CHECK(sum == 100 * (2 * 190 + 20));
  CHECK(before > 0);  // or they were not counted
}

TEST_CASE("a pool has at least one thread", "[execution]") {
  for (const index_t threads :
       {index_t{0}, index_t{-1}, index_t{-1000}, std::numeric_limits<index_t>::min()}) {
    const std::string message = refusal([&] { ThreadPool pool(threads); });
    INFO(message);
    CHECK(message.find("ThreadPool: threads is " + std::to_string(threads) + ",") != std::string::npos);
  }
}

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

int running_threads() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word && word != "Threads:") continue;
  int threads = 0;
  status >> threads;
  return threads;
}

/// In a process of its own with room for a few stacks more: 0 if a pool of `threads` ends with
/// std::system_error and leaves no thread behind. The system counts a joined thread a moment longer. [slow]:
/// an emulator may set no limit and take minutes.
int status_of_pool_beyond_memory(index_t threads) {
  const pid_t child = fork();
  if (child == 0) {
    std::ifstream pages("/proc/self/statm");
    rlim_t used = 0;
    pages >> used;
    const rlim_t room = used * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + (rlim_t{64} << 20);
    const rlimit limit{room, room};
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(2);
    const int before = running_threads();
    try {
      ThreadPool pool(threads);
      _exit(3);
    } catch (const std::system_error&) {
      for (int tries = 0; tries < 1000 && running_threads() > before; ++tries) usleep(10000);
      _exit(running_threads() == before ? 0 : 4);
    } catch (...) {
      _exit(5);
    }
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_CASE("more threads than the system gives are a system_error, and those begun are joined",
          "[execution][slow]") {
  CHECK(status_of_pool_beyond_memory(index_t{1} << 20) == 0);
  CHECK(status_of_pool_beyond_memory(std::numeric_limits<int>::max()) == 0);
  CHECK(status_of_pool_beyond_memory(std::numeric_limits<index_t>::max()) == 0);
}

#endif

TEST_CASE("the default executor follows the unit's OpenMP", "[execution]") {
#if defined(_OPENMP)
  static_assert(std::is_same_v<ssmax::DefaultExecutor, ssmax::OpenMP>);
  CHECK(ssmax::DefaultExecutor{}.concurrency() == omp_get_max_threads());
#else
  static_assert(std::is_same_v<ssmax::DefaultExecutor, Serial>);
#endif
  check_each_once(ssmax::DefaultExecutor{});
}

#if defined(_OPENMP)

static_assert(ssmax::Executor<OpenMP> && ssmax::Executor<const OpenMP&>);

TEST_CASE("OpenMP makes every call once, and keeps exceptions until all have ended", "[execution]") {
  CHECK(OpenMP{}.concurrency() == omp_get_max_threads());
  for (const index_t threads : pool_sizes) {
    CAPTURE(threads);
    const OpenMP executor{threads};
    CHECK(executor.concurrency() == threads);
    check_each_once(executor);
    std::atomic<index_t> calls{0};
    CHECK(refused_index(executor, 40, 20, calls) >= 20);
    CHECK(calls == 40);
    calls = 0;
    executor.run(5, [&](index_t) { executor.run(5, [&](index_t) { ++calls; }); });
    CHECK(calls == 25);
  }
}

TEST_CASE("OpenMP has at least one thread, and no more than it can count", "[execution]") {
  for (const index_t threads : {index_t{0}, index_t{-1}, index_t{1} << 40}) {
    const std::string message = refusal([&] { OpenMP{threads}; });
    INFO(message);
    CHECK(message.find("OpenMP: threads is " + std::to_string(threads) + ",") != std::string::npos);
  }
}

#endif

}  // namespace execution_test
