// Holds the calls of one run, which several threads take one by one.
//
// The struct is data with the same layout in every unit. The functions are compiled anew for each set of
// flags.
#pragma once

#include <atomic>
#include <utility>

#include "../../config.hpp"

SSMAX_BEGIN_DATA
namespace shared {  // the name `detail` would hide the code namespace's detail

/// The calls 0 … n-1 of a run. `next` is the first call that is not taken.
struct SharedCalls {
  void (*call)(void* context, index_t index) noexcept;
  void* context;
  index_t n;
  std::atomic<index_t> next{0};
};

/// True while this thread is inside a call of a run. The whole program has one such variable per thread, even
/// if libraries hide their symbols, so that nested runs are detected across libraries.
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
