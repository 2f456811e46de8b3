// A user's storage type of 8 bits with a factor per row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <ssmax/storage.hpp>

/// Integers that a factor of the row multiplies. NaN has the number -128.
struct OwnInt8 {
  std::int8_t value;
  OwnInt8() = default;
  explicit OwnInt8(float x) : value(x == x ? static_cast<std::int8_t>(std::lrint(x)) : std::int8_t{-128}) {}
};

template <>
struct ssmax::StorageTraits<OwnInt8> {
  using Compute = float;
  static void load(const OwnInt8* in, index_t n, float* out) {
    for (index_t i = 0; i < n; ++i) {
      out[i] = in[i].value == -128 ? std::numeric_limits<float>::quiet_NaN() : in[i].value;
    }
  }
  static void store(const float* in, index_t n, OwnInt8* out) {
    for (index_t i = 0; i < n; ++i) out[i] = OwnInt8(in[i]);
  }
  static float scale(const float* in, index_t n) {
    float largest = 1e-30f;
    for (index_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(in[i]));
    return largest / 127;
  }
};
