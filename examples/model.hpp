// A small transformer that can be trained: an embedding, layers of causal attention with RoPE and of products with
// ReLU, and a head. Every layer normalises its input and adds its result to x, the residual stream.
//
//   forward    embedding, layers (normalise, q, k, v, ssmax::attention, add; normalise, up, ReLU, down, add), head
//   loss       ssmax::cross_entropy replaces the logits by their gradient
//   backward   the same steps in reverse, with ssmax::attention_backward; it adds to the gradients of s and b
//   update     AdamW, without weight decay of s and b
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <ssmax/attention_backward.hpp>
#include <ssmax/cross_entropy.hpp>
#include <vector>

#include "layers.hpp"

namespace examples {

inline constexpr index_t kIgnored = -100;  // target of a word that the model cannot predict

struct Batch {
  index_t sequences, length;
  std::vector<index_t> words, targets;  // [sequence, position]
};

struct ModelShape {
  index_t layers, heads, kv_heads, head_width;
  index_t inner;  // channels between up and down; 0: layers of attention only
  index_t words;
  ssmax::RopeOptions rope;
  index_t longest;  // positions of the rope
  double rate, decay;

  index_t width() const { return heads * head_width; }
  index_t qkv_width() const { return (heads + 2 * kv_heads) * head_width; }
};

// A scaling and the parameters of one layer. Without a specialisation the scaling has no parameters.
template <class Scaling>
struct Learnt {
  explicit Learnt(index_t) {}
  Scaling forward() const { return {}; }
  Scaling backward() { return {}; }
  std::vector<Parameter*> parameters() { return {}; }
};

// s and b affect all of attention, so their learning rate is small. s·ln n starts at about 1 for 64 keys.
template <>
struct Learnt<ssmax::SSMax<float>> {
  static constexpr double rate = 1e-3;
  Parameter s, b;

  explicit Learnt(index_t heads)
      : s(Matrix::Constant(1, heads, 0.25f), rate, 0), b(Matrix::Zero(1, heads), rate, 0) {}

  ssmax::SSMax<float> forward() const { return ssmax::SSMax<float>{numbers(s.value), numbers(b.value)}; }
  ssmax::SSMaxGradient<float> backward() {
    return forward().gradient({s.gradient.data(), numbers(s.value).size()},
                              {b.gradient.data(), numbers(b.value).size()});
  }
  std::vector<Parameter*> parameters() { return {&s, &b}; }

 private:
  static std::span<const float> numbers(const Matrix& row) {
    return {row.data(), static_cast<std::size_t>(row.size())};
  }
};

// Computes x += attention(normalised x).
template <class Scaling>
struct AttentionLayer {
  RmsNorm norm;
  Linear qkv, out;  // queries, keys and values side by side: [in, head · channel]
  Learnt<Scaling> scaling;
  Matrix normal, rows, heads, lse, added;  // of the last forward; input of backward

  AttentionLayer(const ModelShape& shape, Random& random)
      : qkv(shape.width(), shape.qkv_width(), shape.rate, shape.decay, random),
        out(shape.width(), shape.width(), shape.rate, shape.decay, random),
        scaling(shape.heads) {
    // Small queries and keys make attention start nearly uniform.
    qkv.weights.value.leftCols((shape.heads + shape.kv_heads) * shape.head_width) *= 0.3f;
  }

  struct Heads {
    ssmax::View<float, 4> q, k, v;
  };

  // Returns views [batch, head, position, channel] of a matrix [token, queries | keys | values].
  static Heads by_heads(Matrix& tokens, const ModelShape& shape, const Batch& batch) {
    const auto view = [&](index_t first, index_t count) {
      const index_t row = shape.qkv_width();
      return ssmax::View<float, 4>(tokens.data() + first * shape.head_width,
                                   {batch.sequences, count, batch.length, shape.head_width},
                                   {batch.length * row, shape.head_width, row, 1});
    };
    return {view(0, shape.heads), view(shape.heads, shape.kv_heads),
            view(shape.heads + shape.kv_heads, shape.kv_heads)};
  }
  static ssmax::View<float, 4> result_view(Matrix& tokens, const ModelShape& shape, const Batch& batch) {
    return {tokens.data(),
            {batch.sequences, shape.heads, batch.length, shape.head_width},
            {batch.length * shape.width(), shape.head_width, shape.width(), 1}};
  }
  ssmax::View<float, 3> lse_view(const ModelShape& shape, const Batch& batch) {
    return {lse.data(), {batch.sequences, shape.heads, batch.length}};
  }

