// Describes the work of attention in prefill, decode and backward: shapes, visible keys and counted operations.
#pragma once

#include <algorithm>
#include <string>

#include "data.hpp"

namespace ssmax_bench {

// The shape of one call. q is [batch, head, query, channel]; k and v are [batch, kv head, key, channel]. Decode has one
// query, at the last position.
struct AttentionShape {
  index_t heads;
  index_t kv_heads;
  index_t width;
  index_t n;  // keys
  index_t queries;
  index_t batch = 1;

  index_t group() const { return heads / kv_heads; }
  index_t rows() const { return batch * heads * queries; }
  index_t query_size() const { return rows() * width; }
  index_t key_size() const { return batch * kv_heads * n * width; }
  std::string name() const {
    return std::string("h") + std::to_string(heads) + "_kv" + std::to_string(kv_heads) + "_d" +
           std::to_string(width) + "_n" + std::to_string(n);
  }
};

// A mask: keys [first(p), end(p, n)) are visible at position p.
struct Visibility {
  bool causal = false;
  index_t window = 0;  // with causal: number of visible keys, p's own included; 0: no limit

  index_t first(index_t position) const {
    return window == 0 ? 0 : std::max<index_t>(0, position + 1 - window);
  }
  index_t end(index_t position, index_t n) const { return causal ? position + 1 : n; }
  std::string name() const {
    if (window > 0) return std::string("w") + std::to_string(window);
    return causal ? "causal" : "full";
  }

  // Returns the logits of n queries over n keys that count as work. A causal mask counts as half of all logits.
  double logits(index_t n) const {
    const auto keys = static_cast<double>(n);
    const auto width = static_cast<double>(window);
    if (window > 0) return width * keys - width * (width - 1) / 2;
    return causal ? keys * keys / 2 : keys * keys;
  }
};

enum class ElementType { f32, bf16, f16 };

inline const char* name(ElementType type) {
  return type == ElementType::f32 ? "f32" : type == ElementType::bf16 ? "bf16" : "f16";
}

inline index_t bytes(ElementType type) { return type == ElementType::f32 ? 4 : 2; }

// Arguments of out = softmax(q k^T / sqrt(width)) v for each head.
struct AttentionArguments {
  AttentionShape shape;
  Visibility visibility;
  ElementType type;
  int threads;
  // True if a peer may pass the query heads of one kv head as queries of one head. This is faster in PyTorch, and its
  // users do not have it as an option.
  bool fold;
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* out = nullptr;
};

// Arguments of the backward: dq, dk and dv from dout. The layouts and types are the ones of q, k, v and out. out and lse,
// [batch, head, query], are results of the forward. With s, logits are multiplied by s ln n (+ b), where n is the number
// of visible keys. The call then also computes ds and, with b, db: one number per head.
struct AttentionBackwardArguments : AttentionArguments {
  const float* lse = nullptr;
  const void* dout = nullptr;
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
  const float* s = nullptr;
  float* ds = nullptr;
  float* db = nullptr;
};

}  // namespace ssmax_bench
