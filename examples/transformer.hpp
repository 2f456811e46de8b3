// A small transformer with random weights, for examples of serving. Its keys and values are in paged caches, one per
// layer. Results of a token do not depend on the other tokens of its step: attention is batch invariant, and Eigen gets
// whole blocks of rows.
#pragma once

#include <chrono>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "layers.hpp"

namespace examples {

using Clock = std::chrono::steady_clock;
using Cache = ssmax::PagedKvCache<ssmax::bfloat16>;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The new tokens of a step, packed. Token t belongs to sequence sequences[t]. Sequence ids[b] has the tokens
// [cumulative[b], cumulative[b + 1]).
struct Step {
  std::vector<index_t> tokens, sequences, ids, cumulative{0};

  void add(index_t id, std::span<const index_t> of_sequence) {
    tokens.insert(tokens.end(), of_sequence.begin(), of_sequence.end());
    sequences.insert(sequences.end(), of_sequence.size(), id);
    ids.push_back(id);
    cumulative.push_back(std::ssize(tokens));
  }
};

// The likeliest next token of a sequence.
struct Next {
  index_t token;
  float logit;
  bool operator==(const Next&) const = default;
};

struct Transformer {
  static constexpr index_t layer_count = 4, heads = 4, kv_heads = 2, head_width = 64;
  static constexpr index_t width = heads * head_width, qkv_width = (heads + 2 * kv_heads) * head_width;
  static constexpr index_t vocabulary = 256;

  struct Layer {
    Matrix qkv, out, up, down;
  };

  Matrix embedding, head;
  std::vector<Layer> layers;
  ssmax::Rope<float> rope;

  Transformer(index_t longest, Random& random)
      : embedding(random_matrix(vocabulary, width, 1, random)),
        head(dense(width, vocabulary, random)),
        rope({.width = head_width}, longest) {
    for (index_t i = 0; i < layer_count; ++i) {
      layers.push_back({dense(width, qkv_width, random), dense(width, width, random),
                        dense(width, 2 * width, random), dense(2 * width, width, random)});
    }
  }

 private:
  static Matrix dense(index_t in, index_t out, Random& random) {
    return random_matrix(in, out, 1 / std::sqrt(static_cast<float>(in)), random);
  }
};

// The caches of all layers. All caches change in the same way, so an id is the same sequence in each of them.
class Caches {
 public:
  Caches(index_t page, index_t pages) {
    for (index_t i = 0; i < Transformer::layer_count; ++i) {
      layers_.emplace_back(ssmax::PagedKvCacheOptions{
          .kv_heads = Transformer::kv_heads, .width = Transformer::head_width, .page = page, .pages = pages});
    }
  }

  Cache& layer(std::size_t i) { return layers_[i]; }
  const Cache& first() const { return layers_.front(); }

  index_t add() {
    return on_all([](Cache& cache) { return cache.add(); });
  }
  index_t fork(index_t id) {
    return on_all([&](Cache& cache) { return cache.fork(id); });
  }
  void remove(index_t id) {
    for (Cache& cache : layers_) cache.remove(id);
  }

 private:
  template <class F>
  index_t on_all(const F& f) {
    index_t id = 0;
    for (Cache& cache : layers_) id = f(cache);
    return id;
  }

  std::vector<Cache> layers_;
};

// How attention is called: once per layer for all sequences, or once per layer and sequence.
enum class Calls { batched, one_by_one };

class Decoder {
 public:
  Decoder(const Transformer& model, Calls calls, ssmax::ThreadPool& pool)
      : model_(model), calls_(calls), pool_(pool) {}

  double attention_seconds() const { return attention_seconds_; }

  // Appends the tokens to the caches and returns the next token of each sequence. Throws PagedKvCacheFull if too few
  // pages are free; the caches are then unchanged.
  std::vector<Next> forward(const Step& step, Caches& caches) {
    const auto rows = std::ssize(step.tokens);
    std::optional<Plan> plan;
    x_.setZero(padded(rows), Transformer::width);
    for (index_t t = 0; t < rows; ++t)
      x_.row(t) = model_.embedding.row(step.tokens[static_cast<std::size_t>(t)]);
    heads_.setZero(x_.rows(), Transformer::width);
    for (std::size_t i = 0; i < model_.layers.size(); ++i) {
      const Transformer::Layer& layer = model_.layers[i];
      norm_.forward(x_, normal_);
      multiply(normal_, layer.qkv, qkv_);
      attend(step, caches.layer(i), plan);
      multiply(heads_, layer.out, added_);
      x_ += added_;
      norm_.forward(x_, normal_);
      multiply(normal_, layer.up, inner_);
      inner_ = inner_.cwiseMax(0);
      multiply(inner_, layer.down, added_);
      x_ += added_;
    }
    return likeliest(step);
  }

