// The shape and the memory of a planned call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <ssmax/plan.hpp>
#include <vector>

#include "attention_problem.hpp"

namespace attention_problem {

inline ssmax::AttentionShape shape_of(const Shape& s) {
  return {.batch = s.batch,
          .heads = s.heads,
          .kv_heads = s.kv_heads,
          .queries = s.queries,
          .keys = s.keys,
          .width = s.d,
          .value_width = s.dv};
}

/// Memory of exactly the given size, followed by bytes that must not change.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes) : bytes_(bytes), memory_(bytes + 128, std::byte{0x5A}) {
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

}  // namespace attention_problem
