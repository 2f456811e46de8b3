// What a small transformer needs besides attention, forward and backward: AdamW, dense layers by Eigen, RMS
// normalisation. Rows of a matrix are tokens. Every backward adds to gradients, as ssmax does to ds and db.
// Work is cut into pieces that do not depend on the number of threads, so that no result does.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <ssmax/execution.hpp>

#include "random.hpp"

namespace examples {

using ssmax::index_t;
using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

inline Matrix random_matrix(index_t rows, index_t columns, float deviation, Random& random) {
  Matrix result(rows, columns);
  for (float& x : result.reshaped<Eigen::RowMajor>()) x = deviation * random.standard();
  return result;
}

// How AdamW averages gradients and their squares, and how far and how it moves.
struct AdamW {
  double rate, decay, mean = 0.9, square = 0.95;
};

// Arrays of one size; steps count from 1.
template <class Weights, class Gradient>
void update(Weights&& weights, const Gradient& gradient, Weights&& mean, Weights&& square, const AdamW& adam,
            index_t step) {
  mean += static_cast<float>(1 - adam.mean) * (gradient - mean);
  square += static_cast<float>(1 - adam.square) * (gradient.square() - square);
  // Both began at 0 and are still so much too small.
  const auto rate = static_cast<float>(adam.rate / (1 - std::pow(adam.mean, static_cast<double>(step))));
  const auto grown = static_cast<float>(1 / (1 - std::pow(adam.square, static_cast<double>(step))));
  const auto kept = static_cast<float>(1 - adam.rate * adam.decay);
  weights = kept * weights - rate * mean / ((grown * square).sqrt() + 1e-8f);
}

// A matrix that is learnt.
struct Parameter {
  Matrix value, gradient, mean, square;
  double rate, decay;

  Parameter(const Matrix& start, double learning_rate, double weight_decay)
      : value(start), rate(learning_rate), decay(weight_decay) {
    gradient = mean = square = Matrix::Zero(start.rows(), start.cols());
  }

  // `schedule` is the part of the rate that this step gets.
  void update(index_t step, double schedule) {
    examples::update(value.array(), gradient.array(), mean.array(), square.array(),
                     {.rate = schedule * rate, .decay = decay, .square = 0.98}, step);
  }
};

// f(first, count) for the pieces of [0, size).
template <class F>
void in_pieces(index_t size, index_t piece, ssmax::ThreadPool& pool, const F& f) {
  pool.run((size + piece - 1) / piece, [&](index_t i) { f(i * piece, std::min(piece, size - i * piece)); });
}

// y = x·W.
struct Linear {
  Parameter weights;  // [in, out]

  Linear(index_t in, index_t out, double rate, double decay, Random& random)
      : weights(random_matrix(in, out, 1 / std::sqrt(static_cast<float>(in)), random), rate, decay) {}

  void forward(const Matrix& x, Matrix& y, ssmax::ThreadPool& pool) const {
    y.resize(x.rows(), weights.value.cols());
    in_pieces(x.rows(), 256, pool, [&](index_t first, index_t count) {
      y.middleRows(first, count).noalias() = x.middleRows(first, count) * weights.value;
    });
  }

  void backward(const Matrix& x, const Matrix& dy, Matrix& dx, ssmax::ThreadPool& pool) {
    in_pieces(x.rows(), 256, pool, [&](index_t first, index_t count) {
      dx.middleRows(first, count).noalias() += dy.middleRows(first, count) * weights.value.transpose();
    });
    in_pieces(x.cols(), 32, pool, [&](index_t first, index_t count) {
      weights.gradient.middleRows(first, count).noalias() += x.middleCols(first, count).transpose() * dy;
    });
  }
};

// y = x / √(mean of x²) per row. It has no weights of its own: those of the layer behind it do as well.
struct RmsNorm {
  Eigen::VectorXf inverse;  // of the root, per row

  void forward(const Matrix& x, Matrix& y) {
    inverse = (x.rowwise().squaredNorm() / static_cast<float>(x.cols())).array().max(1e-8f).rsqrt();
    y = inverse.asDiagonal() * x;
  }

  void backward(const Matrix& y, const Matrix& dy, Matrix& dx) const {
    const Eigen::VectorXf along = y.cwiseProduct(dy).rowwise().mean();
    dx += inverse.asDiagonal() * (dy - along.asDiagonal() * y);
  }
};

}  // namespace examples
