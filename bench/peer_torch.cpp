// The peer PyTorch. It calls the `out` variants of kernels where these exist, so that no allocation is timed. It sets the
// number of threads before the timed calls, and sets one thread after them.
#include <ATen/Parallel.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/version.h>

#include <chrono>
#include <memory>
#include <thread>
#include <tuple>
#include <vector>

#include "peers.hpp"

namespace ssmax_bench {
namespace {

// Sets the number of threads for some calls, and keeps the last results as PyTorch's tensors. The number belongs to
// OpenMP, and oneDNN reads it as well: the destructor restores it.
class AttentionCall {
 public:
  explicit AttentionCall(int threads) : threads_(threads) { at::set_num_threads(threads); }
  ~AttentionCall() {
    at::set_num_threads(1);
    // Idle threads of OpenMP spin for some milliseconds. The wait keeps them out of the next benchmark.
    if (threads_ > 1 && !results.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  AttentionCall(const AttentionCall&) = delete;
  AttentionCall& operator=(const AttentionCall&) = delete;

  std::vector<at::Tensor> results;

 private:
  int threads_;
};

// The arguments of scaled_dot_product_attention.
struct Attention {
  at::Tensor q, k, v;
  bool causal;
  bool grouped;

  explicit Attention(const AttentionArguments& a)
      : causal(a.visibility.causal && a.shape.queries > 1), grouped(a.shape.group() > 1 && !a.fold) {
    const auto& [heads, kv_heads, width, n, queries, batch] = a.shape;
    // With fold, the query heads of a kv head are queries of one head: the same keys must be visible to all of them.
    const bool fold = a.fold && queries == 1;
    q = tensor(a.q, {batch, fold ? kv_heads : heads, fold ? a.shape.group() : queries, width}, a.type);
    k = tensor(a.k, {batch, kv_heads, n, width}, a.type);
    v = tensor(a.v, {batch, kv_heads, n, width}, a.type);
  }

  at::Tensor operator()() const {
    const c10::InferenceMode inference;
    return at::scaled_dot_product_attention(q, k, v, {}, 0.0, causal, std::nullopt, grouped);
  }

  at::SDPBackend backend() const {
    return static_cast<at::SDPBackend>(
        at::_fused_sdp_choice(q, k, v, {}, 0.0, causal, std::nullopt, grouped));
  }

  static at::Tensor tensor(const void* data, at::IntArrayRef extents, ElementType type) {
    const c10::InferenceMode inference;
    const at::ScalarType scalar = type == ElementType::f32    ? at::kFloat
                                  : type == ElementType::bf16 ? at::kBFloat16
                                                              : at::kHalf;
    return at::from_blob(const_cast<void*>(data), extents, scalar);
  }
};

// Returns dq, dk, dv and, with s, ds, in this order.
std::vector<at::Tensor> gradients(const AttentionBackwardArguments& a) {
  const auto& [heads, kv_heads, width, n, queries, batch] = a.shape;
  std::vector<at::Tensor> all{Attention::tensor(a.dq, {batch, heads, queries, width}, a.type),
                              Attention::tensor(a.dk, {batch, kv_heads, n, width}, a.type),
                              Attention::tensor(a.dv, {batch, kv_heads, n, width}, a.type)};
  if (a.s != nullptr) all.push_back(Attention::tensor(a.ds, {1, heads, 1, 1}, ElementType::f32));
  return all;
}

at::Tensor gradient_of_out(const AttentionBackwardArguments& a) {
  const auto& [heads, kv_heads, width, n, queries, batch] = a.shape;
  return Attention::tensor(a.dout, {batch, heads, queries, width}, a.type);
}

// Calls the kernel of the backward alone. The constructor computes the forward.
struct FlashBackward {
  Attention attention;
  at::Tensor dout, out, lse;

  explicit FlashBackward(const AttentionBackwardArguments& a) : attention(a), dout(gradient_of_out(a)) {
    const c10::InferenceMode inference;
    std::tie(out, lse) = at::_scaled_dot_product_flash_attention_for_cpu(attention.q, attention.k,
                                                                         attention.v, 0.0, attention.causal);
  }

  std::vector<at::Tensor> operator()() const {
    const c10::InferenceMode inference;
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        dout, attention.q, attention.k, attention.v, out, lse, 0.0, attention.causal);
    return {dq, dk, dv};
  }
};

// SSMax as users of PyTorch write it: queries times s ln n, and autograd for the backward.
struct SsmaxBackward {
  std::vector<at::Tensor> inputs;  // q, k, v, s
  at::Tensor dout, out;

