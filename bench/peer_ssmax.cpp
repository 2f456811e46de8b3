// This library compiled with -march=native. table.py requires that a plain Release build is as fast.
#include <ssmax/softmax.hpp>

#include "peers.hpp"

namespace ssmax_bench {
namespace {

using In = ssmax::View<const float, 2>;
using Out = ssmax::View<float, 2>;

class Ssmax final : public Peer {
 public:
  std::string version() const override { return "this library with -march=native"; }

  Run rows(const RowsArguments& a) const override {
    const std::array<index_t, 2> extents{a.shape.rows, a.shape.n};
    return [x = In(a.x, extents), y = Out(a.y, extents)] { ssmax::softmax(x, y, ssmax::Softmax{}); };
  }

  Run rows_backward(const RowsBackwardArguments& a) const override {
    const std::array<index_t, 2> extents{a.shape.rows, a.shape.n};
    const ssmax::RowsBackward<float, 2> arguments{
        .out = In(a.y, extents), .dout = In(a.dy, extents), .logits = {}, .dlogits = Out(a.dz, extents)};
    return [arguments] { ssmax::softmax_backward(arguments, ssmax::Softmax{}); };
  }
};

}  // namespace
}  // namespace ssmax_bench

const ssmax_bench::Peer* ssmax_bench_peer() {
  static const ssmax_bench::Ssmax peer;
  return &peer;
}
