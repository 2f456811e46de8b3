#include "model.hpp"

#include <cmath>

namespace longcontext {

namespace {

// Computes the backward of hidden = gate · sigmoid(gate) · up. Overwrites gate and up, [token, gate | up],
// by their gradients. Overwrites the gradient of hidden by intermediate results. Works row by row, so that
// a row stays in the cache.
void swiglu_backward(Matrix& dhidden, Matrix& gate_up) {
  const index_t hidden = dhidden.cols();
  Eigen::Array<float, 1, Eigen::Dynamic> sigmoid(hidden), slope(hidden);
  for (index_t i = 0; i < dhidden.rows(); ++i) {
    auto gate = gate_up.row(i).head(hidden).array(), up = gate_up.row(i).tail(hidden).array();
    auto along = dhidden.row(i).array();
    sigmoid = gate.logistic();
    slope = up * (1 + gate * (1 - sigmoid));
    along *= sigmoid;
    up = along * gate;
    gate = along * slope;
  }
}

}  // namespace

Model::Model(const Shape& shape, Form form, index_t largest_n) : shape_(shape), form_(form) {
  check(shape);
  const index_t width = shape.width(), hidden = shape.hidden;
  // Initial weights. Most products keep the size of their input (keeping). Products that are added to x are
  // smaller for more layers (adding). Products that make logits are small (even), so that attention and
  // predictions start nearly uniform for every scaling. Rejected alternatives: with small weights
  // throughout, as in GPT-2, the model found needles later or not at all. With queries and keys of full
  // size, SSMax was slower, because its multiplier starts at ln n (docs/paper_tried.md).
  const auto keeping = [](index_t inputs) { return Start{0, 1 / std::sqrt(static_cast<float>(inputs))}; };
  const auto adding = [&](index_t inputs) {
    return Start{0, keeping(inputs).deviation / std::sqrt(static_cast<float>(shape.layers))};
  };
  const Start even{0, 0.04f};
  const bool learns_b = form == Form::ssmax_bias || form == Form::size_table;
  const bool learns_s = form == Form::ssmax || learns_b;

  embedding_ = layout_.add("embedding", shape.vocabulary, width, {keeping(width)});
  head_ = shape.tied ? Tensor{} : layout_.add("head", width, shape.vocabulary, {even});
  p_ = layout_.add("p", 1, form == Form::size_table ? largest_n : 0, {{1, 0}});
  for (index_t i = 0; i < shape.layers; ++i) {
    const auto add = [&](const char* name, index_t rows, index_t columns, const std::vector<Start>& starts) {
      return layout_.add("layer " + std::to_string(i) + " " + name, rows, columns, starts);
    };
    layers_.push_back({.qkv = add("qkv", width, 3 * width, {even, even, keeping(width)}),
                       .out = add("out", width, width, {adding(width)}),
                       .gate_up = add("gate_up", width, 2 * hidden, {keeping(width)}),
                       .down = add("down", hidden, width, {adding(hidden)}),
                       .s = add("s", 1, learns_s ? shape.heads : 0, {{1, 0}}),
                       .b = add("b", 1, learns_b ? shape.heads : 0, {{0, 0}})});
  }
}

ssmax::Rope<float> Model::rope(index_t positions, double theta_factor) const {
  return {{.width = shape_.head_width, .theta = shape_.theta * theta_factor}, positions};
}

std::vector<Cache> Model::caches(index_t capacity) const {
  return std::vector<Cache>(
      layers_.size(), Cache({.kv_heads = shape_.heads, .width = shape_.head_width, .capacity = capacity}));
}

HeadShape Model::heads(index_t length) const { return {length, shape_.heads, shape_.head_width}; }

ScalingParameters<const float> Model::scaling_parameters(std::span<const float> weights,
                                                         index_t layer) const {
  const Layer& at = layers_[static_cast<std::size_t>(layer)];
  return {at.s.values(weights), at.b.values(weights), p_.values(weights)};
}

void Model::start_s(std::span<float> weights, index_t length) const {
  double sum = 0;
  for (index_t n = 1; n <= length; ++n) sum += std::log(static_cast<double>(n));
  for (const Layer& layer : layers_) {
    std::ranges::fill(layer.s.values(weights), static_cast<float>(static_cast<double>(length) / sum));
  }
}

void Model::forward(std::span<const float> weights, std::span<const index_t> tokens,
                    const ssmax::Rope<float>& rope, Activations& a, std::span<Cache> caches) const {
  const index_t length = static_cast<index_t>(tokens.size()), width = shape_.width();
  const auto embedding = embedding_.matrix(weights);
  // The embedding's rows have length 1, as the head requires.
  const float run = std::sqrt(static_cast<float>(width));
  a.x.resize(length, width);
  for (index_t i = 0; i < length; ++i) {
    a.x.row(i) = run * embedding.row(tokens[static_cast<std::size_t>(i)]);
  }

  a.layers.resize(layers_.size());
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    auto& at = a.layers[i];
    at.attention_norm.forward(a.x, at.attention_input);
    at.qkv.noalias() = at.attention_input * layer.qkv.matrix(weights);
    const Scaling scaling = make_scaling(form_, scaling_parameters(weights, static_cast<index_t>(i)));
    if (caches.empty()) {
      attend(heads(length), scaling, rope, at.qkv, at.heads, at.lse);
    } else {
      attend(heads(length), scaling, rope, at.qkv, at.heads, caches[i]);
    }
    a.x.noalias() += at.heads * layer.out.matrix(weights);

    at.feed_norm.forward(a.x, at.feed_input);
    at.gate_up.noalias() = at.feed_input * layer.gate_up.matrix(weights);
    const auto gate = at.gate_up.leftCols(shape_.hidden).array();
    const auto up = at.gate_up.rightCols(shape_.hidden).array();
    at.hidden = gate * gate.logistic() * up;
    a.x.noalias() += at.hidden * layer.down.matrix(weights);
  }

