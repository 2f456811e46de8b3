// Computes one row of entmax, y = max(0, x - τ)^power with x = c·z / power and Σ y = 1, and its gradient.
//
// The threshold τ is the root of F(τ) = Σ max(0, x - τ)^power - 1 and is found without sorting:
// 1. F decreases and is convex. So a Newton step from either side ends at or below the root.
// 2. The support of a point is the set of elements above it. On a fixed support, F is a polynomial of degree
//    `power`, whose root is known exactly.
// 3. From a point below the root, the function tries the root of that polynomial, which reads the row once.
//    If both have the same support, the polynomial's root is the threshold.
// 4. Otherwise the next point is the highest known lower bound.
#pragma once

#include <algorithm>
#include <cmath>

#include "../kernels/entmax.hpp"
#include "backward.hpp"
#include "row.hpp"

SSMAX_BEGIN_DETAIL

/// Returns the step from a point to the root of F on the point's support, or NaN if F has no root there.
template <int power>
double step_to_root(const SupportSums& at) {
  if constexpr (power == 1) return (at.sum - 1) / at.count;
  const double excess = at.squares - 1;
  return excess / (at.sum + std::sqrt(at.sum * at.sum - at.count * excess));
}

template <int power>
double newton_step(const SupportSums& at) {
  return power == 1 ? (at.sum - 1) / at.count : (at.squares - 1) / (2 * at.sum);
}

template <class T>
Threshold<T> split_threshold(double t) {
  const T high = static_cast<T>(t);
  return {high, static_cast<T>(t - static_cast<double>(high))};
}

/// Returns τ - max x. look(t) returns the sums above max x + t.
template <int power, class Look>
double find_threshold(const Look& look) {
  constexpr int max_looks = 100;  // usually 5; more for rows whose sums cannot distinguish supports
  double t = -1;                  // lower bound, because y is at most 1
  SupportSums at = look(t);
  for (int looks = 0; looks < max_looks; ++looks) {
    const double root = t + step_to_root<power>(at);
    double next = t + newton_step<power>(at);
    if (!std::isnan(root)) {
      const SupportSums of_root = look(root);
      // Adds one more step: sums near the root are near 1 and have more exact digits than sums far above the
      // root.
      if (of_root.count == at.count) return root + step_to_root<power>(of_root);
      if (of_root.count > 0) {
        next = std::max(next, root + newton_step<power>(of_root));
        next = std::fmax(next, root + step_to_root<power>(of_root));
      }
    }
    if (!(next > t)) break;  // limit of precision
    t = next;
    at = look(t);
  }
  return t;
}

template <int power, class T, class X, class Y>
void entmax_row(const RowKernels<T>& rows, const EntmaxKernels<T>& kernels, const X* in, index_t n, double c,
                Y* out) {
  T scratch[row_block], staged[row_block];
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  if (!std::isfinite(c)) return fill_row(out, n, nan);
  RowSource<T, X> source(rows, in, n, c);
  const RowKind kind = source.rebase(scratch);
  if (kind == RowKind::masked) return fill_row(out, n, 0.0f);
  if (kind != RowKind::regular) return fill_row(out, n, nan);
  // Multiplier of the blocks, which hold direction·(z - origin): see Multiplier.
  const auto scale = static_cast<T>(std::clamp(std::abs(c) / Multiplier<T>::unit_of(c),
                                               static_cast<double>(std::numeric_limits<T>::min()),
                                               static_cast<double>(std::numeric_limits<T>::max()) / 4) /
                                    power);
  const bool is_block = n <= row_block;
  const T* const whole = is_block ? source.block(0, n, scratch) : nullptr;
  const auto for_each_block = [&](const auto& f) {
    for (index_t begin = 0; begin < n; begin += row_block) {
      const index_t count = std::min(row_block, n - begin);
      f(begin, count, is_block ? whole : source.block(begin, count, scratch));
    }
  };
  const double t = find_threshold<power>([&](double at) {
    SupportSums total{};
    for_each_block([&](index_t, index_t count, const T* x) {
      const SupportSums block = kernels.above(x, count, scale, split_threshold<T>(at));
      total = {total.count + block.count, total.sum + block.sum, total.squares + block.squares};
    });
    return total;
  });
  for_each_block([&](index_t begin, index_t count, const T* x) {
    T* to = staging<T>(out + begin, staged);
    kernels.store[power - 1](x, count, scale, split_threshold<T>(t), to);
    narrow_to<T>(out + begin, count, to);
  });
}

/// Writes dz = c·u with u = w ⊙ (dy - ⟨w, dy⟩ / Σ w) and w = y^(1 - 1/power). Returns ⟨u, z⟩, or 0 if z is
/// null. dz may be dy or y.
template <int power, class T, class X>
double entmax_row_gradient(const EntmaxKernels<T>& kernels, const X* y, const X* dy, const X* z, index_t n,
                           const GradientFactor<T>& factor, X* dz) {
  T y_scratch[row_block], dy_scratch[row_block], z_scratch[row_block], dz_scratch[row_block];
  double sum = 0, weighed = 0;
  for (index_t begin = 0; begin < n; begin += row_block) {
    const index_t count = std::min(row_block, n - begin);
    const WeightSums block = kernels.weigh[power - 1](widened<T>(y + begin, count, y_scratch),
                                                      widened<T>(dy + begin, count, dy_scratch), count);
    sum += block.weights;
    weighed += block.weighed;
  }
  const double mean = sum == 0 ? 0 : weighed / sum;
  double dc = 0;
  for (index_t begin = 0; begin < n; begin += row_block) {
    const index_t count = std::min(row_block, n - begin);
    T* to = staging<T>(dz + begin, dz_scratch);
    dc += static_cast<double>(kernels.backward[power - 1](
        widened<T>(y + begin, count, y_scratch), widened<T>(dy + begin, count, dy_scratch),
        z == nullptr ? nullptr : widened<T>(z + begin, count, z_scratch), count, static_cast<T>(mean),
        factor.factor(), to));
    factor.finish(to, count);
    narrow_to<T>(dz + begin, count, to);
  }
  return dc;
}

SSMAX_END