  void forward(Matrix& x, const ModelShape& shape, const Batch& batch, const ssmax::Rope<float>& rope,
               ssmax::ThreadPool& pool) {
    norm.forward(x, normal);
    qkv.forward(normal, rows, pool);
    heads.resize(x.rows(), shape.width());
    lse.resize(batch.sequences * shape.heads, batch.length);
    const Heads of = by_heads(rows, shape, batch);
    ssmax::attention({.q = of.q,
                      .k = of.k,
                      .v = of.v,
                      .out = result_view(heads, shape, batch),
                      .lse = lse_view(shape, batch),
                      .rope = &rope},
                     scaling.forward(), ssmax::Causal{}, pool);
    out.forward(heads, added, pool);
    x += added;
  }

  // Replaces dx, the gradient of x after forward, by the gradient of x before forward.
  void backward(Matrix& dx, const ModelShape& shape, const Batch& batch, const ssmax::Rope<float>& rope,
                ssmax::ThreadPool& pool) {
    Matrix dheads = Matrix::Zero(dx.rows(), shape.width()), dnormal = dheads;
    Matrix drows(dx.rows(), shape.qkv_width());
    out.backward(heads, dx, dheads, pool);
    const Heads of = by_heads(rows, shape, batch), gradients = by_heads(drows, shape, batch);
    ssmax::attention_backward(
        {.q = of.q,
         .k = of.k,
         .v = of.v,
         .out = result_view(heads, shape, batch),
         .lse = lse_view(shape, batch),
         .rope = &rope},
        {.dout = result_view(dheads, shape, batch), .dq = gradients.q, .dk = gradients.k, .dv = gradients.v},
        scaling.backward(), ssmax::Causal{}, pool);
    qkv.backward(normal, drows, dnormal, pool);
    norm.backward(normal, dnormal, dx);
  }
};

// Computes x += down(ReLU(up(normalised x))).
struct FeedForward {
  RmsNorm norm;
  Linear up, down;
  Matrix normal, inner, added;  // of the last forward; input of backward

  FeedForward(const ModelShape& shape, Random& random)
      : up(shape.width(), shape.inner, shape.rate, shape.decay, random),
        down(shape.inner, shape.width(), shape.rate, shape.decay, random) {}

  void forward(Matrix& x, ssmax::ThreadPool& pool) {
    norm.forward(x, normal);
    up.forward(normal, inner, pool);
    inner = inner.cwiseMax(0);
    down.forward(inner, added, pool);
    x += added;
  }

  // Replaces dx, the gradient of x after forward, by the gradient of x before forward.
  void backward(Matrix& dx, ssmax::ThreadPool& pool) {
    Matrix dinner = Matrix::Zero(dx.rows(), inner.cols()), dnormal = Matrix::Zero(dx.rows(), dx.cols());
    down.backward(inner, dx, dinner, pool);
    dinner.array() *= (inner.array() > 0).cast<float>();
    up.backward(normal, dinner, dnormal, pool);
    norm.backward(normal, dnormal, dx);
  }
};

template <class Scaling>
struct Layer {
  AttentionLayer<Scaling> attention;
  std::optional<FeedForward> feed;

