// Declares the kernels that drop weights of attention, and the random bits that they use: Philox-4x32-10 of Salmon,
// Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
#pragma once

#include <array>
#include <cstdint>

#include "../../half.hpp"
#include "lanes.hpp"

SSMAX_BEGIN_SHARED

/// Number of neighbouring keys whose weights take the 128 bits of one counter, 16 bits each.
inline constexpr index_t dropped_keys = 8;

/// The source of the random bits of one vector of queries. The counter of a lane and of keys [8·i, 8·i + 8) is {i,
/// query, head, 0}.
struct DropLanes {
  const std::uint32_t *query, *head;  // per lane
  std::uint32_t key[2];               // of the sequence
  std::uint32_t threshold;            // a weight whose 16 bits are below it is dropped
};

template <class T>
struct DropoutKernels {
  /// Computes x[i][·] = dropped ? 0 : x[i][·] · factor for keys [first, first + keys) of one vector. The next row is
  /// `group` numbers later.
  void (*drop)(T* x, index_t group, index_t first, index_t keys, const DropLanes& lanes, T factor);
};

/// The kernel of the bf16 path.
struct PairDropoutKernels {
  /// Sets dropped numbers in pairs of keys to 0: [key/2][group][2], from an even key on.
  void (*clear)(bfloat16* x, index_t group, index_t first, index_t keys, const DropLanes& lanes);
};

SSMAX_END

SSMAX_BEGIN_DETAIL

inline constexpr std::uint32_t philox_factor[] = {0xD2511F53, 0xCD9E8D57};
inline constexpr std::uint32_t philox_step[] = {0x9E3779B9, 0xBB67AE85};  // of the key, from round to round

/// Returns four random words.
constexpr std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter,
                                              std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{philox_factor[0]} * counter[0],
                        b = std::uint64_t{philox_factor[1]} * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key = {key[0] + philox_step[0], key[1] + philox_step[1]};
  }
  return counter;
}

SSMAX_END

#define SSMAX_KERNELS "../kernels/dropout.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
