// Computes rows and the rotary embedding in long double, and the errors of results against them.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "peers.hpp"

namespace ssmax_bench {

// The largest error of a result, relative or absolute as the comparison states. `acceptable` is true for a rounding error,
// and false for a wrong result.
struct Accuracy {
  double error = 0;
  bool acceptable = true;
};

// Accepts the error of a float sum of n terms in order: n roundings. A larger error shows a wrong function.
inline Accuracy judge(double error, index_t n) {
  return {error, error <= 2e-5 + 0x1p-24 * static_cast<double>(n)};  // false for NaN
}

// Returns the larger of two errors. NaN is larger than any number.
template <class T>
T worse(T a, T b) {
  return std::isnan(a) || a > b ? a : b;
}

// Returns the rows to compare: all rows of a small block. For a large block: the first, the last, and rows evenly between.
inline std::vector<index_t> rows_to_compare(RowsShape shape) {
  const index_t count =
      std::clamp((index_t{1} << 20) / shape.n, std::min<index_t>(2, shape.rows), shape.rows);
  std::vector<index_t> rows;
  for (index_t i = 0; i < count; ++i) rows.push_back(count == 1 ? 0 : i * (shape.rows - 1) / (count - 1));
  return rows;
}

// Returns the largest relative error of y = softmax(multiplier x).
inline Accuracy compare_rows(const RowsArguments& a, double multiplier) {
  double error = 0;
  std::vector<long double> exact(static_cast<std::size_t>(a.shape.n));
  for (index_t row : rows_to_compare(a.shape)) {
    const float* x = a.x + row * a.shape.n;
    const float* y = a.y + row * a.shape.n;
    long double max = multiplier * static_cast<long double>(x[0]);
    for (index_t i = 0; i < a.shape.n; ++i) max = std::max(max, multiplier * static_cast<long double>(x[i]));
    long double sum = 0;
    for (std::size_t i = 0; i < exact.size(); ++i) {
      exact[i] = std::exp(multiplier * static_cast<long double>(x[i]) - max);
      sum += exact[i];
    }
    for (std::size_t i = 0; i < exact.size(); ++i) {
      const double relative = static_cast<double>(std::abs(y[i] - exact[i] / sum) / (exact[i] / sum));
      error = worse(error, relative);
    }
  }
  return judge(error, a.shape.n);
}

// Returns the largest error of dz = multiplier y (dy - sum(y dy)), relative to the largest gradient of the row: single
// gradients can cancel.
inline Accuracy compare_rows_backward(const RowsBackwardArguments& a, double multiplier) {
  double error = 0;
  for (index_t row : rows_to_compare(a.shape)) {
    const float* y = a.y + row * a.shape.n;
    const float* dy = a.dy + row * a.shape.n;
    const float* dz = a.dz + row * a.shape.n;
    long double dot = 0;
    for (index_t i = 0; i < a.shape.n; ++i) dot += static_cast<long double>(y[i]) * dy[i];
    long double largest = 0;
    long double off = 0;
    for (index_t i = 0; i < a.shape.n; ++i) {
      const long double exact = multiplier * static_cast<long double>(y[i]) * (dy[i] - dot);
      largest = std::max(largest, std::abs(exact));
      off = worse(off, std::abs(dz[i] - exact));
    }
    error = worse(error, static_cast<double>(off / largest));
  }
  return judge(error, a.shape.n);
}

// Returns the largest error of a rotated pair, relative to the length of the pair. The angle is position times
// 10000^(-2 i / width), from the default frequencies.
inline Accuracy compare_rope(const RopeArguments& a) {
  double error = 0;
  const index_t half = a.width / 2;
  for (index_t position = 0; position < a.positions; position += 61) {
    for (index_t i = 0; i < half; ++i) {
      const long double angle =
          static_cast<long double>(position) *
          std::pow(10'000.0L, -2.0L * static_cast<long double>(i) / static_cast<long double>(a.width));
      const long double cosine = std::cos(angle);
      const long double sine = std::sin(angle);
      const bool split = a.pairing == RopePairing::half_split;
      for (index_t head = 0; head < a.heads; ++head) {
        const index_t at = (head * a.positions + position) * a.width;
        const index_t first = at + (split ? i : 2 * i);
        const index_t second = at + (split ? i + half : 2 * i + 1);
        const long double x0 = a.x[first];
        const long double x1 = a.x[second];
        const long double off =
            std::hypot(a.y[first] - (x0 * cosine - x1 * sine), a.y[second] - (x1 * cosine + x0 * sine));
        error = worse(error, static_cast<double>(off / std::hypot(x0, x1)));
      }
    }
  }
  return judge(error, 1);
}

}  // namespace ssmax_bench
