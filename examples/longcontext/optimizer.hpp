// AdamW (β 0.9 and 0.95, decay on matrices only) behind a clip of the gradient's norm.
#pragma once

#include <cmath>
#include <numeric>
#include <span>
#include <vector>

#include "parameters.hpp"
#include "settings.hpp"

namespace longcontext {

// Both averages of the gradient, in the layout of the weights.
struct Averages {
  Values mean, square;
};

// Up to the full rate over a twentieth of the training, which it stays until the last fifth takes it to 0.
inline double schedule(index_t step, index_t steps) {
  const double part = static_cast<double>(step) / static_cast<double>(steps);
  return std::min({1.0, 20 * part, 5 * (1 - part) + 1.0 / static_cast<double>(steps)});
}

// Adds up the gradients of several pieces, in their order, into the first; returns the norm of the sum.
inline double add_up(std::span<const std::span<float>> gradients, ssmax::ThreadPool& pool) {
  constexpr index_t kPart = 1 << 15;
  const auto size = static_cast<index_t>(gradients.front().size());
  std::vector<double> squares(static_cast<std::size_t>((size + kPart - 1) / kPart));
  examples::in_pieces(size, kPart, pool, [&](index_t first, index_t count) {
    const auto part = [&](std::span<float> all) {
      return Eigen::Map<Eigen::ArrayXf>(all.data() + first, count);
    };
    auto sum = part(gradients.front());
    for (const auto& gradient : gradients.subspan(1)) sum += part(gradient);
    squares[static_cast<std::size_t>(first / kPart)] = static_cast<double>(sum.square().sum());
  });
  return std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0));
}

// With a gradient of this norm; steps count from 1.
inline void update(const Layout& layout, std::span<float> weights, std::span<const float> gradient,
                   double norm, Averages& averages, const Training& training, index_t step,
                   ssmax::ThreadPool& pool) {
  constexpr double kMean = 0.9, kSquare = 0.95;
  const auto clip = static_cast<float>(norm > training.clip ? training.clip / norm : 1);
  const double rate = training.rate * schedule(step, training.steps);
  // The averages began at 0 and are still so much too small.
  const auto count = static_cast<double>(step);
  const auto mean_rate = static_cast<float>(rate / (1 - std::pow(kMean, count)));
  const auto square_part = static_cast<float>(1 / (1 - std::pow(kSquare, count)));

  const auto& entries = layout.entries();
  pool.run(static_cast<index_t>(entries.size()), [&](index_t i) {
    const auto& entry = entries[static_cast<std::size_t>(i)];
    const auto of = [&](auto& all) { return entry.tensor.matrix(std::span(all)).array(); };
    const auto g = clip * of(gradient);
    auto mean = of(averages.mean), square = of(averages.square), w = of(weights);
    mean += static_cast<float>(1 - kMean) * (g - mean);
    square += static_cast<float>(1 - kSquare) * (g.square() - square);
    if (entry.is_matrix()) w *= static_cast<float>(1 - rate * training.decay);
    w -= mean_rate * mean / ((square_part * square).sqrt() + 1e-8f);
  });
}

}  // namespace longcontext
