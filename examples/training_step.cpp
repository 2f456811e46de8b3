// Trains a small model from random weights, with an s and a b per head. Two layers of causal attention with
// RoPE are trained in seconds to find the word that followed the last occurrence of a word. The task needs both
// layers: one layer finds the previous word, the other finds the earlier occurrence (an induction head).
//
//   forward    embedding, 2 × (normalise, q, k, v, ssmax::attention, add), normalise, head: logits
//   loss       ssmax::cross_entropy replaces the logits by their gradient
//   backward   the same steps in reverse, with ssmax::attention_backward; it adds to the gradients of s and b
//   update     AdamW, without weight decay of s and b
//
// `Model<ssmax::SSMax<float>>` and `Model<ssmax::Softmax>` differ only in the scaling. A sequence contains
// pairs of different words, and then the same pairs again. In a retrieval sequence the second copy is
// shuffled, and the model must name the second word of each pair. In a copy sequence the order is the same,
// and the model must name every word. The last table tests contexts that are longer than the training
// contexts.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <span>
#include <ssmax/attention_backward.hpp>
#include <ssmax/cross_entropy.hpp>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.hpp"
#include "layers.hpp"

namespace {

using examples::Linear, examples::Matrix, examples::Parameter, examples::Random, examples::RmsNorm;
using ssmax::index_t, ssmax::View;

constexpr index_t kLayers = 2, kHeads = 2, kHeadWidth = 32, kWidth = kHeads * kHeadWidth;
constexpr index_t kWords = 128;
constexpr index_t kFewestPairs = 4, kMostPairs = 16;  // pairs of a training sequence
constexpr index_t kLongest = 4;     // longest context of the evaluation, in training contexts
constexpr index_t kSequences = 32;  // sequences of a batch
constexpr index_t kIgnored = -100;  // target of a word that the model cannot predict
constexpr double kRate = 1e-2, kDecay = 0.2;
// s and b affect all of attention, so their learning rate is smaller.
constexpr double kScalingRate = 1e-3;
constexpr int kCheckSteps = 400;
constexpr double kCheckFactor = 10;

struct Options {
  int steps = 1000;
  std::uint64_t seed = 1;
  index_t threads = std::clamp<index_t>(std::thread::hardware_concurrency(), 1, 2);
  bool softmax = false;
  bool check = false;
};

// ---- The task. ------------------------------------------------------------------------------------------

struct Batch {
  index_t sequences, length;
  std::vector<index_t> words, targets;  // [sequence, position]
};

Batch draw_batch(index_t retrieving, index_t copying, index_t pairs, Random& random) {
  Batch batch{retrieving + copying, 4 * pairs, {}, {}};
  std::vector<index_t> words(static_cast<std::size_t>(kWords)), order(static_cast<std::size_t>(pairs));
  const auto add = [&](index_t word, index_t target) {
    batch.words.push_back(word), batch.targets.push_back(target);
  };
  for (index_t sequence = 0; sequence < batch.sequences; ++sequence) {
    const bool copies = sequence >= retrieving;
    std::iota(words.begin(), words.end(), index_t{0});
    std::iota(order.begin(), order.end(), index_t{0});
    examples::shuffle(words, random);
    if (!copies) examples::shuffle(order, random);
    for (const index_t word : std::span(words).first(2 * order.size())) add(word, kIgnored);
    for (const index_t i : order) {
      const auto pair = std::span(words).subspan(2 * static_cast<std::size_t>(i));
      add(pair[0], pair[1]);
      add(pair[1], copies && i + 1 < pairs ? pair[2] : kIgnored);
    }
  }
  return batch;
}

// ---- The model. -----------------------------------------------------------------------------------------

// A scaling and the parameters of one layer. Without a specialisation the scaling has no parameters.
template <class Scaling>
struct Learnt {
  Scaling forward() const { return {}; }
  Scaling backward() { return {}; }
  std::vector<Parameter*> parameters() { return {}; }
};

template <>
struct Learnt<ssmax::SSMax<float>> {
  Parameter s{Matrix::Constant(1, kHeads, 0.25f), kScalingRate,
              0};  // s·ln n is about 1 at the training lengths
  Parameter b{Matrix::Zero(1, kHeads), kScalingRate, 0};