  explicit SsmaxBackward(const AttentionBackwardArguments& a) : dout(leaf(a.dout, a, a.shape.heads, false)) {
    inputs = {leaf(a.q, a, a.shape.heads), leaf(a.k, a, a.shape.kv_heads), leaf(a.v, a, a.shape.kv_heads),
              at::from_blob(const_cast<float*>(a.s), {1, a.shape.heads, 1, 1}).set_requires_grad(true)};
    const bool causal = a.visibility.causal;
    const at::Tensor visible =
        causal ? at::arange(1, a.shape.n + 1).view({1, 1, a.shape.n, 1}) : at::full({1, 1, 1, 1}, a.shape.n);
    const at::Tensor q = inputs[0].mul(inputs[3].mul(visible.log()));
    out = at::scaled_dot_product_attention(q, inputs[1], inputs[2], {}, 0.0, causal);
  }

  std::vector<at::Tensor> operator()() const {
    return torch::autograd::grad({out}, inputs, {dout}, /*retain_graph=*/true);
  }

  // Returns a tensor made outside of inference mode: autograd cannot keep tensors of inference mode.
  static at::Tensor leaf(const void* data, const AttentionBackwardArguments& a, index_t heads,
                         bool differentiate = true) {
    return at::from_blob(const_cast<void*>(data), {1, heads, a.shape.n, a.shape.width})
        .set_requires_grad(differentiate);
  }
};

template <class Backward>
Run backward_run(const AttentionBackwardArguments& a) {
  const auto call = std::make_shared<AttentionCall>(a.threads);
  Run run = [call, backward = Backward(a)] {
    call->results.clear();
    call->results = backward();
  };
  run.fetch = [call, wanted = gradients(a)] {
    const c10::InferenceMode inference;
    for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i].copy_(call->results[i]);
  };
  return run;
}

class Torch final : public Peer {
 public:
  Torch() { at::set_num_threads(1); }

  std::string version() const override { return TORCH_VERSION; }

  Run rows(const RowsArguments& a) const override {
    const at::Tensor x = tensor(a.x, a.shape);
    at::Tensor y = tensor(a.y, a.shape);
    return [x, y]() mutable {
      const c10::InferenceMode inference;  // switches off the bookkeeping of autograd
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

  // Frees each result before the next call, as in a loop of a user.
  Run attention(const AttentionArguments& a) const override {
    if (a.visibility.window > 0 || (a.shape.group() > 1 && a.fold && a.shape.queries > 1)) return {};
    const auto call = std::make_shared<AttentionCall>(a.threads);
    Run run = [call, attention = Attention(a)] {
      call->results.clear();
      call->results.push_back(attention());
    };
    const auto& [heads, kv_heads, width, n, queries, batch] = a.shape;
    run.fetch = [call, out = Attention::tensor(a.out, {batch, heads, queries, width}, a.type)] {
      const c10::InferenceMode inference;
      out.copy_(call->results[0].view_as(out));
    };
    return run;
  }

  std::string attention_label(const AttentionArguments& a) const override {
    const Attention attention(a);
    const std::string way = attention.backend() == at::SDPBackend::flash_attention ? "flash" : "math";
    if (a.shape.group() == 1) return way;
    return way + (attention.grouped ? ", enable_gqa" : ", heads folded");
  }

  Run attention_backward(const AttentionBackwardArguments& a) const override {
    const bool square = a.shape.queries == a.shape.n && a.shape.batch == 1;
    if ((a.type != ElementType::f32 && a.s != nullptr) || a.visibility.window > 0 || a.shape.group() > 1 ||
        a.db != nullptr || (!square && (a.visibility.causal || a.s != nullptr))) {
      return {};
    }
    return a.s != nullptr ? backward_run<SsmaxBackward>(a) : backward_run<FlashBackward>(a);
  }

  std::string attention_backward_label(const AttentionBackwardArguments& a) const override {
    const std::string way = attention_label(a);
    return a.s != nullptr ? way + ", autograd" : way;
  }

 private:
  // Returns a tensor over our memory. The const_cast is needed: PyTorch's tensors are never const.
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
