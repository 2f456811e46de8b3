// A decoder: embedding, layers of causal attention with RoPE and of SwiGLU, both behind an RMSNorm and added
// to what they read, and a head whose weights may be the embedding's.
//
// A model has no weights of its own, but says where in an array they lie: many threads share one model and
// one array, each with activations and a gradient of its own.
#pragma once

#include <span>
#include <ssmax/rope.hpp>
#include <vector>

#include "attention_layer.hpp"
#include "configuration.hpp"
#include "parameters.hpp"
#include "settings.hpp"

namespace longcontext {

// What the forward of a sequence leaves for its backward, and what a backward works with.
struct Activations {
  struct Layer {
    examples::RmsNorm attention_norm, feed_norm;
    Matrix attention_input, qkv, heads, lse, feed_input, gate_up, hidden;
  };
  std::vector<Layer> layers;
  examples::RmsNorm norm;
  Matrix x, normal, logits;
  Matrix dx, dnormal, dheads, dqkv;
};

class Model {
 public:
  // The table of sizes, where the form has one, reaches to n = largest_n.
  Model(const Shape& shape, Form form, index_t largest_n);

  const Shape& shape() const { return shape_; }
  Form form() const { return form_; }
  const Layout& layout() const { return layout_; }

  ssmax::Rope<float> rope(index_t positions, double theta_factor = 1) const;

  // Leaves logits [token, vocabulary]. With a cache for every layer, the tokens go on where these end.
  void forward(std::span<const float> weights, std::span<const index_t> tokens,
               const ssmax::Rope<float>& rope, Activations& a, std::span<Cache> caches = {}) const;

  std::vector<Cache> caches(index_t capacity) const;

  // Expects the logits' gradient in place of the logits. Consumes the activations. Writes the gradient of
  // every tensor, but not what lies between tensors.
  void backward(std::span<const float> weights, std::span<const index_t> tokens,
                const ssmax::Rope<float>& rope, Activations& a, std::span<float> gradient) const;

  // After forward: the attention of all heads, layer by layer, as attention_on has it.
  std::vector<float> attention_on(std::span<const float> weights, const ssmax::Rope<float>& rope,
                                  Activations& a, index_t first_key, index_t keys, index_t first_query,
                                  index_t queries) const;

  // s and b of a layer, and p; empty where the form has none.
  ScalingParameters<const float> scaling_parameters(std::span<const float> weights, index_t layer) const;

  // For models that were trained with Softmax: sets s so that the multiplier s·ln n is 1 on
  // average over n = 1 … length.
  void start_s(std::span<float> weights, index_t length) const;

  // Floating-point operations of the forward of a sequence; its backward has twice as many. They are the
  // products of weights with tokens, and of queries, keys and values that see each other.
  double flops(index_t length) const;

 private:
  struct Layer {
    Tensor qkv, out, gate_up, down, s, b;
  };

  HeadShape heads(index_t length) const;

  Shape shape_;
  Form form_;
  Layout layout_;
  Tensor embedding_, head_, p_;
  std::vector<Layer> layers_;
};

}  // namespace longcontext
