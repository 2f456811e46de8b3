// AdamW with weight decay of matrices only. Clips the gradient's norm first.
#pragma once

#include <cmath>
#include <numeric>
#include <span>
#include <vector>

#include "parameters.hpp"
#include "settings.hpp"

namespace longcontext {

// Both moving averages of the gradient, in the layout of the weights.
struct Averages {
  Values mean, square;
};

// Returns the factor of the learning rate. It rises during the first twentieth of training and falls to 0
// during the last fifth.
inline double schedule(index_t step, index_t steps) {
  const double part = static_cast<double>(step) / static_cast<double>(steps);
  return std::min({1.0, 20 * part, 5 * (1 - part) + 1.0 / static_cast<double>(steps)});
}

// Floats per call. Four arrays of this size fit into a core's second-level cache.
inline constexpr index_t kPiece = 1 << 13;

// Adds the gradients of several sequences to the first, in the order of the sequences, and returns the norm
// of the sum. The padding between tensors is 0 in all arrays.
inline double add_up(std::span<const std::span<float>> gradients, ssmax::ThreadPool& pool) {
  const auto size = static_cast<index_t>(gradients.front().size());
  std::vector<double> squares(static_cast<std::size_t>((size + kPiece - 1) / kPiece));
  examples::in_pieces(size, kPiece, pool, [&](index_t first, index_t count) {
    const auto part = [&](std::span<float> all) {
      return Eigen::Map<Eigen::ArrayXf>(all.data() + first, count);
    };
    auto sum = part(gradients.front());
    for (const auto& gradient : gradients.subspan(1)) sum += part(gradient);
    squares[static_cast<std::size_t>(first / kPiece)] = static_cast<double>(sum.square().sum());
  });
  return std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0));
}

// Updates the weights. `norm` is the norm of the gradient; `step` counts from 1.
inline void update(const Layout& layout, std::span<float> weights, std::span<const float> gradient,
                   double norm, Averages& averages, const Training& training, index_t step,
                   ssmax::ThreadPool& pool) {
  const auto clip = static_cast<float>(norm > training.clip ? training.clip / norm : 1);
  const double rate = training.rate * schedule(step, training.steps);
  struct Piece {
    Tensor tensor;
    double decay;
  };
  std::vector<Piece> pieces;
  for (const auto& entry : layout.entries()) {
    const index_t size = entry.tensor.size();
    for (index_t first = 0; first < size; first += kPiece) {
      pieces.push_back({{entry.tensor.offset + first, 1, std::min(kPiece, size - first)},
                        entry.is_matrix() ? training.decay : 0});
    }
  }
  pool.run(static_cast<index_t>(pieces.size()), [&](index_t i) {
    const Piece& piece = pieces[static_cast<std::size_t>(i)];
    const auto of = [&](std::span<float> all) { return piece.tensor.matrix(all).array(); };
    examples::update(of(weights), clip * piece.tensor.matrix(gradient).array(), of(averages.mean),
                     of(averages.square), {.rate = rate, .decay = piece.decay}, step);
  });
}

}  // namespace longcontext
