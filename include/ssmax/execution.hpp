/// @defgroup execution Executors (execution.hpp)
/// Executors: who makes the calls that a function splits its work into.
///
/// | executor | who it is |
/// |---|---|
/// | Serial | the caller, one call after the other; what every function uses unless told otherwise |
/// | ThreadPool | the caller and threads that sleep between runs; only where the platform has std::thread |
/// | OpenMP | an OpenMP team; only in units compiled with OpenMP |
/// | DefaultExecutor | OpenMP in units compiled with OpenMP, Serial in others |
///
/// One's own is a class with `concurrency()` and `run(n, f)`, for instance around the pool
/// that a program has already:
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
/// The executors are data that any two units may exchange, a ThreadPool too: their members are inlined, and
/// what is compiled to code lies behind them, in detail/threads.
#pragma once

#include <algorithm>
#include <concepts>
#include <type_traits>

#include "config.hpp"
#include "detail/checks/error.hpp"
#include "detail/threads/guarded_calls.hpp"

#if SSMAX_HAS_THREADS
#include "detail/threads/pool.hpp"
#endif

#if defined(_OPENMP)
#include <omp.h>

#include <limits>
#endif

/// @addtogroup execution
/// @{
SSMAX_BEGIN_DATA
namespace shared {

/// Stands for whatever run may be given.
struct SomeCall {
  void operator()(index_t index) const;
};

}  // namespace shared

/// A type that makes a function's calls. `concurrency()` is how many of them run at once at most; below 1
/// counts as 1, above 4096 as 4096. `run(n, f)` calls f(0) … f(n-1), each once, in any order and on any
/// threads; n may be 0. It returns when all have ended and what they wrote can be read. The calls do not wait
/// for each other. An exception of a call should reach the caller of run, once no call runs any more.
template <class E>
concept Executor = requires(std::remove_reference_t<E>& executor, index_t n, const shared::SomeCall& f) {
  { executor.concurrency() } -> std::convertible_to<index_t>;
  executor.run(n, f);
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// How many calls at once a function cuts its work for, each with memory of its own. No machine runs more.
inline constexpr index_t most_concurrency = 4096;

template <class E>
index_t threads_of(E& executor) {
  return std::clamp<index_t>(static_cast<index_t>(executor.concurrency()), 1, most_concurrency);
}

SSMAX_END

SSMAX_BEGIN_DATA

/// Makes the calls in order. An exception ends the run at once.
struct Serial {
  /// 1.
  SSMAX_INLINE constexpr index_t concurrency() const { return 1; }

  /// f(0), f(1) … f(n-1).
  template <class F>
  SSMAX_INLINE constexpr void run(index_t n, const F& f) const {
    for (index_t i = 0; i < n; ++i) f(i);
  }
};

#if SSMAX_HAS_THREADS

/// `threads` threads, at least 1, of which the caller of run is one. Between runs the others sleep.
///
/// Runs from several threads take turns. A run from inside a call, of this pool or of another, is made by the
/// thread that asks for it, alone; a call must not wait for a run of another thread, whose turn may never
/// come. If calls throw, the others are still made, then one of the exceptions is thrown. run does not
/// allocate. A pool can be neither copied nor moved, and must outlive its runs. (Where the C library keeps
/// threads in a library of their own, as glibc did before 2.34, link it; in CMake ssmax::ssmax does.)
class ThreadPool {
 public:
  /// Throws std::invalid_argument if threads < 1, std::system_error if the system gives no more threads;
  /// those it gave are then joined.
  SSMAX_INLINE explicit ThreadPool(index_t threads) : ThreadPool() { detail::start_workers(state_, threads); }
  /// Not copied.
  ThreadPool(const ThreadPool&) = delete;
  /// Not copied.
  ThreadPool& operator=(const ThreadPool&) = delete;
  /// Ends the threads and waits for them.
  SSMAX_INLINE ~ThreadPool() { detail::end_workers(state_); }

  /// The number of threads, the caller of run among them.
  SSMAX_INLINE index_t concurrency() const { return static_cast<index_t>(state_.workers.size()) + 1; }

  /// f(0) … f(n-1), by all threads of the pool.
  template <class F>
  SSMAX_INLINE void run(index_t n, const F& f) {
    if (n <= 0) return;
    detail::GuardedCalls<F> guarded(f);
    shared::SharedCalls calls{&detail::GuardedCalls<F>::call, &guarded, n};
    detail::run_on(state_, calls);
    guarded.rethrow();
  }

 private:
  // Once this one has ended, the destructor joins the threads of a constructor that throws.
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

/// At most `threads` threads of OpenMP's, at least 1; by default as many as OpenMP says (OMP_NUM_THREADS).
/// Whether they spin after a run is OpenMP's affair (OMP_WAIT_POLICY), as is what a run inside a parallel
/// region gets. Exceptions as in ThreadPool.
class OpenMP {
 public:
  /// Throws std::invalid_argument if threads < 1, or more than an int counts.
  SSMAX_INLINE explicit OpenMP(index_t threads = omp_get_max_threads())
      : threads_(static_cast<int>(threads)) {
    detail::check_openmp(threads);
  }

  /// The number of threads.
  SSMAX_INLINE index_t concurrency() const { return threads_; }

  /// f(0) … f(n-1), by a team of OpenMP's.
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
/// OpenMP in a unit compiled with OpenMP, Serial in others, so that `DefaultExecutor{}` needs no `#ifdef`. It names
/// another type in each kind of unit: do not put it into an interface or an inline function that both kinds include.
using DefaultExecutor = OpenMP;
#else
/// OpenMP in a unit compiled with OpenMP, Serial in others, so that `DefaultExecutor{}` needs no `#ifdef`. It names
/// another type in each kind of unit: do not put it into an interface or an inline function that both kinds include.
using DefaultExecutor = Serial;
#endif

SSMAX_END
/// @}
