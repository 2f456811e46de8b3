// Divides one block of memory into aligned parts.
#pragma once

#include <cstddef>
#include <limits>

#include "../../config.hpp"

SSMAX_BEGIN_DETAIL

/// Returns a + b or a · b. Exception: returns the largest std::size_t on overflow, which no workspace can
/// hold.
constexpr std::size_t add_bytes(std::size_t a, std::size_t b) {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  return b <= most - a ? a + b : most;
}
constexpr std::size_t multiply_bytes(std::size_t a, std::size_t b) {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  const bool small = (a | b) >> std::numeric_limits<std::size_t>::digits / 2 == 0;  // avoids the division
  return small || a <= most / b ? a * b : most;
}

/// An allocator of aligned parts of one block. Without a block it counts the bytes that the parts need.
class Arena {
 public:
  explicit Arena(std::byte* memory = nullptr) : memory_(memory) {}

  template <class U>
  U* take(index_t count) {
    return reinterpret_cast<U*>(take(count, sizeof(U)));
  }
  std::byte* take(index_t count, index_t element_bytes) {
    const std::size_t at = used_;
    const std::size_t bytes =
        multiply_bytes(static_cast<std::size_t>(count), static_cast<std::size_t>(element_bytes));
    used_ = add_bytes(used_, add_bytes(bytes, 63) / 64 * 64);
    return memory_ == nullptr ? nullptr : memory_ + at;
  }
  [[nodiscard]] std::size_t used() const { return used_; }

 private:
  std::byte* memory_;
  std::size_t used_ = 0;
};

SSMAX_END
