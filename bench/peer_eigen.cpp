// The peer Eigen: array expressions, row by row, and attention by two products and a softmax. CMake builds this file
// twice: with the flags of a plain Release build, and with -march=native.
#include <Eigen/Core>
#include <cmath>
#include <memory>

#include "peers.hpp"

namespace ssmax_bench {
namespace {

using In = Eigen::Map<const Eigen::ArrayXf>;
using Out = Eigen::Map<Eigen::ArrayXf>;
using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using InMatrix = Eigen::Map<const Matrix>;
using OutMatrix = Eigen::Map<Matrix>;

class EigenPeer final : public Peer {
 public:
  std::string version() const override {
    return std::to_string(EIGEN_WORLD_VERSION) + "." + std::to_string(EIGEN_MAJOR_VERSION) + "." +
           std::to_string(EIGEN_MINOR_VERSION) + ", " + Eigen::SimdInstructionSetsInUse();
  }

  Run rows(const RowsArguments& a) const override {
    return [a] {
      const index_t n = a.shape.n;
      for (index_t row = 0; row < a.shape.rows; ++row) {
        const In x(a.x + row * n, n);
        Out y(a.y + row * n, n);
        y = (x - x.maxCoeff()).exp();
        y *= 1.0F / y.sum();
      }
    };
  }

  Run rows_backward(const RowsBackwardArguments& a) const override {
    return [a] {
      const index_t n = a.shape.n;
      for (index_t row = 0; row < a.shape.rows; ++row) {
        const In y(a.y + row * n, n);
        const In dy(a.dy + row * n, n);
        Out(a.dz + row * n, n) = y * (dy - (y * dy).sum());
      }
    };
  }

  // Supports the half-split pairing only: in the other one the halves of a row are not contiguous.
  Run rope(const RopeArguments& a) const override {
    if (a.pairing != RopePairing::half_split) return {};
    return [a] {
      const index_t half = a.width / 2;
      for (index_t head = 0; head < a.heads; ++head) {
        for (index_t position = 0; position < a.positions; ++position) {
          const index_t at = (head * a.positions + position) * a.width;
          const In first(a.x + at, half);
          const In second(a.x + at + half, half);
          const In cosine(a.cosine + position * half, half);
          const In sine(a.sine + position * half, half);
          Out(a.y + at, half) = first * cosine - second * sine;
          Out(a.y + at + half, half) = second * cosine + first * sine;
        }
      }
    };
  }

  // Computes all logits of a kv head at once. The query heads of a kv head are rows of one product.
  Run attention(const AttentionArguments& a) const override {
    if (a.type != ElementType::f32 || a.threads != 1) return {};
    const index_t rows = a.shape.group() * a.shape.queries;
    return [a, rows, logits = std::make_shared<Matrix>(rows, a.shape.n)] {
      const index_t width = a.shape.width;
      const float scale = 1 / std::sqrt(static_cast<float>(width));
      for (index_t kv_head = 0; kv_head < a.shape.kv_heads; ++kv_head) {
        const index_t kv = kv_head * a.shape.n * width;
        const InMatrix q(static_cast<const float*>(a.q) + kv_head * rows * width, rows, width);
        const InMatrix k(static_cast<const float*>(a.k) + kv, a.shape.n, width);
        const InMatrix v(static_cast<const float*>(a.v) + kv, a.shape.n, width);
        logits->noalias() = scale * q * k.transpose();
        for (index_t row = 0; row < rows; ++row) softmax_visible(a, row, *logits);
        OutMatrix(static_cast<float*>(a.out) + kv_head * rows * width, rows, width).noalias() = *logits * v;
      }
    };
  }

  std::string attention_label(const AttentionArguments&) const override {
    return "product, softmax, product";
  }

 private:
  static void softmax_visible(const AttentionArguments& a, index_t row, Matrix& logits) {
    const index_t position = row % a.shape.queries + a.shape.n - a.shape.queries;
    const index_t first = a.visibility.first(position);
    const index_t end = a.visibility.end(position, a.shape.n);
    auto visible = logits.row(row).segment(first, end - first).array();
    visible = (visible - visible.maxCoeff()).exp();
    visible *= 1.0F / visible.sum();
    logits.row(row).head(first).setZero();
    logits.row(row).tail(a.shape.n - end).setZero();
  }
};

}  // namespace
}  // namespace ssmax_bench

const ssmax_bench::Peer* ssmax_bench_peer() {
  static const ssmax_bench::EigenPeer peer;
  return &peer;
}
