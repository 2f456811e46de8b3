// Computes the steps of a server with a model of model.hpp. Keys and values are in paged caches, one per layer. Results of
// a token do not depend on the other tokens of its step: attention is batch invariant, and Eigen gets
// whole blocks of rows.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <ssmax/ssmax.hpp>
#include <utility>
#include <vector>

#include "model.hpp"

namespace examples {

using Clock = std::chrono::steady_clock;
using ServedModel = Model<ssmax::SSMax<float>>;
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

// The caches of all layers. All caches change in the same way, so an id is the same sequence in each of them.
class Caches {
 public:
  Caches(const ModelShape& shape, index_t page, index_t pages) {
    for (index_t i = 0; i < shape.layers; ++i) {
      layers_.emplace_back(ssmax::PagedKvCacheOptions{
          .kv_heads = shape.kv_heads, .width = shape.head_width, .page = page, .pages = pages});
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
  Decoder(const ServedModel& model, Calls calls, ssmax::ThreadPool& pool)
      : model_(model), shape_(model.shape()), calls_(calls), pool_(pool) {}

  double attention_seconds() const { return attention_seconds_; }
  // Of all steps: the sequences whose first keys are computed once for several sequences.
  double shared_sequences() const { return shared_sequences_; }

  // Appends the tokens to the caches and returns the next token of each sequence. Throws PagedKvCacheFull if too few
  // pages are free; the caches are then unchanged.
  std::vector<Next> forward(const Step& step, Caches& caches) {
    const auto rows = std::ssize(step.tokens);
    std::optional<Plan> plan;
    x_.setZero(padded(rows), shape_.width());
    for (index_t t = 0; t < rows; ++t)
      x_.row(t) = model_.embedding().row(step.tokens[static_cast<std::size_t>(t)]);
    heads_.setZero(x_.rows(), shape_.width());
    for (std::size_t i = 0; i < model_.layers().size(); ++i) {
      const auto& [attention, feed] = model_.layers()[i];
      norm_.forward(x_, normal_);
      multiply(normal_, attention.qkv, qkv_);
      attend(step, caches.layer(i), attention.scaling.forward(), plan);
      multiply(heads_, attention.out, added_);
      x_ += added_;
      if (!feed) continue;
      norm_.forward(x_, normal_);
      multiply(normal_, feed->up, inner_);
      inner_ = inner_.cwiseMax(0);
      multiply(inner_, feed->down, added_);
      x_ += added_;
    }
    if (plan) shared_sequences_ += static_cast<double>(plan->explanation().shared_sequences);
    return likeliest(step);
  }

 private:
  using Arguments = ssmax::AttentionArguments<float>;
  using Plan = ssmax::Plan<float>;

  // Eigen computes the last rows of a product in another order unless their number is a multiple of its blocks.
  static index_t padded(index_t rows) { return (rows + 15) / 16 * 16; }

  void multiply(const Matrix& x, const Linear& linear, Matrix& y) {
    const Matrix& weights = linear.weights.value;
    y.resize(x.rows(), weights.cols());
    in_pieces(weights.cols(), 32, pool_, [&](index_t first, index_t count) {
      y.middleCols(first, count).noalias() = x * weights.middleCols(first, count);
    });
  }

  void attend(const Step& step, Cache& cache, const ssmax::SSMax<float>& scaling, std::optional<Plan>& plan) {
    const auto rows = std::ssize(step.tokens);
    const auto rows_of = [&](index_t first_head) {
      return ssmax::View<const float, 3>(qkv_.data() + first_head * shape_.head_width,
                                         {rows, shape_.kv_heads, shape_.head_width},
                                         {shape_.qkv_width(), shape_.head_width, 1});
    };
    cache.append(rows_of(shape_.heads), rows_of(shape_.heads + shape_.kv_heads), step.sequences,
                 &model_.rope());
    const auto start = Clock::now();
    if (calls_ == Calls::batched) {
      attend_batched(step, cache, scaling, plan);
    } else {
      attend_one_by_one(step, cache, scaling);
    }
    attention_seconds_ += seconds_since(start);
  }

  // The caches of all layers have the same lengths, so the plan of the first layer serves the other layers.
  void attend_batched(const Step& step, const Cache& cache, const ssmax::SSMax<float>& scaling,
                      std::optional<Plan>& plan) {
    const Arguments tensors = arguments(cache.source(step.ids), 0, std::ssize(step.tokens));
    if (!plan) {
      Arguments example = tensors;
      example.rope = &model_.rope();
      example.batch_invariant = true;
      example.lengths = ssmax::SequenceLengths::packed_queries(step.cumulative);
      plan.emplace(example, pool_.concurrency(), ssmax::Causal{});
    }
    const std::span memory(workspace_.reserve(plan->bytes()), plan->bytes());
    plan->run(tensors, memory, scaling, pool_);
  }

  void attend_one_by_one(const Step& step, const Cache& cache, const ssmax::SSMax<float>& scaling) {
    for (std::size_t b = 0; b < step.ids.size(); ++b) {
      const index_t first = step.cumulative[b];
      Arguments call =
          arguments(cache.source(std::span(step.ids).subspan(b, 1)), first, step.cumulative[b + 1] - first);
      call.rope = &model_.rope();
      call.workspace = &workspace_;
      call.batch_invariant = true;
      ssmax::attention(call, scaling, ssmax::Causal{}, pool_);
    }
  }

  // Returns the tensors of `count` tokens from `first` on.
  Arguments arguments(ssmax::Keys<float> source, index_t first, index_t count) {
    const ssmax::View<const float, 2> q(qkv_.data() + first * shape_.qkv_width(), {count, shape_.width()},
                                        {shape_.qkv_width(), 1});
    const ssmax::View<float, 2> out(heads_.data() + first * shape_.width(), {count, shape_.width()});
    return {.q = ssmax::heads_view(q, shape_.heads),
            .keys = std::move(source),
            .out = ssmax::heads_view(out, shape_.heads)};
  }

  std::vector<Next> likeliest(const Step& step) {
    const auto sequences = std::ssize(step.ids);
    added_.setZero(padded(sequences), shape_.width());
    for (index_t b = 0; b < sequences; ++b)
      added_.row(b) = x_.row(step.cumulative[static_cast<std::size_t>(b) + 1] - 1);
    norm_.forward(added_, normal_);
    multiply(normal_, model_.head(), logits_);
    std::vector<Next> result(step.ids.size());
    for (index_t b = 0; b < sequences; ++b) {
      Next& next = result[static_cast<std::size_t>(b)];
      next.logit = logits_.row(b).maxCoeff(&next.token);
    }
    return result;
  }

  const ServedModel& model_;
  const ModelShape shape_;
  const Calls calls_;
  ssmax::ThreadPool& pool_;
  ssmax::Workspace workspace_;
  RmsNorm norm_;
  Matrix x_, normal_, qkv_, heads_, inner_, added_, logits_;
  double attention_seconds_ = 0, shared_sequences_ = 0;
};

}  // namespace examples
