/// @defgroup execution Executors (execution.hpp)
/// Executors. A function splits its work into calls, and an executor makes the calls.
///
/// | executor | threads that make the calls |
/// |---|---|
/// | Serial | the caller, in order; the default of every function |
/// | ThreadPool | the caller and threads that sleep between runs; requires std::thread |
/// | OpenMP | an OpenMP team; only in units compiled with OpenMP |
/// | Spmd | threads that your program owns; requires std::thread |
/// | DefaultExecutor | OpenMP in units compiled with OpenMP, Serial in others |
///
/// Your own executor is a class with `concurrency()` and `run(n, f)`. For example, to use the pool of your program:
///
///     struct Arena {
///       tbb::task_arena& arena;
///       ssmax::index_t concurrency() const { return arena.max_concurrency(); }
///       template <class F>
///       void run(ssmax::index_t n, const F& f) {
///         arena.execute([&] { tbb::parallel_for(ssmax::index_t{0}, n, f); });
///       }
///     };
///
/// Executors are data that any two units may exchange, also a ThreadPool. Their members are inlined. The compiled
/// code is in detail/threads.

/// @defgroup spmd Teams of your threads (execution.hpp)
/// `Spmd`: an executor for programs that own their threads. It does not start threads.
///
/// All threads of the program's team execute the same statements. Each thread has its number `ith` and the number of
/// threads `nth`, as in ggml:
///
///     ssmax::SpmdTeam team(nth);  // one, shared by the threads
///
///     // In every thread:
///     ssmax::Spmd executor(team, ith);
///     executor.lead_or_help([&] { ssmax::attention(arguments, scaling, mask, executor); });
///
/// Thread 0 is the leader: it executes the function. The other threads are helpers: a helper makes calls of the
/// leader's runs until the leader's function has ended.
///
/// | topic | rule |
/// |---|---|
/// | input | Complete the inputs before the leader enters. `lead_or_help` does not wait for the helpers. |
/// | output | A thread may read the results after it has returned from `lead_or_help`, without a barrier. |
/// | next call | A thread may enter the next call at once. |
/// | late helpers | A late helper makes the remaining calls, if any, and returns. The leader can finish alone. |
/// | number of calls | Every helper enters as often as the leader. |
/// | one call more than the leader | The helper waits for the leader. |
/// | fewer calls than the leader | The helper no longer helps, because the leader is ahead. |
/// | exception of the function | Frees the helpers. Only the leader throws it. |
/// | exception of a task | The leader throws it, as with `ThreadPool`. |
/// | waiting | A waiting thread polls a few hundred times, yields to other threads meanwhile, and then sleeps. |
///
/// Results are bit-identical to those of every other executor. `Spmd` requires std::thread.
#pragma once

#include <algorithm>
#include <concepts>
#include <type_traits>

#include "config.hpp"
#include "detail/checks/error.hpp"
#include "detail/threads/guarded_calls.hpp"

#if SSMAX_HAS_THREADS
#include "detail/threads/pool.hpp"
#include "detail/threads/team.hpp"
#endif

#if defined(_OPENMP)
#include <omp.h>

#include <limits>
#endif

/// @addtogroup execution
/// @{
SSMAX_BEGIN_DATA
namespace shared {

/// A placeholder for the function that run receives.
struct SomeCall {
  void operator()(index_t index) const;
};

}  // namespace shared

