// AMX-BF16 in plain loops: eight tiles of 1 KiB for each thread, under the intrinsics' own names. Only those of
// detail/simd/amx.inl, and only for tests. As the unit does it, subnormal numbers are 0 on their way in and out,
// the products of even places and those of odd ones are summed apart from 0, and both are added to C. What would
// trap or stop a program (no configuration, a tile that is larger than it) aborts.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulation.hpp"

namespace emulated_amx {

struct Tiles {
  bool configured = false;
  std::array<std::array<std::uint8_t, 1024>, 8> bytes{};
};

inline Tiles& tiles() {
  thread_local Tiles own;
  return own;
}

inline std::uint8_t* tile(int number) {
  if (!tiles().configured) {
    std::fprintf(stderr, "emulated_amx: tile %d without a configuration\n", number);
    std::abort();
  }
  return tiles().bytes[static_cast<std::size_t>(number)].data();
}

inline void configure(const void* configuration) {
  const auto* bytes = static_cast<const std::uint8_t*>(configuration);
  bool whole = bytes[0] == 1 && bytes[1] == 0;
  for (int i = 0; i < 8; ++i) {
    whole = whole && bytes[16 + 2 * i] == 64 && bytes[17 + 2 * i] == 0 && bytes[48 + i] == 16;
  }
  if (!whole || tiles().configured) {
    std::fprintf(stderr, "emulated_amx: not eight whole tiles, or not released before\n");
    std::abort();
  }
  static const int said = std::fprintf(stderr, "emulated_amx: AMX is emulated here\n");
  static_cast<void>(said);
  tiles() = {};
  tiles().configured = true;
}

inline void release() { tiles() = {}; }

inline void load(int number, const void* from, std::ptrdiff_t stride) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(tile(number) + row * 64, static_cast<const char*>(from) + row * stride, 64);
  }
}

inline void store(int number, void* to, std::ptrdiff_t stride) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, tile(number) + row * 64, 64);
  }
}

inline float flushed(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return std::bit_cast<float>((bits & 0x7F800000u) == 0 ? bits & 0x80000000u : bits);
}

/// Products of two of these are exact: a multiply and an add round as a fused step does.
inline float widened(std::uint32_t bits) { return flushed(std::bit_cast<float>(bits << 16)); }

inline void dot(int c_number, int a_number, int b_number) {
  emulation::meet(emulation::tile_product, ssmax::Target::amx);
  float c[16][16];
  std::uint16_t a[16][32];
  std::uint32_t b[16][16];  // pairs
  std::memcpy(c, tile(c_number), sizeof(c));
  std::memcpy(a, tile(a_number), sizeof(a));
  std::memcpy(b, tile(b_number), sizeof(b));
  for (int m = 0; m < 16; ++m) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < 16; ++k) {
      const float a_even = widened(a[m][2 * k]), a_odd = widened(a[m][2 * k + 1]);
      for (int n = 0; n < 16; ++n) {
        even[n] = flushed(even[n] + a_even * widened(b[k][n] & 0xFFFFu));
        odd[n] = flushed(odd[n] + a_odd * widened(b[k][n] >> 16));
      }
    }
    for (int n = 0; n < 16; ++n) c[m][n] = flushed(flushed(c[m][n]) + flushed(even[n] + odd[n]));
  }
  std::memcpy(tile(c_number), c, sizeof(c));
}

}  // namespace emulated_amx

#define _tile_loadconfig(configuration) emulated_amx::configure(configuration)
#define _tile_release() emulated_amx::release()
#define _tile_zero(number) std::memset(emulated_amx::tile(number), 0, 1024)
#define _tile_loadd(number, from, stride) emulated_amx::load(number, from, stride)
#define _tile_stored(number, to, stride) emulated_amx::store(number, to, stride)
#define _tile_dpbf16ps(c, a, b) emulated_amx::dot(c, a, b)
