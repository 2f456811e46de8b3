/// @defgroup spmd Teams of your threads (spmd.hpp)
/// `Spmd`: an executor for programs that own their threads. It starts no thread.
///
/// All threads of the program's team execute the same statements. Each thread knows its number `ith` and the number
/// of threads `nth`, as in ggml:
///
///     ssmax::SpmdTeam team(nth);  // one, shared by the threads
///
///     // In every thread:
///     ssmax::Spmd executor(team, ith);
///     executor.lead_or_help([&] { ssmax::attention<float>(arguments, scaling, mask, options, executor); });
///
/// Thread 0 is the leader: it executes the function. The other threads are helpers: a helper makes calls of the
/// leader's runs until the leader's function has ended.
///
/// - **Input**: the inputs must be complete when the leader enters. `lead_or_help` does not wait for the helpers.
/// - **Output**: a thread that has returned from `lead_or_help` may read what the function wrote. No barrier is needed
///   after it, and the threads may enter the next call at once.
/// - **Late helpers**: a helper that comes late finds fewer calls or no call, and returns. The leader finishes alone
///   if no helper comes.
/// - **Number of calls**: every helper enters as many times as the leader. A helper that enters once more waits
///   for the leader. A helper that has entered less often no longer helps, since the leader is ahead.
/// - **Exceptions**: an exception that leaves the function frees the helpers and is thrown in the leader only. An
///   exception of a task reaches the leader, as with `ThreadPool`.
/// - **Waiting**: a thread that waits looks a few hundred times, giving way to other threads, and then sleeps.
///
/// Results are bit-identical to those of every other executor. Only where the platform has std::thread.
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
  if (nth > most_concurrency) fail_value("SpmdTeam", "nth", "is", nth, "must be at most", most_concurrency);
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

/// What the threads of a team share. A team can be neither copied nor moved, and must outlive all `lead_or_help`.
class SpmdTeam {
 public:
  /// A team of `nth` threads. Throws std::invalid_argument unless nth is between 1 and 4096. Allocates 8 bytes per
  /// thread.
  SSMAX_INLINE explicit SpmdTeam(index_t nth) { detail::make_team(state_, nth); }
  /// Not copied.
  SpmdTeam(const SpmdTeam&) = delete;
  /// Not copied.
  SpmdTeam& operator=(const SpmdTeam&) = delete;
  SSMAX_INLINE ~SpmdTeam() = default;

  /// The number of threads.
  SSMAX_INLINE index_t concurrency() const { return static_cast<index_t>(state_.entered.size()); }

 private:
  friend class Spmd;
  shared::TeamState state_;
};

/// Thread `ith` of a team, as an executor. Make one in every thread, for each call or for all calls.
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

  /// The number of threads of the team.
  SSMAX_INLINE index_t concurrency() const { return team_.concurrency(); }

  /// f(0) … f(n-1), by the leader and the helpers that have come. Throws std::invalid_argument if ith is not 0.
  /// A run from inside a call, of this team or of a ThreadPool, is made by the thread that asks for it, alone.
  /// If calls throw, the others are still made, then one of the exceptions is thrown. Does not allocate.
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
