// The peer ggml: its fused attention, ggml_flash_attn_ext, with a cache in the type of the row and float queries. ggml reads
// the visible keys from a mask in half. A plan and its memory are made before the timed calls.
#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "peers.hpp"

namespace ssmax_bench {
namespace {

ggml_type type_of(ElementType type) {
  return type == ElementType::f32    ? GGML_TYPE_F32
         : type == ElementType::bf16 ? GGML_TYPE_BF16
                                     : GGML_TYPE_F16;
}

// Converts n numbers from a type to float, or from float to a type.
void widen(ElementType type, const void* in, index_t n, float* out) {
  if (type == ElementType::f32) {
    std::copy_n(static_cast<const float*>(in), n, out);
  } else if (type == ElementType::bf16) {
    ggml_bf16_to_fp32_row(static_cast<const ggml_bf16_t*>(in), out, n);
  } else {
    ggml_fp16_to_fp32_row(static_cast<const ggml_fp16_t*>(in), out, n);
  }
}
void narrow(ElementType type, const float* in, index_t n, void* out) {
  if (type == ElementType::f32) {
    std::copy_n(in, n, static_cast<float*>(out));
  } else if (type == ElementType::bf16) {
    ggml_fp32_to_bf16_row(in, static_cast<ggml_bf16_t*>(out), n);
  } else {
    ggml_fp32_to_fp16_row(in, static_cast<ggml_fp16_t*>(out), n);
  }
}

// A graph of one node, its plan and their memory.
class Graph {
 public:
  explicit Graph(const AttentionArguments& a) : arguments_(a) {
    const auto& [heads, kv_heads, width, n, queries, batch] = a.shape;
    // The rows of the mask are padded, as ggml requires.
    const index_t mask_rows = (queries + 63) / 64 * 64;
    const index_t bytes = 4 * (2 * a.shape.query_size() + n * mask_rows) + 8 * a.shape.key_size();
    context_.reset(ggml_init({static_cast<std::size_t>(bytes) + (1 << 20), nullptr, false}));
    ggml_tensor* q = ggml_new_tensor_4d(context(), GGML_TYPE_F32, width, queries, heads, batch);
    ggml_tensor* k = ggml_new_tensor_4d(context(), type_of(a.type), width, n, kv_heads, batch);
    ggml_tensor* v = ggml_new_tensor_4d(context(), type_of(a.type), width, n, kv_heads, batch);
    ggml_tensor* mask = ggml_new_tensor_2d(context(), GGML_TYPE_F16, n, mask_rows);
    widen(a.type, a.q, a.shape.query_size(), static_cast<float*>(q->data));
    std::memcpy(k->data, a.k, ggml_nbytes(k));
    std::memcpy(v->data, a.v, ggml_nbytes(v));
    auto* allowed = static_cast<ggml_fp16_t*>(mask->data);
    const ggml_fp16_t visible = ggml_fp32_to_fp16(0),
                      masked = ggml_fp32_to_fp16(-std::numeric_limits<float>::infinity());
    for (index_t i = 0; i < mask_rows; ++i) {
      const index_t position = n - queries + i;
      for (index_t key = 0; key < n; ++key) {
        const bool is_visible = key >= a.visibility.first(position) && key < a.visibility.end(position, n);
        allowed[i * n + key] = is_visible ? visible : masked;
      }
    }
    out_ = ggml_flash_attn_ext(context(), q, k, v, mask, 1 / std::sqrt(static_cast<float>(width)), 0, 0);
    graph_ = ggml_new_graph(context());
    ggml_build_forward_expand(graph_, out_);
    plan_ = ggml_graph_plan(graph_, a.threads, nullptr);
    work_.resize(plan_.work_size);
    plan_.work_data = work_.data();
  }

  void compute() { ggml_graph_compute(graph_, &plan_); }

  // Copies the result, [query, head, channel], to [head, query, channel].
  void fetch() const {
    const auto& [heads, kv_heads, width, n, queries, batch] = arguments_.shape;
    std::vector<float> out(static_cast<std::size_t>(arguments_.shape.query_size()));
    const auto* from = static_cast<const float*>(out_->data);
    for (index_t b = 0; b < batch; ++b) {
      for (index_t i = 0; i < queries; ++i) {
        for (index_t h = 0; h < heads; ++h, from += width)
          std::copy_n(from, width, out.data() + ((b * heads + h) * queries + i) * width);
      }
    }
    narrow(arguments_.type, out.data(), arguments_.shape.query_size(), arguments_.out);
  }

 private:
  struct Free {
    void operator()(ggml_context* context) const { ggml_free(context); }
  };
  ggml_context* context() const { return context_.get(); }

  AttentionArguments arguments_;
  std::unique_ptr<ggml_context, Free> context_;
  ggml_tensor* out_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
  ggml_cplan plan_{};
  std::vector<std::uint8_t> work_;
};

class Ggml final : public Peer {
 public:
  Ggml() { ggml_cpu_init(); }

  std::string version() const override { return ggml_version(); }

  Run attention(const AttentionArguments& a) const override {
    // Without data, the caller only asks whether the peer supports the shape.
    if (a.q == nullptr) return [] {};
    const auto graph = std::make_shared<Graph>(a);
    Run run = [graph] { graph->compute(); };
    run.fetch = [graph] { graph->fetch(); };
    return run;
  }

  // ggml adds the products with V in half if V is half, and rounds queries to the type of K.
  double attention_error(const AttentionArguments& a) const override {
    return a.type == ElementType::f32 ? 0 : 0.01;
  }

  std::string attention_label(const AttentionArguments&) const override {
    return ggml_cpu_has_avx512_bf16() != 0 ? "avx512_bf16"
           : ggml_cpu_has_avx512() != 0    ? "avx512"
           : ggml_cpu_has_avx2() != 0      ? "avx2"
                                           : "";
  }
};

}  // namespace
}  // namespace ssmax_bench

const ssmax_bench::Peer* ssmax_bench_peer() {
  static const ssmax_bench::Ggml peer;
  return &peer;
}
