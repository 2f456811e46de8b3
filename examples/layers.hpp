// Layers of a small transformer besides attention, forward and backward: AdamW, dense layers by Eigen, RMS
// normalisation. Rows of a matrix are tokens. Every backward adds to gradients, as ssmax does for ds and
// db. The work is split independently of the number of threads, so results are bit-identical for any
// number.
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

// The settings of AdamW: learning rate, weight decay, and the factors of the two moving averages.
struct AdamW {
  double rate, decay, mean = 0.9, square = 0.95;
};

// Updates weights, mean and square by one step of AdamW. All arrays have the same size; `step` counts from
// 1.
template <class Weights, class Gradient>
void update(Weights&& weights, const Gradient& gradient, Weights&& mean, Weights&& square, const AdamW& adam,
            index_t step) {
  mean += static_cast<float>(1 - adam.mean) * (gradient - mean);
  square += static_cast<float>(1 - adam.square) * (gradient.square() - square);
  // Correct the bias of both averages, which start at 0.
  const auto rate = static_cast<float>(adam.rate / (1 - std::pow(adam.mean, static_cast<double>(step))));
  const auto grown = static_cast<float>(1 / (1 - std::pow(adam.square, static_cast<double>(step))));
  const auto kept = static_cast<float>(1 - adam.rate * adam.decay);
  weights = kept * weights - rate * mean / ((grown * square).sqrt() + 1e-8f);
}

// A trained matrix.
struct Parameter {
  Matrix value, gradient, mean, square;
  double rate, decay;

  Parameter(const Matrix& start, double learning_rate, double weight_decay)
      : value(start), rate(learning_rate), decay(weight_decay) {
    gradient = mean = square = Matrix::Zero(start.rows(), start.cols());
  }

  // `schedule` is the factor of the learning rate for this step.
  void update(index_t step, double schedule) {
    examples::update(value.array(), gradient.array(), mean.array(), square.array(),
                     {.rate = schedule * rate, .decay = decay, .square = 0.98}, step);
  }
};

// Calls f(first, count) for blocks of [0, size).
template <class F>
void in_pieces(index_t size, index_t piece, ssmax::ThreadPool& pool, const F& f) {
  pool.run((size + piece - 1) / piece, [&](index_t i) { f(i * piece, std::min(piece, size - i * piece)); });
}

// Computes y = x·W.
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

// Computes y = x / √(mean of x²) per row. It has no weights: the weights of the next layer serve the same
// purpose.
struct RmsNorm {
  Eigen::VectorXf inverse;  // 1 / root, per row

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