  ssmax::SSMax<float> forward() const {
    return ssmax::SSMax<float>{std::span<const float>(s.value.data(), kHeads),
                               std::span<const float>(b.value.data(), kHeads)};
  }
  ssmax::SSMaxGradient<float> backward() {
    return forward().gradient({s.gradient.data(), kHeads}, {b.gradient.data(), kHeads});
  }
  std::vector<Parameter*> parameters() { return {&s, &b}; }
};

// RoPE rotates a quarter of a head's channels; the other channels compare words. The longest wavelength, 35
// words, is shorter than the training contexts, so longer contexts contain no new angle.
ssmax::Rope<float> make_rope() { return {{.width = kHeadWidth / 4, .theta = 10}, kLongest * 4 * kMostPairs}; }

// Computes x += attention(normalised x). x is the residual stream.
template <class Scaling>
struct Layer {
  RmsNorm norm;
  Linear query, key, value, out;
  Learnt<Scaling> scaling;
  Matrix normal, q, k, v, heads, lse, added;  // of the last forward; input of backward

  explicit Layer(Random& random)
      : query(kWidth, kWidth, kRate, kDecay, random),
        key(kWidth, kWidth, kRate, kDecay, random),
        value(kWidth, kWidth, kRate, kDecay, random),
        out(kWidth, kWidth, kRate, kDecay, random) {}

  // Returns the view [batch, head, position, channel] of a matrix of tokens.
  static View<float, 4> by_heads(Matrix& tokens, const Batch& batch) {
    return {tokens.data(),
            {batch.sequences, kHeads, batch.length, kHeadWidth},
            {batch.length * kWidth, kHeadWidth, kWidth, 1}};
  }
  View<float, 3> lse_view(const Batch& batch) {
    return {lse.data(), {batch.sequences, kHeads, batch.length}};
  }

  void forward(Matrix& x, const Batch& batch, const ssmax::Rope<float>& rope, ssmax::ThreadPool& pool) {
    norm.forward(x, normal);
    query.forward(normal, q, pool);
    key.forward(normal, k, pool);
    value.forward(normal, v, pool);
    heads.resize(x.rows(), kWidth);
    lse.resize(batch.sequences * kHeads, batch.length);
    ssmax::attention<float>({.q = by_heads(q, batch),
                             .k = by_heads(k, batch),
                             .v = by_heads(v, batch),
                             .out = by_heads(heads, batch),
                             .lse = lse_view(batch)},
                            scaling.forward(), ssmax::Causal{}, {.rope = &rope}, pool);
    out.forward(heads, added, pool);
    x += added;
  }

  // Replaces dx, the gradient of x after forward, by the gradient of x before forward.
  void backward(Matrix& dx, const Batch& batch, const ssmax::Rope<float>& rope, ssmax::ThreadPool& pool) {
    const Matrix zero = Matrix::Zero(dx.rows(), kWidth);
    Matrix dheads = zero, dq = zero, dk = zero, dv = zero, dnormal = zero;
    out.backward(heads, dx, dheads, pool);
    ssmax::attention_backward<float>({.q = by_heads(q, batch),
                                      .k = by_heads(k, batch),
                                      .v = by_heads(v, batch),
                                      .out = by_heads(heads, batch),
                                      .lse = lse_view(batch)},
                                     {.dout = by_heads(dheads, batch),
                                      .dq = by_heads(dq, batch),
                                      .dk = by_heads(dk, batch),
                                      .dv = by_heads(dv, batch)},
                                     scaling.backward(), ssmax::Causal{}, {.rope = &rope}, pool);
    query.backward(normal, dq, dnormal, pool);
    key.backward(normal, dk, dnormal, pool);
    value.backward(normal, dv, dnormal, pool);
    norm.backward(normal, dnormal, dx);
  }