/// A type that makes the calls of a function. `concurrency()` returns the maximum number of simultaneous calls:
/// values below 1 count as 1, values above 4096 as 4096. `run(n, f)` calls f(0) … f(n-1), each once, in any order and
/// on any threads. n may be 0. `run` returns when all calls have ended and their results are visible to the caller.
/// Calls do not wait for each other. If a call throws, `run` should throw the exception after all calls have ended.
template <class E>
concept Executor = requires(std::remove_reference_t<E>& executor, index_t n, const shared::SomeCall& f) {
  { executor.concurrency() } -> std::convertible_to<index_t>;
  executor.run(n, f);
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// Upper bound of the simultaneous calls, each of which has its own memory. No machine has more threads.
inline constexpr index_t max_concurrency = 4096;

template <class E>
index_t threads_of(E& executor) {
  return std::clamp<index_t>(static_cast<index_t>(executor.concurrency()), 1, max_concurrency);
}

SSMAX_END

SSMAX_BEGIN_DATA

/// An executor that makes the calls in order. An exception ends the run at once.
struct Serial {
  /// Returns 1.
  SSMAX_INLINE constexpr index_t concurrency() const { return 1; }

  /// Calls f(0), f(1) … f(n-1).
  template <class F>
  SSMAX_INLINE constexpr void run(index_t n, const F& f) const {
    for (index_t i = 0; i < n; ++i) f(i);
  }
};

#if SSMAX_HAS_THREADS

/// A pool of `threads` threads, at least 1. The caller of run is one of them. The other threads sleep between runs.
///
/// Runs of several threads take turns. A run inside a call, of this pool or of another, is made by the calling thread
/// only. A call must not wait for a run of another thread: the turn of that run may never come. If calls throw, the
/// pool makes the other calls and then throws one of the exceptions. `run` does not allocate. You can neither copy
/// nor move a pool. The pool must outlive its runs. (If the C library keeps threads in a separate library, as glibc
/// did before 2.34, link that library. In CMake, ssmax::ssmax links it.)
class ThreadPool {
 public:
  /// Starts the threads. Throws std::invalid_argument if threads < 1. If the system cannot start all threads, joins
  /// those that it started and throws std::system_error.
  SSMAX_INLINE explicit ThreadPool(index_t threads) : ThreadPool() { detail::start_workers(state_, threads); }
  /// Deleted.
  ThreadPool(const ThreadPool&) = delete;
  /// Deleted.
  ThreadPool& operator=(const ThreadPool&) = delete;
  /// Ends the threads and waits for them.
  SSMAX_INLINE ~ThreadPool() { detail::end_workers(state_); }

  /// Returns the number of threads, the caller of run included.
  SSMAX_INLINE index_t concurrency() const { return static_cast<index_t>(state_.workers.size()) + 1; }

  /// Calls f(0) … f(n-1) on all threads of the pool.
  template <class F>
  SSMAX_INLINE void run(index_t n, const F& f) {
    if (n <= 0) return;
    detail::GuardedCalls<F> guarded(f);
    shared::SharedCalls calls{&detail::GuardedCalls<F>::call, &guarded, n};
    detail::run_on(state_, calls);
    guarded.rethrow();
  }

 private:
  // After this constructor has ended, the destructor joins the threads if the other constructor throws.
  SSMAX_INLINE ThreadPool() = default;

  shared::PoolState state_;
};

#endif

SSMAX_END

#if defined(_OPENMP)

SSMAX_BEGIN_DETAIL

inline void check_openmp(index_t threads) {
  if (threads < 1) fail_value("OpenMP", "threads", "is", threads, "must be at least", 1);
  constexpr index_t most = std::numeric_limits<int>::max();
  if (threads > most) fail_value("OpenMP", "threads", "is", threads, "must be at most", most);
}

template <class F>
void run_openmp(int threads, index_t n, const F& f) {
  GuardedCalls<F> guarded(f);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (index_t i = 0; i < n; ++i) guarded(i);
  guarded.rethrow();
}

SSMAX_END

SSMAX_BEGIN_DATA

/// A team of at most `threads` OpenMP threads, at least 1. The default is OpenMP's own number (OMP_NUM_THREADS).
/// OpenMP decides whether threads spin after a run (OMP_WAIT_POLICY) and how many threads a run in a parallel region
/// gets. Exceptions as in ThreadPool.
class OpenMP {
 public:
  /// Throws std::invalid_argument if threads < 1 or if an int cannot hold the number.
  SSMAX_INLINE explicit OpenMP(index_t threads = omp_get_max_threads())
      : threads_(static_cast<int>(threads)) {
    detail::check_openmp(threads);
  }

  /// Returns the number of threads.
  SSMAX_INLINE index_t concurrency() const { return threads_; }

  /// Calls f(0) … f(n-1) on an OpenMP team.
  template <class F>
  SSMAX_INLINE void run(index_t n, const F& f) const {
    detail::run_openmp(threads_, n, f);
  }

 private:
  int threads_;
};

SSMAX_END

#endif

SSMAX_BEGIN_CODE

#if defined(_OPENMP)
/// OpenMP in a unit compiled with OpenMP, Serial in others, so that `DefaultExecutor{}` needs no `#ifdef`. The two
/// kinds of units have different types: do not use it in an interface or an inline function that both kinds include.
using DefaultExecutor = OpenMP;
#else
/// OpenMP in a unit compiled with OpenMP, Serial in others, so that `DefaultExecutor{}` needs no `#ifdef`. The two
/// kinds of units have different types: do not use it in an interface or an inline function that both kinds include.
using DefaultExecutor = Serial;
#endif

SSMAX_END
/// @}

#if SSMAX_HAS_THREADS

SSMAX_BEGIN_DETAIL

inline void make_team(shared::TeamState& team, index_t nth) {
  if (nth < 1) fail_value("SpmdTeam", "nth", "is", nth, "must be at least", 1);
  if (nth > max_concurrency) fail_value("SpmdTeam", "nth", "is", nth, "must be at most", max_concurrency);
  team.entered.resize(static_cast<std::size_t>(nth));
}

inline void check_member(index_t ith, index_t nth) {
  if (ith >= 0 && ith < nth) return;
  fail_format("ssmax::Spmd: ith is %td, nth is %td: ith must be at least 0 and less than nth", ith, nth);
}

inline void check_leader(index_t ith, index_t nth) {
  if (ith == 0) return;
  fail_format("ssmax::Spmd: ith is %td, nth is %td: only the leader, ith 0, calls run; enter by lead_or_help",
              ith, nth);
}

SSMAX_END

/// @addtogroup spmd
/// @{
SSMAX_BEGIN_DATA

/// The state that the threads of a team share. You can neither copy nor move a team. It must outlive all calls of
/// `lead_or_help`.
class SpmdTeam {
 public:
  /// Makes a team of `nth` threads. Throws std::invalid_argument unless nth is between 1 and 4096. Allocates 8 bytes
  /// per thread.
  SSMAX_INLINE explicit SpmdTeam(index_t nth) { detail::make_team(state_, nth); }
  /// Deleted.
  SpmdTeam(const SpmdTeam&) = delete;
  /// Deleted.
  SpmdTeam& operator=(const SpmdTeam&) = delete;
  SSMAX_INLINE ~SpmdTeam() = default;

  /// Returns the number of threads.
  SSMAX_INLINE index_t concurrency() const { return static_cast<index_t>(state_.entered.size()); }

 private:
  friend class Spmd;
  shared::TeamState state_;
};

/// An executor for thread `ith` of a team. Make one in every thread, for each call or for all calls.
class Spmd {
 public:
  /// Throws std::invalid_argument unless ith is at least 0 and less than the team's number of threads.
  SSMAX_INLINE Spmd(SpmdTeam& team, index_t ith) : team_(team), ith_(ith) {
    detail::check_member(ith, team.concurrency());
  }

  /// Executes `call` if ith is 0. Otherwise makes calls of the leader's runs until the leader's `call` has ended.
  /// Does not allocate. A call must not contain another `lead_or_help` of the same team.
  template <class F>
  SSMAX_INLINE void lead_or_help(F&& call) const {
    if (ith_ != 0) return detail::help(team_.state_, ith_);
    const detail::LeaderCall ends_at_return(team_.state_);
    call();
  }

  /// Returns the number of threads of the team.
  SSMAX_INLINE index_t concurrency() const { return team_.concurrency(); }

  /// Calls f(0) … f(n-1) on the leader and on the helpers that have entered. Throws std::invalid_argument if ith is
  /// not 0. A run inside a call, of this team or of a ThreadPool, is made by the calling thread only. If calls throw,
  /// the team makes the other calls and then throws one of the exceptions. Does not allocate.
  template <class F>
  SSMAX_INLINE void run(index_t n, const F& f) const {
    detail::check_leader(ith_, concurrency());
    if (n <= 0) return;
    detail::GuardedCalls<F> guarded(f);
    shared::SharedCalls calls{&detail::GuardedCalls<F>::call, &guarded, n};
    detail::run_on(team_.state_, calls);
    guarded.rethrow();
  }

 private:
  SpmdTeam& team_;
  index_t ith_;
};

SSMAX_END
/// @}
#endif
