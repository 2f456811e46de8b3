// Rows of every size inside of larger buffers, and the formats that they are stored in.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <ssmax/half.hpp>
#include <ssmax/view.hpp>
#include <vector>

#include "reference.hpp"

namespace guarded_rows {

using namespace ssmax;
using reference::Real;
using reference::worse;

inline constexpr std::array<index_t, 25> sizes{0,  1,  2,  3,  5,   7,   8,   9,   13,   15,   16,   17,   31,
                                               33, 63, 64, 65, 100, 127, 255, 257, 1000, 1021, 4099, 65537};

/// A storage type: its significant bits, and the exponent of its smallest subnormal.
template <class ComputeType, class BitsType, int significant, int exponent>
struct FormatOf {
  using Compute = ComputeType;
  using Bits = BitsType;
  static constexpr int digits = significant, smallest = exponent;
};
template <class T>
struct Format;
template <>
struct Format<float> : FormatOf<float, std::uint32_t, 24, -149> {};
template <>
struct Format<double> : FormatOf<double, std::uint64_t, 53, -1074> {};
template <>
struct Format<half> : FormatOf<float, std::uint16_t, 11, -24> {};
template <>
struct Format<bfloat16> : FormatOf<float, std::uint16_t, 8, -133> {};

template <class T>
using Compute = typename Format<T>::Compute;

/// The distance of two neighbours of T around value.
template <class T>
Real ulp(Real value) {
  if (value == 0) return std::ldexp(Real(1), Format<T>::smallest);
  return std::ldexp(Real(1), std::max(std::ilogb(value) + 1 - Format<T>::digits, Format<T>::smallest));
}

template <class T>
auto bits(T value) {
  return std::bit_cast<typename Format<T>::Bits>(value);
}

/// Rows inside a larger buffer: an odd offset, gaps between the rows, and a sentinel wherever no row lies.
template <class T>
class Guarded {
 public:
  static constexpr index_t offset = 3, gap = 5;

  Guarded(index_t rows, index_t n) : rows_(rows), n_(n), storage_(size(rows, n), sentinel()) {}

  static T sentinel() { return reference::narrow<T>(-1234); }
  View<T, 2> view() { return {storage_.data() + offset, {rows_, n_}, {n_ + gap, 1}}; }
  View<const T, 2> constant() { return view(); }
  std::span<T> row(index_t r) {
    return std::span<T>(storage_).subspan(static_cast<std::size_t>(offset + r * (n_ + gap)),
                                          static_cast<std::size_t>(n_));
  }
  void fill(const std::vector<T>& values) {
    for (index_t r = 0; r < rows_; ++r) {
      std::copy_n(values.begin() + r * n_, n_, row(r).begin());
    }
  }
  std::vector<T> values() {
    std::vector<T> result;
    for (index_t r = 0; r < rows_; ++r) result.insert(result.end(), row(r).begin(), row(r).end());
    return result;
  }
  bool guards_untouched() const {
    for (index_t i = 0; i < static_cast<index_t>(storage_.size()); ++i) {
      const index_t in_row = (i - offset) % (n_ + gap);
      const bool inside = i >= offset && in_row < n_;
      if (!inside && bits(storage_[static_cast<std::size_t>(i)]) != bits(sentinel())) return false;
    }
    return true;
  }

 private:
  static std::size_t size(index_t rows, index_t n) {
    return static_cast<std::size_t>(offset + rows * (n + gap));
  }

  index_t rows_, n_;
  std::vector<T> storage_;
};

/// Enough rows that the naive loop's largest error over them is no matter of luck.
inline index_t rows_for(index_t n) { return n > 2000 ? 2 : n > 100 ? 12 : 48; }

template <class T>
std::vector<T> logits_for(index_t n, double deviation = 2) {
  return reference::normals<T>(static_cast<std::size_t>(n * rows_for(n)), static_cast<unsigned>(n + 1),
                               deviation);
}

}  // namespace guarded_rows
