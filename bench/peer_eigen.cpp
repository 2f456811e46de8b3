// Eigen's array expressions, row by row. Built twice: as a plain Release build, and with -march=native.
#include <Eigen/Core>

#include "peers.hpp"

namespace ssmax_bench {
namespace {

using In = Eigen::Map<const Eigen::ArrayXf>;
using Out = Eigen::Map<Eigen::ArrayXf>;

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

  // Both halves of a row are contiguous only in the half-split pairing.
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
};

}  // namespace
}  // namespace ssmax_bench

const ssmax_bench::Peer* ssmax_bench_peer() {
  static const ssmax_bench::EigenPeer peer;
  return &peer;
}
