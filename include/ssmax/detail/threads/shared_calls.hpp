// The calls of one run, which several threads take one by one.
//
// The struct is data, laid out alike in every unit; the functions are compiled anew for each set of flags.
#pragma once

#include <atomic>
#include <utility>

#include "../../config.hpp"

SSMAX_BEGIN_DATA
namespace shared {  // not `detail`, which would hide the one of the code namespace

/// Calls 0 … n-1, of which `next` is the first that nobody has taken.
struct SharedCalls {
  void (*call)(void* context, index_t index) noexcept;
  void* context;
  index_t n;
  std::atomic<index_t> next{0};
};

/// Whether this thread is inside a call of some run. One variable for the whole program, also where
/// libraries hide their symbols: nested runs must be found out across them.
[[gnu::visibility("default")]] inline constinit thread_local bool inside_shared_call = false;

}  // namespace shared

SSMAX_END

SSMAX_BEGIN_DETAIL

inline void take_calls(shared::SharedCalls& calls) {
  const bool outer = std::exchange(shared::inside_shared_call, true);
  for (;;) {
    const index_t index = calls.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= calls.n) break;
    calls.call(calls.context, index);
  }
  shared::inside_shared_call = outer;
}

SSMAX_END
