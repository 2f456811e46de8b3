// PyTorch's kernels through their `out` variants, so that no allocation is timed; one thread, set once.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <torch/version.h>

#include "peers.hpp"

namespace ssmax_bench {
namespace {

class Torch final : public Peer {
 public:
  Torch() { at::set_num_threads(1); }

  std::string version() const override { return TORCH_VERSION; }

  Run rows(const RowsArguments& a) const override {
    const at::Tensor x = tensor(a.x, a.shape);
    at::Tensor y = tensor(a.y, a.shape);
    return [x, y]() mutable {
      const c10::InferenceMode inference;  // leaves out the book-keeping of autograd
      at::_softmax_out(y, x, 1, false);
    };
  }

  Run rows_backward(const RowsBackwardArguments& a) const override {
    const at::Tensor y = tensor(a.y, a.shape);
    const at::Tensor dy = tensor(a.dy, a.shape);
    at::Tensor dz = tensor(a.dz, a.shape);
    return [y, dy, dz]() mutable {
      const c10::InferenceMode inference;
      at::_softmax_backward_data_out(dz, dy, y, 1, at::kFloat);
    };
  }

 private:
  // A tensor over memory that is ours; PyTorch has no tensor of const.
  static at::Tensor tensor(const float* data, RowsShape shape) {
    const c10::InferenceMode inference;
    return at::from_blob(const_cast<float*>(data), {shape.rows, shape.n}, at::kFloat);
  }
};

}  // namespace
}  // namespace ssmax_bench

const ssmax_bench::Peer* ssmax_bench_peer() {
  static const ssmax_bench::Torch peer;
  return &peer;
}