  std::vector<Parameter*> parameters() {
    std::vector<Parameter*> all = scaling.parameters();
    for (Linear* linear : {&query, &key, &value, &out}) all.push_back(&linear->weights);
    return all;
  }
};

struct Result {
  double loss, accuracy;
};

template <class Scaling>
class Model {
 public:
  Model(Random& random, ssmax::ThreadPool& pool)
      : embedding_(examples::random_matrix(kWords, kWidth, 1, random), kRate, kDecay),
        head_(kWidth, kWords, kRate, kDecay, random),
        pool_(pool) {
    for (index_t i = 0; i < kLayers; ++i) layers_.emplace_back(random);
  }

  // Replaces the logits by the gradient of the loss.
  Result forward(const Batch& batch) {
    x_.resize(batch.sequences * batch.length, kWidth);
    for (index_t i = 0; i < x_.rows(); ++i) x_.row(i) = embedding_.value.row(word(batch, i));
    for (auto& layer : layers_) layer.forward(x_, batch, rope_, pool_);
    norm_.forward(x_, normal_);
    head_.forward(normal_, logits_, pool_);

    index_t right = 0;
    for (index_t i = 0; i < logits_.rows(); ++i) {
      index_t likeliest = 0;
      logits_.row(i).maxCoeff(&likeliest);
      right += likeliest == batch.targets[static_cast<std::size_t>(i)] ? 1 : 0;
    }
    const View<float, 2> rows(logits_.data(), {logits_.rows(), kWords});
    const auto [loss, count] =
        ssmax::cross_entropy<float>(rows, batch.targets, rows, {.ignored = kIgnored}, pool_);
    return {loss, static_cast<double>(right) / static_cast<double>(count)};
  }

  // Requires a forward with the same batch.
  void backward(const Batch& batch) {
    for (Parameter* parameter : parameters()) parameter->gradient.setZero();
    const Matrix zero = Matrix::Zero(x_.rows(), kWidth);
    Matrix dnormal = zero, dx = zero;
    head_.backward(normal_, logits_, dnormal, pool_);
    norm_.backward(normal_, dnormal, dx);
    for (auto layer = layers_.rbegin(); layer != layers_.rend(); ++layer) {
      layer->backward(dx, batch, rope_, pool_);
    }
    for (index_t i = 0; i < dx.rows(); ++i) embedding_.gradient.row(word(batch, i)) += dx.row(i);
  }

  std::vector<Parameter*> parameters() {
    std::vector<Parameter*> all{&embedding_, &head_.weights};
    for (auto& layer : layers_) {
      for (Parameter* parameter : layer.parameters()) all.push_back(parameter);
    }
    return all;
  }

  void print_scalings(const char* when) const {
    if constexpr (std::is_same_v<Scaling, ssmax::SSMax<float>>) {
      for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
        const auto& [s, b] = layers_[layer].scaling;
        for (index_t head = 0; head < kHeads; ++head) {
          std::printf("%s, layer %zu, head %td: s %6.3f, b %6.3f\n", when, layer + 1, head + 1,
                      static_cast<double>(s.value(0, head)), static_cast<double>(b.value(0, head)));
        }
      }
    }
  }

 private:
  static index_t word(const Batch& batch, index_t token) {
    return batch.words[static_cast<std::size_t>(token)];
  }

  Parameter embedding_;  // [word, width]
  std::vector<Layer<Scaling>> layers_;
  RmsNorm norm_;
  Linear head_;
  ssmax::Rope<float> rope_ = make_rope();
  ssmax::ThreadPool& pool_;
  Matrix x_, normal_, logits_;
};

// ---- Training and evaluation. ---------------------------------------------------------------------------

