// The peer of plain loops. CMake builds this file twice: with the flags of a plain Release build, and with -march=native.
#include <cmath>

#include "peers.hpp"

namespace ssmax_bench {
namespace {

void softmax(const float* __restrict x, float* __restrict y, index_t n) {
  float max = x[0];
  for (index_t i = 1; i < n; ++i) max = x[i] > max ? x[i] : max;
  float sum = 0.0F;
  for (index_t i = 0; i < n; ++i) {
    y[i] = std::exp(x[i] - max);
    sum += y[i];
  }
  const float reciprocal = 1.0F / sum;
  for (index_t i = 0; i < n; ++i) y[i] *= reciprocal;
}

void softmax_backward(const float* __restrict y, const float* __restrict dy, float* __restrict dz,
                      index_t n) {
  float dot = 0.0F;
  for (index_t i = 0; i < n; ++i) dot += y[i] * dy[i];
  for (index_t i = 0; i < n; ++i) dz[i] = y[i] * (dy[i] - dot);
}

void rotate_half_split(const float* __restrict x, const float* __restrict cosine,
                       const float* __restrict sine, float* __restrict y, index_t half) {
  for (index_t i = 0; i < half; ++i) {
    y[i] = x[i] * cosine[i] - x[i + half] * sine[i];
    y[i + half] = x[i + half] * cosine[i] + x[i] * sine[i];
  }
}

void rotate_interleaved(const float* __restrict x, const float* __restrict cosine,
                        const float* __restrict sine, float* __restrict y, index_t half) {
  for (index_t i = 0; i < half; ++i) {
    y[2 * i] = x[2 * i] * cosine[i] - x[2 * i + 1] * sine[i];
    y[2 * i + 1] = x[2 * i + 1] * cosine[i] + x[2 * i] * sine[i];
  }
}

class Naive final : public Peer {
 public:
  std::string version() const override { return "plain loops"; }

  Run rows(const RowsArguments& a) const override {
    return [a] {
      const index_t n = a.shape.n;
      for (index_t row = 0; row < a.shape.rows; ++row) softmax(a.x + row * n, a.y + row * n, n);
    };
  }

  Run rows_backward(const RowsBackwardArguments& a) const override {
    return [a] {
      const index_t n = a.shape.n;
      for (index_t row = 0; row < a.shape.rows; ++row) {
        softmax_backward(a.y + row * n, a.dy + row * n, a.dz + row * n, n);
      }
    };
  }

  Run rope(const RopeArguments& a) const override {
    return [a] {
      const index_t half = a.width / 2;
      const auto rotate = a.pairing == RopePairing::half_split ? rotate_half_split : rotate_interleaved;
      for (index_t head = 0; head < a.heads; ++head) {
        for (index_t position = 0; position < a.positions; ++position) {
          const index_t at = (head * a.positions + position) * a.width;
          rotate(a.x + at, a.cosine + position * half, a.sine + position * half, a.y + at, half);
        }
      }
    };
  }
};

}  // namespace
}  // namespace ssmax_bench

const ssmax_bench::Peer* ssmax_bench_peer() {
  static const ssmax_bench::Naive peer;
  return &peer;
}
