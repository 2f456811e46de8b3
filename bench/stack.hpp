// Chooses the alignment of the stack for a timed call. The speed of a kernel that spills vectors to an unaligned stack
// depends on this alignment. oneDNN 2.6.3 takes 0.48 or 0.67 ns per element for the same rows of 4096, and 1.2 ns where a
// spill crosses a page. Every implementation, including ours, is timed at its fastest alignment. Exception: long calls
// (measure.hpp) use one fixed alignment.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "peers.hpp"

namespace ssmax_bench {

inline constexpr std::uintptr_t stack_page = 4096;

/// Calls `run` with the stack at a fixed distance from `offset` within a page, for any caller.
[[gnu::noinline]] inline void call_at(std::uintptr_t offset, const Run& run) {
  const auto here = reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
  auto* gap = static_cast<volatile char*>(__builtin_alloca((here - offset) % stack_page + 16));
  gap[0] = 0;  // so that the compiler keeps the gap
  run();
}

/// Returns the offset at which `run` is fastest. An ABI aligns the stack to 16 bytes. The candidates are the four multiples
/// of 16 bytes within a cache line, in the middle of a page.
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
