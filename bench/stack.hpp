// Where the stack lies. A kernel that spills vectors to a stack which it does not align runs as fast as
// chance allows: oneDNN 2.6.3 takes 0.48 or 0.67 ns per element for the same rows of 4096, and 1.2 where a
// spill crosses a page. Every implementation, ours too, is therefore timed at the place that suits it best.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "peers.hpp"

namespace ssmax_bench {

inline constexpr std::uintptr_t stack_page = 4096;

/// Calls `run` with the stack at a fixed distance from `offset` within a page, whoever calls.
[[gnu::noinline]] inline void call_at(std::uintptr_t offset, const Run& run) {
  const auto here = reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
  auto* gap = static_cast<volatile char*>(__builtin_alloca((here - offset) % stack_page + 16));
  gap[0] = 0;  // keeps the gap
  run();
}

/// The offset at which `run` is fastest: one of the four that an ABI of 16 bytes leaves open within a cache
/// line, in the middle of a page.
inline std::uintptr_t best_stack_offset(const Run& run) {
  using Clock = std::chrono::steady_clock;
  std::uintptr_t best = 0;
  auto best_time = std::chrono::nanoseconds::max();
  for (std::uintptr_t line = 0; line < 4; ++line) {
    const std::uintptr_t offset = stack_page / 2 + 16 * line;
    auto time = std::chrono::nanoseconds::max();
    const Clock::time_point begin = Clock::now();
    const auto elapsed = [begin] { return Clock::now() - begin; };
    for (int calls = 0; calls == 0 || elapsed() < std::chrono::milliseconds(calls < 3 ? 50 : 8); ++calls) {
      const Clock::time_point start = Clock::now();
      call_at(offset, run);
      time = std::min<std::chrono::nanoseconds>(time, Clock::now() - start);
    }
    if (time < best_time) {
      best_time = time;
      best = offset;
    }
  }
  return best;
}

}  // namespace ssmax_bench
