/// @defgroup spmd Teams of your threads (spmd.hpp)
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

#include "config.hpp"
#include "detail/checks/error.hpp"
#include "detail/threads/guarded_calls.hpp"
#include "execution.hpp"

#if SSMAX_HAS_THREADS
#include "detail/threads/team.hpp"

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
