// Gradients against finite differences, in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

namespace gradcheck {

/// d loss() / d parameters, by central differences over five points: (f(-2h) - 8 f(-h) + 8 f(h) - f(2h)) /
/// 12h. With h = 3e-4 truncation (h^4 f''''' / 30) and rounding (1e-16 f / h) both stay below 1e-10 for the
/// losses here, three digits under the 1e-7 that is asked of the gradients.
template <class Loss>
std::vector<double> finite_differences(std::span<double> parameters, Loss loss) {
  constexpr double h = 3e-4;
  std::vector<double> gradient;
  for (double& parameter : parameters) {
    const double center = parameter;
    const auto at = [&](double step) {
      parameter = center + step;
      return loss();
    };
    gradient.push_back((at(-2 * h) - at(2 * h) + 8 * (at(h) - at(-h))) / (12 * h));
    parameter = center;
  }
  return gradient;
}

/// The largest difference relative to the larger of the pair, where values below a thousandth of the largest
/// count as that large: differences cannot resolve them. Zero against zero is 0; NaN anywhere is infinite.
inline double relative_error(std::span<const double> analytic, std::span<const double> numeric) {
  if (analytic.size() != numeric.size()) return std::numeric_limits<double>::infinity();
  double scale = 0;
  for (const double value : numeric) scale = std::max(scale, std::abs(value));
  double worst = 0;
  for (std::size_t i = 0; i < analytic.size(); ++i) {
    const double difference = std::abs(analytic[i] - numeric[i]);
    if (difference == 0) continue;
    const double size = std::max({std::abs(analytic[i]), std::abs(numeric[i]), 1e-3 * scale, 1e-6});
    if (!(difference / size < std::numeric_limits<double>::infinity()))
      return std::numeric_limits<double>::infinity();
    worst = std::max(worst, difference / size);
  }
  return worst;
}

}  // namespace gradcheck
