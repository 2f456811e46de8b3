// One block of memory, cut into aligned pieces.
#pragma once

#include <cstddef>
#include <limits>

#include "../../config.hpp"

SSMAX_BEGIN_DETAIL

/// a + b and a · b or, where these cannot be counted, more than any workspace gives.
constexpr std::size_t add_bytes(std::size_t a, std::size_t b) {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  return b <= most - a ? a + b : most;
}
constexpr std::size_t multiply_bytes(std::size_t a, std::size_t b) {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  const bool small = (a | b) >> std::numeric_limits<std::size_t>::digits / 2 == 0;  // no division
  return small || a <= most / b ? a * b : most;
}

/// Hands out aligned pieces of a block of memory, or, without one, counts what they would take.
class Arena {
 public:
  explicit Arena(std::byte* memory = nullptr) : memory_(memory) {}

  template <class U>
  U* take(index_t count) {
    const std::size_t at = used_;
    const std::size_t bytes = multiply_bytes(static_cast<std::size_t>(count), sizeof(U));
    used_ = add_bytes(used_, add_bytes(bytes, 63) / 64 * 64);
    return memory_ == nullptr ? nullptr : reinterpret_cast<U*>(memory_ + at);
  }
  [[nodiscard]] std::size_t used() const { return used_; }

 private:
  std::byte* memory_;
  std::size_t used_ = 0;
};

SSMAX_END