  Layer(const ModelShape& shape, Random& random) : attention(shape, random) {
    if (shape.inner > 0) feed.emplace(shape, random);
  }
};

struct Result {
  double loss, accuracy;
};

// Returns the factor of the learning rate: it rises during the first 50 steps and falls during the last two
// thirds.
inline double schedule(int step, int steps) {
  const double left = 1 - static_cast<double>(step) / steps;
  return std::min({1.0, step / 50.0, 1.5 * left + 0.01});
}

template <class Scaling>
class Model {
 public:
  Model(const ModelShape& shape, Random& random, ssmax::ThreadPool& pool)
      : shape_(shape),
        embedding_(random_matrix(shape.words, shape.width(), 1, random), shape.rate, shape.decay),
        head_(shape.width(), shape.words, shape.rate, shape.decay, random),
        rope_(shape.rope, shape.longest),
        pool_(pool) {
    for (index_t i = 0; i < shape.layers; ++i) layers_.emplace_back(shape, random);
  }

  const ModelShape& shape() const { return shape_; }
  const Matrix& embedding() const { return embedding_.value; }  // [word, width]
  const Linear& head() const { return head_; }
  const std::vector<Layer<Scaling>>& layers() const { return layers_; }
  const ssmax::Rope<float>& rope() const { return rope_; }

  // Replaces the logits by the gradient of the loss.
  Result forward(const Batch& batch) {
    x_.resize(batch.sequences * batch.length, shape_.width());
    for (index_t i = 0; i < x_.rows(); ++i) x_.row(i) = embedding_.value.row(word(batch, i));
    for (auto& [attention, feed] : layers_) {
      attention.forward(x_, shape_, batch, rope_, pool_);
      if (feed) feed->forward(x_, pool_);
    }
    norm_.forward(x_, normal_);
    head_.forward(normal_, logits_, pool_);

    index_t right = 0;
    for (index_t i = 0; i < logits_.rows(); ++i) {
      index_t likeliest = 0;
      logits_.row(i).maxCoeff(&likeliest);
      right += likeliest == batch.targets[static_cast<std::size_t>(i)] ? 1 : 0;
    }
    const ssmax::View<float, 2> rows(logits_.data(), {logits_.rows(), shape_.words});
    const auto [loss, count] =
        ssmax::cross_entropy<float>(rows, batch.targets, rows, {.ignored = kIgnored}, pool_);
    return {loss, static_cast<double>(right) / static_cast<double>(count)};
  }

  // Requires a forward with the same batch.
  void backward(const Batch& batch) {
    for (Parameter* parameter : parameters()) parameter->gradient.setZero();
    const Matrix zero = Matrix::Zero(x_.rows(), shape_.width());
    Matrix dnormal = zero, dx = zero;
    head_.backward(normal_, logits_, dnormal, pool_);
    norm_.backward(normal_, dnormal, dx);
    for (auto layer = layers_.rbegin(); layer != layers_.rend(); ++layer) {
      if (layer->feed) layer->feed->backward(dx, pool_);
      layer->attention.backward(dx, shape_, batch, rope_, pool_);
    }
    for (index_t i = 0; i < dx.rows(); ++i) embedding_.gradient.row(word(batch, i)) += dx.row(i);
  }

  // Makes step `step` of `steps`, counted from 1.
  Result train(const Batch& batch, int step, int steps) {
    const Result result = forward(batch);
    backward(batch);
    for (Parameter* parameter : parameters()) parameter->update(step, schedule(step, steps));
    return result;
  }

 private:
  static index_t word(const Batch& batch, index_t token) {
    return batch.words[static_cast<std::size_t>(token)];
  }

  std::vector<Parameter*> parameters() {
    std::vector<Parameter*> all{&embedding_, &head_.weights};
    for (auto& [attention, feed] : layers_) {
      for (Parameter* parameter : attention.scaling.parameters()) all.push_back(parameter);
      for (Linear* linear : {&attention.qkv, &attention.out}) all.push_back(&linear->weights);
      if (feed) all.insert(all.end(), {&feed->up.weights, &feed->down.weights});
    }
    return all;
  }

  ModelShape shape_;
  Parameter embedding_;  // [word, width]
  std::vector<Layer<Scaling>> layers_;
  RmsNorm norm_;
  Linear head_;
  ssmax::Rope<float> rope_;
  ssmax::ThreadPool& pool_;
  Matrix x_, normal_, logits_;
};

}  // namespace examples