// Returns the factor of the learning rate: it rises during the first 50 steps and falls during the last two
// thirds.
double schedule(int step, int steps) {
  const double left = 1 - static_cast<double>(step) / steps;
  return std::min({1.0, step / 50.0, 1.5 * left + 0.01});
}

template <class Scaling>
Result train_step(Model<Scaling>& model, int step, int steps, Random& random) {
  const index_t pairs = kFewestPairs + random.below(kMostPairs - kFewestPairs + 1);
  const Batch batch = draw_batch(kSequences / 2, kSequences / 2, pairs, random);
  const Result result = model.forward(batch);
  model.backward(batch);
  for (Parameter* parameter : model.parameters()) parameter->update(step, schedule(step, steps));
  return result;
}

// Returns the loss of the first step.
template <class Scaling>
double train(Model<Scaling>& model, int steps, Random& random) {
  using Clock = std::chrono::steady_clock;
  std::printf("%6s %9s %10s %9s %10s\n", "step", "loss", "accuracy", "steps/s", "left");
  const auto start = Clock::now();
  const int every = std::max(1, steps / 10);
  Result first{}, sum{};
  for (int step = 1, summed = 0; step <= steps; ++step) {
    const Result result = train_step(model, step, steps, random);
    if (step == 1) first = result;
    sum.loss += result.loss, sum.accuracy += result.accuracy, ++summed;
    if (step > 1 && step % every != 0 && step != steps) continue;
    const double rate = step / std::chrono::duration<double>(Clock::now() - start).count();
    std::printf("%6d %9.4f %8.1f %% %9.1f %8.0f s\n", step, sum.loss / summed, 100 * sum.accuracy / summed,
                rate, (steps - step) / rate);
    std::fflush(stdout);
    sum = {}, summed = 0;
  }
  return first.loss;
}

// Returns the loss of retrieval at the longest training context.
template <class Scaling>
double evaluate(Model<Scaling>& model, Random& random) {
  std::printf("\n%8s %8s %22s %22s\n", "context", "words", "retrieve", "copy");
  double trained = 0;
  for (index_t factor = 1; factor <= kLongest; factor *= 2) {
    const index_t pairs = factor * kMostPairs, sequences = 2 * kSequences;
    const Result retrieve = model.forward(draw_batch(sequences, 0, pairs, random));
    const Result copy = model.forward(draw_batch(0, sequences, pairs, random));
    std::printf("%7tdx %8td %10.4f  %8.1f %% %10.4f  %8.1f %%\n", factor, 4 * pairs, retrieve.loss,
                100 * retrieve.accuracy, copy.loss, 100 * copy.accuracy);
    if (factor == 1) trained = retrieve.loss;
  }
  return trained;
}

template <class Scaling>
int run(const Options& options) {
  const int steps = options.check ? std::min(options.steps, kCheckSteps) : options.steps;
  Random random(options.seed);
  ssmax::ThreadPool pool(options.threads);
  Model<Scaling> model(random, pool);

  model.print_scalings("before");
  const double before = train(model, steps, random);
  model.print_scalings("after");
  const double after = evaluate(model, random);
  if (!options.check) return EXIT_SUCCESS;
  examples::Check check;
  check.holds("the loss fell to a tenth", after < before / kCheckFactor);
  return check.exit_code();
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Trains a small model from nothing to retrieve and to copy, with attention by SSMax or Softmax."};
  app.add_option("--steps", options.steps)->capture_default_str()->check(CLI::Range(1, 1'000'000));
  app.add_option("--seed", options.seed, "Of the model and of the task")->capture_default_str();
  app.add_option("--threads", options.threads)->capture_default_str()->check(CLI::Range(1, 1024));
  app.add_flag("--softmax", options.softmax, "Softmax in place of SSMax");
  app.add_flag("--check", options.check, "Train for a short time, and fail unless the loss fell to a tenth");
  CLI11_PARSE(app, argc, argv);
  try {
    return options.softmax ? run<ssmax::Softmax>(options) : run<ssmax::SSMax<float>>(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "training_step: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
