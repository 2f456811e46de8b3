// Bitmaps in words of 64 bits. Bit i is bit i % 64 of word i / 64.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "../../config.hpp"

SSMAX_BEGIN_DETAIL

/// Returns whether a bit is set.
SSMAX_INLINE constexpr bool has_bit(const std::uint64_t* words, index_t bit) {
  return (words[bit / 64] >> (bit % 64) & 1) != 0;
}

/// Returns the first bit of [from, end) that is set in the words xored with `flip`, or else `end`.
SSMAX_INLINE constexpr index_t next_bit(const std::uint64_t* words, index_t from, index_t end,
                                        std::uint64_t flip) {
  if (from >= end) return end;
  index_t i = from / 64;
  std::uint64_t word = (words[i] ^ flip) & (~std::uint64_t{0} << (from % 64));
  while (word == 0) {
    if (++i > (end - 1) / 64) return end;
    word = words[i] ^ flip;
  }
  return std::min(i * 64 + static_cast<index_t>(std::countr_zero(word)), end);
}

SSMAX_END