  a.norm.forward(a.x, a.normal);
  if (shape_.tied) {
    a.logits.noalias() = a.normal * embedding.transpose();
  } else {
    a.logits.noalias() = a.normal * head_.matrix(weights);
  }
}

void Model::backward(std::span<const float> weights, std::span<const index_t> tokens,
                     const ssmax::Rope<float>& rope, Activations& a, std::span<float> gradient) const {
  const index_t width = shape_.width();
  auto dembedding = embedding_.matrix(gradient);
  if (shape_.tied) {
    a.dnormal.noalias() = a.logits * embedding_.matrix(weights);
    dembedding.noalias() = a.logits.transpose() * a.normal;
  } else {
    a.dnormal.noalias() = a.logits * head_.matrix(weights).transpose();
    head_.matrix(gradient).noalias() = a.normal.transpose() * a.logits;
    dembedding.setZero();
  }
  std::ranges::fill(p_.values(gradient), 0.0f);
  a.dx.setZero(a.x.rows(), width);
  a.norm.backward(a.normal, a.dnormal, a.dx);

  for (std::size_t i = layers_.size(); i-- > 0;) {
    const Layer& layer = layers_[i];
    auto& at = a.layers[i];
    layer.down.matrix(gradient).noalias() = at.hidden.transpose() * a.dx;
    at.hidden.noalias() = a.dx * layer.down.matrix(weights).transpose();
    swiglu_backward(at.hidden, at.gate_up);
    layer.gate_up.matrix(gradient).noalias() = at.feed_input.transpose() * at.gate_up;
    a.dnormal.noalias() = at.gate_up * layer.gate_up.matrix(weights).transpose();
    at.feed_norm.backward(at.feed_input, a.dnormal, a.dx);

    layer.out.matrix(gradient).noalias() = at.heads.transpose() * a.dx;
    a.dheads.noalias() = a.dx * layer.out.matrix(weights).transpose();
    const auto learnt = scaling_parameters(weights, static_cast<index_t>(i));
    const ScalingParameters<float> dlearnt{layer.s.values(gradient), layer.b.values(gradient),
                                           p_.values(gradient)};
    std::ranges::fill(dlearnt.s, 0.0f);
    std::ranges::fill(dlearnt.b, 0.0f);
    attend_backward(heads(a.x.rows()), make_scaling_gradient(form_, learnt, dlearnt), rope, at.qkv, at.heads,
                    at.lse, a.dheads, a.dqkv);
    layer.qkv.matrix(gradient).noalias() = at.attention_input.transpose() * a.dqkv;
    a.dnormal.noalias() = a.dqkv * layer.qkv.matrix(weights).transpose();
    at.attention_norm.backward(at.attention_input, a.dnormal, a.dx);
  }

  const float run = std::sqrt(static_cast<float>(width));
  for (index_t i = 0; i < a.dx.rows(); ++i) {
    dembedding.row(tokens[static_cast<std::size_t>(i)]) += run * a.dx.row(i);
  }
}

std::vector<float> Model::attention_on(std::span<const float> weights, const ssmax::Rope<float>& rope,
                                       Activations& a, index_t first_key, index_t keys, index_t first_query,
                                       index_t queries) const {
  std::vector<float> all;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const Scaling scaling = make_scaling(form_, scaling_parameters(weights, static_cast<index_t>(i)));
    const auto of_layer = longcontext::attention_on(heads(a.x.rows()), scaling, rope, a.layers[i].qkv,
                                                    first_key, keys, first_query, queries);
    all.insert(all.end(), of_layer.begin(), of_layer.end());
  }
  return all;
}

double Model::flops(index_t length) const {
  index_t products = shape_.width() * shape_.vocabulary;
  for (const Layer& layer : layers_) {
    products += layer.qkv.size() + layer.out.size() + layer.gate_up.size() + layer.down.size();
  }
  const index_t seen =
      shape_.layers * shape_.width() * length;  // two products with length / 2 keys on average
  return 2.0 * static_cast<double>(length) * static_cast<double>(products + seen);
}

}  // namespace longcontext
