// Training. Each sequence of an update has its own forward and backward on one thread. The gradients are
// added in the order of the sequences, so the result does not depend on the number of threads. A sequence
// depends only on the seed, the step and its place in the step, so a stopped training continues exactly.
#pragma once

#include <atomic>
#include <cmath>
#include <set>
#include <ssmax/cross_entropy.hpp>
#include <ssmax/execution.hpp>
#include <vector>

#include "checkpoint.hpp"
#include "model.hpp"
#include "needle.hpp"

namespace longcontext {

// Sums over sequences of the mean loss of text and of the answer's digits.
struct Losses {
  double text = 0, answer = 0;
  index_t texts = 0, answers = 0;

  Losses& operator+=(const Losses& other) {
    text += other.text, answer += other.answer;
    texts += other.texts, answers += other.answers;
    return *this;
  }
  double mean_text() const { return text / static_cast<double>(std::max<index_t>(texts, 1)); }
  double mean_answer() const { return answer / static_cast<double>(std::max<index_t>(answers, 1)); }
};

inline constexpr index_t kIgnored = -100;  // target of a token that is not trained

// A sequence and its targets. In a text, every next token is a target. In a document with a needle only the
// answer is a target, as in fine-tuning on questions; a sequence may contain several such documents.
// Rejected alternative: with all tokens as targets, Softmax and SSMax found no needle in 1000 updates of
// 4096 tokens.
struct Sample {
  Tokens tokens, targets;
  bool has_needle;
};

inline Sample draw_sample(const Corpus& corpus, const Training& training, bool with_needle,
                          examples::Random& random) {
  const index_t count = training.length + 1;
  if (!with_needle) {
    const auto text = draw_text(corpus.train, count, random);
    return {{text.begin(), text.end() - 1}, {text.begin() + 1, text.end()}, false};
  }
  Sample sample{{}, {}, true};
  std::set<std::string> asked;  // each city once, else its number is ambiguous
  for (;;) {
    std::string city = draw_city(random);
    while (!asked.insert(city).second) city = draw_city(random);
    const Needle needle(corpus.tokenizer, city, draw_number(random));
    const index_t left = count - static_cast<index_t>(sample.tokens.size());
    const index_t shortest = needle.size();
    if (left < shortest && !sample.tokens.empty()) {
      const auto rest = draw_text(corpus.train, left, random);
      sample.tokens.insert(sample.tokens.end(), rest.begin(), rest.end());
      break;
    }
    const index_t length = std::min(left, shortest + random.below(std::max<index_t>(1, left - shortest + 1)));
    const NeedleDocument document = hide_needle(needle, corpus.train, length, random.unit(), random);
    const std::size_t answer = sample.tokens.size() + static_cast<std::size_t>(document.answer);
    sample.tokens.insert(sample.tokens.end(), document.tokens.begin(), document.tokens.end());
    sample.targets.resize(answer - 1, kIgnored);
    sample.targets.insert(sample.targets.end(), sample.tokens.end() - kDigits, sample.tokens.end());
  }
  sample.tokens.pop_back();
  sample.targets.resize(sample.tokens.size(), kIgnored);
  return sample;
}

// Returns the FLOP of the forward and backward of all sequences of an update.
inline double step_flops(const Model& model, const Training& training) {
  return 3 * static_cast<double>(training.sequences) * model.flops(training.length);
}

// Trains a model from a state. Steps count from 1.
class Trainer {
 public:
  Trainer(const Model& model, const Corpus& corpus, ssmax::ThreadPool& pool)
      : model_(model), corpus_(corpus), pool_(pool) {}

  Losses step(Checkpoint& state) {
    const Training& training = state.training;
    const index_t lanes = std::min(training.sequences, pool_.concurrency());
    activations_.resize(static_cast<std::size_t>(lanes));
    sequences_.resize(static_cast<std::size_t>(training.sequences));
    if (rope_.positions() < training.length) rope_ = model_.rope(training.length);
    state.step += 1;

    const auto needles =
        static_cast<index_t>(std::lround(training.needle_part * static_cast<double>(training.sequences)));
    // One set of activations per thread, not per sequence: 202 instead of 189 GFLOP/s for four sequences on
    // two threads.
    std::atomic<index_t> next = 0;
    pool_.run(lanes, [&](index_t lane) {
      for (index_t i = next++; i < training.sequences; i = next++) {
        examples::Random random = draw(training.seed, state.step, i);
        run(draw_sample(corpus_, training, i < needles, random), state,
            activations_[static_cast<std::size_t>(lane)], sequences_[static_cast<std::size_t>(i)]);
      }
    });
    std::vector<std::span<float>> gradients;
    for (Sequence& sequence : sequences_) gradients.emplace_back(sequence.gradient);
    const double norm = add_up(gradients, pool_);
    update(model_.layout(), state.weights, gradients.front(), norm, state.averages, training, state.step,
           pool_);
    Losses losses;
    for (const Sequence& sequence : sequences_) losses += sequence.losses;
    return losses;
  }

 private:
  struct Sequence {
    Values gradient;
    Losses losses;
  };

  static examples::Random draw(std::uint64_t seed, index_t step, index_t sequence) {
    constexpr std::uint64_t kSpread = 0x9e3779b97f4a7c15;
    return examples::Random((seed * kSpread + static_cast<std::uint64_t>(step)) * kSpread +
                            static_cast<std::uint64_t>(sequence));
  }

  void run(const Sample& sample, const Checkpoint& state, Activations& a, Sequence& sequence) const {
    const index_t length = state.training.length;
    model_.forward(state.weights, sample.tokens, rope_, a);

    const ssmax::View<float, 2> logits(a.logits.data(), {length, model_.shape().vocabulary});
    const double part = 1 / static_cast<double>(state.training.sequences);
    const double loss =
        ssmax::cross_entropy<float>(logits, sample.targets, logits, {.ignored = kIgnored, .dloss = part})
            .loss;
    sequence.losses =
        sample.has_needle ? Losses{.answer = loss, .answers = 1} : Losses{.text = loss, .texts = 1};
    sequence.gradient.resize(static_cast<std::size_t>(model_.layout().size()));
    model_.backward(state.weights, sample.tokens, rope_, a, sequence.gradient);
  }

  const Model& model_;
  const Corpus& corpus_;
  ssmax::ThreadPool& pool_;
  ssmax::Rope<float> rope_ = model_.rope(1);
  std::vector<Activations> activations_;  // one per thread
  std::vector<Sequence> sequences_;
};

inline Checkpoint start(const Configuration& configuration, const Model& model, const Corpus& corpus,
                        const Training& training) {
  check(training);
  examples::Random random(training.seed);
  Checkpoint state{std::string(configuration.name), model.shape(), training, corpus.identity};
  state.weights = model.layout().initial_values(random);
  state.averages.mean.resize(state.weights.size());
  state.averages.square.resize(state.weights.size());
  return state;
}

}  // namespace longcontext
