// Trains a small model from random weights, with an s and a b per head. Two layers of causal attention with
// RoPE are trained in seconds to find the word that followed the last occurrence of a word. The task needs both
// layers: one layer finds the previous word, the other finds the earlier occurrence (an induction head).
//
// The model and its training are in model.hpp. `Model<ssmax::SSMax<float>>` and `Model<ssmax::Softmax>` differ
// only in the scaling. A sequence contains pairs of different words, and then the same pairs again. In a
// retrieval sequence the second copy is shuffled, and the model must name the second word of each pair. In a
// copy sequence the order is the same, and the model must name every word. The last table tests contexts that
// are longer than the training contexts.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <span>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.hpp"
#include "model.hpp"

namespace {

using examples::Batch, examples::kIgnored, examples::Model, examples::Random, examples::Result;
using ssmax::index_t;

constexpr index_t kWords = 128;
constexpr index_t kFewestPairs = 4, kMostPairs = 16;  // pairs of a training sequence
constexpr index_t kLongest = 4;     // longest context of the evaluation, in training contexts
constexpr index_t kSequences = 32;  // sequences of a batch
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

// RoPE rotates a quarter of a head's channels; the other channels compare words. The longest wavelength, 35
// words, is shorter than the training contexts, so longer contexts contain no new angle.
const examples::ModelShape kShape{.layers = 2,
                                  .heads = 2,
                                  .kv_heads = 2,
                                  .head_width = 32,
                                  .inner = 0,
                                  .words = kWords,
                                  .rope = {.width = 8, .theta = 10},
                                  .longest = kLongest * 4 * kMostPairs,
                                  .rate = 1e-2,
                                  .decay = 0.2};

template <class Scaling>
void print_scalings(const char* when, const Model<Scaling>& model) {
  if constexpr (std::is_same_v<Scaling, ssmax::SSMax<float>>) {
    for (std::size_t layer = 0; layer < model.layers().size(); ++layer) {
      const auto& [s, b] = model.layers()[layer].attention.scaling;
      for (index_t head = 0; head < kShape.heads; ++head) {
        std::printf("%s, layer %zu, head %td: s %6.3f, b %6.3f\n", when, layer + 1, head + 1,
                    static_cast<double>(s.value(0, head)), static_cast<double>(b.value(0, head)));
      }
    }
  }
}

// ---- Training and evaluation. ---------------------------------------------------------------------------

template <class Scaling>
Result train_step(Model<Scaling>& model, int step, int steps, Random& random) {
  const index_t pairs = kFewestPairs + random.below(kMostPairs - kFewestPairs + 1);
  const Batch batch = draw_batch(kSequences / 2, kSequences / 2, pairs, random);
  return model.train(batch, step, steps);
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
  Model<Scaling> model(kShape, random, pool);

  print_scalings("before", model);
  const double before = train(model, steps, random);
  print_scalings("after", model);
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
