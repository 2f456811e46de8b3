// A decoder: embedding, layers of causal attention with RoPE and of SwiGLU, and a head. Attention and
// SwiGLU read x through an RMSNorm, and their results are added to x. The head's weights may be the
// embedding's.
//
// A model stores no weights. It stores the places of the weights in an array, so several threads share one
// model and one array. Each thread has its own activations and gradient.
#pragma once

#include <span>
#include <ssmax/rope.hpp>
#include <vector>

#include "attention_layer.hpp"
#include "configuration.hpp"
#include "parameters.hpp"
#include "settings.hpp"

namespace longcontext {

// The results of a sequence's forward that its backward needs, and the backward's scratch memory.
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
  // largest_n is the size of the table of sizes, if the form has one.
  Model(const Shape& shape, Form form, index_t largest_n);

  const Shape& shape() const { return shape_; }
  Form form() const { return form_; }
  const Layout& layout() const { return layout_; }

  ssmax::Rope<float> rope(index_t positions, double theta_factor = 1) const;

  // Writes logits [token, vocabulary]. With one cache per layer, the tokens continue the caches' sequence.
  void forward(std::span<const float> weights, std::span<const index_t> tokens,
               const ssmax::Rope<float>& rope, Activations& a, std::span<Cache> caches = {}) const;

  std::vector<Cache> caches(index_t capacity) const;

  // Requires the logits' gradient in place of the logits. Overwrites the activations. Writes the gradient
  // of every tensor; does not write the padding between tensors.
  void backward(std::span<const float> weights, std::span<const index_t> tokens,
                const ssmax::Rope<float>& rope, Activations& a, std::span<float> gradient) const;

  // Returns the result of the function attention_on for all heads, layer by layer. Requires a forward.
  std::vector<float> attention_on(std::span<const float> weights, const ssmax::Rope<float>& rope,
                                  Activations& a, index_t first_key, index_t keys, index_t first_query,
                                  index_t queries) const;

  // Returns s and b of a layer, and p. A span is empty if the form has no such parameter.
  ScalingParameters<const float> scaling_parameters(std::span<const float> weights, index_t layer) const;

  // Sets s for a model that was trained with Softmax: the multiplier s·ln n is 1 on average over n = 1 …
  // length.
  void start_s(std::span<float> weights, index_t length) const;

  // Returns the FLOP of a sequence's forward: the products of weights with tokens, and of queries with
  // visible keys and values. The backward has twice as many.
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