 private:
  using Plan = ssmax::SourcePlan<float, Cache::Source>;

  // Eigen computes the last rows of a product in another order unless their number is a multiple of its blocks.
  static index_t padded(index_t rows) { return (rows + 15) / 16 * 16; }

  void multiply(const Matrix& x, const Matrix& weights, Matrix& y) {
    y.resize(x.rows(), weights.cols());
    in_pieces(weights.cols(), 64, pool_, [&](index_t first, index_t count) {
      y.middleCols(first, count).noalias() = x * weights.middleCols(first, count);
    });
  }

  void attend(const Step& step, Cache& cache, std::optional<Plan>& plan) {
    const auto rows = std::ssize(step.tokens);
    const auto rows_of = [&](index_t first_head) {
      return ssmax::View<const float, 3>(qkv_.data() + first_head * Transformer::head_width,
                                         {rows, Transformer::kv_heads, Transformer::head_width},
                                         {Transformer::qkv_width, Transformer::head_width, 1});
    };
    cache.append(rows_of(Transformer::heads), rows_of(Transformer::heads + Transformer::kv_heads),
                 step.sequences, &model_.rope);
    const auto start = Clock::now();
    if (calls_ == Calls::batched) {
      attend_batched(step, cache, plan);
    } else {
      attend_one_by_one(step, cache);
    }
    attention_seconds_ += seconds_since(start);
  }

  // The caches of all layers have the same lengths, so the plan of the first layer serves the other layers.
  void attend_batched(const Step& step, const Cache& cache, std::optional<Plan>& plan) {
    const auto rows = std::ssize(step.tokens);
    const Cache::Source source = cache.source(step.ids);
    if (!plan) {
      plan.emplace(
          ssmax::SourcePlanShape{.heads = Transformer::heads, .queries = rows}, source, ssmax::Causal{},
          ssmax::AttentionOptions<float>{.rope = &model_.rope,
                                         .batch_invariant = true,
                                         .lengths = ssmax::SequenceLengths::packed_queries(step.cumulative)},
          pool_.concurrency());
    }
    const std::span memory(workspace_.reserve(plan->bytes()), plan->bytes());
    plan->bind(arguments(0, rows), source, scaling_).run(memory, pool_);
  }

  void attend_one_by_one(const Step& step, const Cache& cache) {
    for (std::size_t b = 0; b < step.ids.size(); ++b) {
      const index_t first = step.cumulative[b];
      ssmax::decode<float>(arguments(first, step.cumulative[b + 1] - first),
                           cache.source(std::span(step.ids).subspan(b, 1)), scaling_, ssmax::Causal{},
                           {.rope = &model_.rope, .workspace = &workspace_, .batch_invariant = true}, pool_);
    }
  }

  ssmax::DecodeArguments<float> arguments(index_t first, index_t count) {
    const ssmax::View<const float, 2> q(qkv_.data() + first * Transformer::qkv_width,
                                        {count, Transformer::width}, {Transformer::qkv_width, 1});
    const ssmax::View<float, 2> out(heads_.data() + first * Transformer::width, {count, Transformer::width});
    return {.q = ssmax::heads_view(q, Transformer::heads), .out = ssmax::heads_view(out, Transformer::heads)};
  }

  std::vector<Next> likeliest(const Step& step) {
    const auto sequences = std::ssize(step.ids);
    added_.setZero(padded(sequences), Transformer::width);
    for (index_t b = 0; b < sequences; ++b)
      added_.row(b) = x_.row(step.cumulative[static_cast<std::size_t>(b) + 1] - 1);
    norm_.forward(added_, normal_);
    multiply(normal_, model_.head, logits_);
    std::vector<Next> result(step.ids.size());
    for (index_t b = 0; b < sequences; ++b) {
      Next& next = result[static_cast<std::size_t>(b)];
      next.logit = logits_.row(b).maxCoeff(&next.token);
    }
    return result;
  }

  const Transformer& model_;
  const Calls calls_;
  ssmax::ThreadPool& pool_;
  const ssmax::SSMax<float> scaling_{0.43f};
  ssmax::Workspace workspace_;
  RmsNorm norm_;
  Matrix x_, normal_, qkv_, heads_, inner_, added_, logits_;
  double attention_seconds_ = 0;
};

}  // namespace examples
