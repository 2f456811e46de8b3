// Memory of an exact size, for a plan or a workspace.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// Memory of exactly the given size, followed by bytes that must not change.
class GuardedMemory {
 public:
  explicit GuardedMemory(std::size_t bytes) : bytes_(bytes), memory_(bytes + 128, std::byte{0x5A}) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    begin_ = memory_.data() + (64 - address % 64) % 64;
  }
  std::span<std::byte> span() const { return {begin_, bytes_}; }
  bool is_intact() const {
    return std::all_of(begin_ + bytes_, begin_ + bytes_ + 64,
                       [](std::byte b) { return b == std::byte{0x5A}; });
  }

 private:
  std::size_t bytes_;
  std::vector<std::byte> memory_;
  std::byte* begin_;
};
