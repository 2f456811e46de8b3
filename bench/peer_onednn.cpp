// The peer oneDNN: its softmax primitive, and attention by two products and this primitive; float, one thread. Version 2
// (Debian 12) makes a description before the primitive. Version 3 makes both in one step.
#include <algorithm>
#include <cmath>
#include <dnnl.hpp>
#include <limits>
#include <memory>
#include <unordered_map>

#include "peers.hpp"

namespace ssmax_bench {
namespace {

using dnnl::memory;
using Memories = std::unordered_map<int, memory>;

constexpr auto accurate = dnnl::algorithm::softmax_accurate;
constexpr int axis = 1;

#if DNNL_VERSION_MAJOR >= 3
dnnl::softmax_forward::primitive_desc describe(const dnnl::engine& engine, dnnl::prop_kind kind,
                                               const memory::desc& desc) {
  return {engine, kind, accurate, desc, desc, axis};
}
dnnl::primitive forward(const dnnl::engine& engine, const memory::desc& desc) {
  return dnnl::softmax_forward(describe(engine, dnnl::prop_kind::forward_inference, desc));
}
dnnl::primitive backward(const dnnl::engine& engine, const memory::desc& desc) {
  const auto hint = describe(engine, dnnl::prop_kind::forward_training, desc);
  return dnnl::softmax_backward(
      dnnl::softmax_backward::primitive_desc(engine, accurate, desc, desc, desc, axis, hint));
}
#else
dnnl::softmax_v2_forward::primitive_desc describe(const dnnl::engine& engine, dnnl::prop_kind kind,
                                                  const memory::desc& desc) {
  return {{kind, accurate, desc, desc, axis}, engine};
}
dnnl::primitive forward(const dnnl::engine& engine, const memory::desc& desc) {
  return dnnl::softmax_v2_forward(describe(engine, dnnl::prop_kind::forward_inference, desc));
}
dnnl::primitive backward(const dnnl::engine& engine, const memory::desc& desc) {
  const auto hint = describe(engine, dnnl::prop_kind::forward_training, desc);
  return dnnl::softmax_v2_backward(
      dnnl::softmax_v2_backward::primitive_desc({accurate, desc, desc, desc, axis}, engine, hint));
}
#endif

class OneDnn final : public Peer {
 public:
  std::string version() const override {
    const dnnl_version_t* v = dnnl_version();
    return std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch);
  }

  Run rows(const RowsArguments& a) const override {
    const memory::desc desc = describe_rows(a.shape);
    return make(forward(engine_, desc),
                {{DNNL_ARG_SRC, memory_at(desc, a.x)}, {DNNL_ARG_DST, memory_at(desc, a.y)}});
  }

  Run rows_backward(const RowsBackwardArguments& a) const override {
    const memory::desc desc = describe_rows(a.shape);
    return make(backward(engine_, desc), {{DNNL_ARG_DST, memory_at(desc, a.y)},
                                          {DNNL_ARG_DIFF_DST, memory_at(desc, a.dy)},
                                          {DNNL_ARG_DIFF_SRC, memory_at(desc, a.dz)}});
  }

  // Computes all logits of a kv head at once, and sets masked logits to -inf. The query heads of a kv head are rows of one
  // product.
  Run attention(const AttentionArguments& a) const override {
    if (a.type != ElementType::f32 || a.threads != 1) return {};
    const auto& [heads, kv_heads, width, n, queries, batch] = a.shape;
    const RowsShape shape{a.shape.group() * queries, n};
    const auto logits = std::make_shared<Buffer>(shape.size());
    const Run softmax = rows({shape, logits->data(), logits->data()});
    return [a, shape, logits, softmax, width = width] {
      const float scale = 1 / std::sqrt(static_cast<float>(width));
      for (index_t kv_head = 0; kv_head < a.shape.kv_heads; ++kv_head) {
        const index_t q = kv_head * shape.rows * width;
        const index_t kv = kv_head * shape.n * width;
        dnnl_sgemm('N', 'T', shape.rows, shape.n, width, scale, static_cast<const float*>(a.q) + q, width,
                   static_cast<const float*>(a.k) + kv, width, 0, logits->data(), shape.n);
        hide(a, shape, logits->data());
        softmax();
        dnnl_sgemm('N', 'N', shape.rows, width, shape.n, 1, logits->data(), shape.n,
                   static_cast<const float*>(a.v) + kv, width, 0, static_cast<float*>(a.out) + q, width);
      }
    };
  }

  std::string attention_label(const AttentionArguments&) const override { return "sgemm, softmax, sgemm"; }

 private:
  static void hide(const AttentionArguments& a, RowsShape shape, float* logits) {
    constexpr float hidden = -std::numeric_limits<float>::infinity();
    for (index_t row = 0; row < shape.rows; ++row) {
      const index_t position = row % a.shape.queries + a.shape.n - a.shape.queries;
      std::fill_n(logits + row * shape.n, a.visibility.first(position), hidden);
      std::fill(logits + row * shape.n + a.visibility.end(position, shape.n), logits + (row + 1) * shape.n,
                hidden);
    }
  }

  static memory::desc describe_rows(RowsShape shape) {
    return {{shape.rows, shape.n}, memory::data_type::f32, memory::format_tag::ab};
  }

  // oneDNN takes inputs as pointers to non-const and does not write to them.
  memory memory_at(const memory::desc& desc, const float* data) const {
    return {desc, engine_, const_cast<float*>(data)};
  }

  Run make(dnnl::primitive primitive, Memories memories) const {
    return [primitive = std::move(primitive), memories = std::move(memories),
            stream = dnnl::stream(engine_)]() mutable {
      primitive.execute(stream, memories);
      stream.wait();
    };
  }

  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
};

}  // namespace
}  // namespace ssmax_bench

const ssmax_bench::Peer* ssmax_bench_peer() {
  static const ssmax_bench::OneDnn peer;
  return &peer;
}
