// Evaluates a trained model in contexts longer than the training contexts: the loss at every position, the
// needles that it finds, and the attention of its heads on the needles. The evaluation may use a larger
// RoPE θ.
#pragma once

#include <algorithm>
#include <nlohmann/json.hpp>
#include <ssmax/cross_entropy.hpp>
#include <ssmax/execution.hpp>
#include <vector>

#include "../progress.hpp"
#include "model.hpp"
#include "needle.hpp"

namespace longcontext {

// The extent of an evaluation. Contexts are multiples of the trained length.
struct Extent {
  std::vector<index_t> contexts{1, 2, 4, 6, 8, 12, 16};
  index_t depths = 5;    // from 0 to 1, both included
  index_t trials = 8;    // per context and depth
  index_t windows = 48;  // windows of text for the loss per position
  index_t scored = 100;  // needles whose attention is measured, at this context:
  index_t scored_context = 8;

  bool operator==(const Extent&) const = default;
  // Returns the longest context in tokens, for a model with this trained length.
  index_t longest(index_t trained) const { return trained * std::ranges::max(contexts); }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Extent, contexts, depths, trials, windows, scored, scored_context)

// The number of right answers, with greedy decoding.
struct NeedleCell {
  index_t context;
  double depth;
  index_t trials, right;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(NeedleCell, context, depth, trials, right)

struct ScoredNeedle {
  double best_score;  // largest score of all heads
  index_t digits;     // right digits before the first wrong one
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ScoredNeedle, best_score, digits)

// Returns the number of texts for score_heads.
inline index_t scored_texts(const Extent& extent) { return std::max<index_t>(1, extent.scored / 10); }

// needle_flops returns the FLOP of the needles, evaluation_flops the FLOP of the whole evaluation of a
// model.
inline double needle_flops(const Model& model, index_t trained, const Extent& extent) {
  double flops = 0;
  for (const index_t multiple : extent.contexts) {
    flops += static_cast<double>(extent.depths * extent.trials) * model.flops(multiple * trained);
  }
  return flops;
}

inline double evaluation_flops(const Model& model, index_t trained, const Extent& extent) {
  const double windows = static_cast<double>(extent.windows) * model.flops(extent.longest(trained));
  const double scores = static_cast<double>(extent.scored + scored_texts(extent)) *
                        model.flops(extent.scored_context * trained);
  return windows + 2 * needle_flops(model, trained, extent) + scores;
}

class Evaluator {
 public:
  // `trained` is the model's trained length. The same seed uses the same needles in the same texts.
  Evaluator(const Model& model, std::span<const float> weights, double theta_factor, const Corpus& corpus,
            index_t trained, const Extent& extent, std::uint64_t seed, ssmax::ThreadPool& pool)
      : model_(model),
        weights_(weights),
        corpus_(corpus),
        trained_(trained),
        extent_(extent),
        seed_(seed),
        pool_(pool),
        rope_(model.rope(extent.longest(trained), theta_factor)) {}

  // Returns the mean loss per position, over adjacent windows of the test text. Uses fewer windows if the
  // text is short.
  std::vector<double> position_loss() const {
    const index_t length = extent_.longest(trained_);
    const auto available = (static_cast<index_t>(corpus_.test.size()) - 1) / length;
    const index_t windows = std::min(extent_.windows, available);
    Matrix losses(windows, length);
    pool_.run(windows, [&](index_t window) {
      const std::span text =
          std::span(corpus_.test)
              .subspan(static_cast<std::size_t>(window * length), static_cast<std::size_t>(length + 1));
      Activations a;
      model_.forward(weights_, text.first(text.size() - 1), rope_, a);
      for (index_t i = 0; i < length; ++i) {
        const ssmax::View<const float, 2> row(a.logits.row(i).data(), {1, a.logits.cols()});
        const auto wanted = text.subspan(static_cast<std::size_t>(i + 1), 1);
        losses(window, i) = static_cast<float>(ssmax::cross_entropy<float>(row, wanted).loss);
      }
    });
    std::vector<double> mean(static_cast<std::size_t>(length));
    for (index_t i = 0; i < length; ++i) {
      mean[static_cast<std::size_t>(i)] = losses.col(i).cast<double>().mean();
    }
    return mean;
  }

  std::vector<NeedleCell> needles() const {
    std::vector<NeedleCell> cells;
    examples::Progress progress(needle_flops(model_, trained_, extent_));
    for (const index_t multiple : extent_.contexts) {
      for (index_t i = 0; i < extent_.depths; ++i) {
        const double depth = static_cast<double>(i) / static_cast<double>(extent_.depths - 1);
        cells.push_back(needles(multiple * trained_, depth));
        progress.advance(static_cast<double>(extent_.trials) * model_.flops(multiple * trained_));
      }
    }
    return cells;
  }

  // Scores heads on needles. A head's score is its attention on the needle's sentence, as the mean over the
  // queries that produce the answer's digits.
  std::vector<ScoredNeedle> score_needles() const {
    const index_t context = extent_.scored_context * trained_;
    std::vector<ScoredNeedle> all(static_cast<std::size_t>(extent_.scored));
    pool_.run(extent_.scored, [&](index_t trial) {
      examples::Random random = draw(context, 1001, trial);
      const std::string city = draw_city(random), number = draw_number(random);
      Activations a;
      const NeedleDocument document = hide(context, random.unit(), city, number, random);
      const index_t digits = answer(document, a);
      const auto scores = head_scores(document, a);
      all[static_cast<std::size_t>(trial)] = {static_cast<double>(std::ranges::max(scores)), digits};
    });
    return all;
  }

  // Returns the score of every head for the paper's own needle at half depth, as the mean over texts.
  std::vector<double> score_heads() const {
    const index_t context = extent_.scored_context * trained_, texts = scored_texts(extent_);
    const auto heads = static_cast<std::size_t>(model_.shape().layers * model_.shape().heads);
    std::vector<std::vector<float>> all(static_cast<std::size_t>(texts));
    pool_.run(texts, [&](index_t i) {
      examples::Random random = draw(context, 1002, i);
      Activations a;
      const NeedleDocument document = hide(context, 0.5, "Tokyo", "8106422", random);
      answer(document, a);
      all[static_cast<std::size_t>(i)] = head_scores(document, a);
    });
    std::vector<double> mean(heads);
    for (const auto& scores : all) {
      for (std::size_t h = 0; h < heads; ++h)
        mean[h] += static_cast<double>(scores[h]) / static_cast<double>(texts);
    }
    return mean;
  }

 private:
  NeedleCell needles(index_t context, double depth) const {
    std::vector<index_t> digits(static_cast<std::size_t>(extent_.trials));
    pool_.run(extent_.trials, [&](index_t trial) {
      examples::Random random = draw(context, std::lround(1000 * depth), trial);
      const std::string city = draw_city(random), number = draw_number(random);
      Activations a;
      digits[static_cast<std::size_t>(trial)] = answer(hide(context, depth, city, number, random), a);
    });
    return {context, depth, extent_.trials, std::ranges::count(digits, kDigits)};
  }

  examples::Random draw(index_t context, index_t kind, index_t trial) const {
    return examples::Random(checksum(std::to_string(seed_) + " " + std::to_string(context) + " " +
                                     std::to_string(kind) + " " + std::to_string(trial)));
  }

  NeedleDocument hide(index_t context, double depth, const std::string& city, const std::string& number,
                      examples::Random& random) const {
    return hide_needle(Needle(corpus_.tokenizer, city, number), corpus_.test, context, depth, random);
  }

  // Returns the number of right digits before the first wrong one. The document contains the right digits.
  // One forward equals greedy decoding as long as the model's own digits are right.
  index_t answer(const NeedleDocument& document, Activations& a) const {
    model_.forward(weights_, document.tokens, rope_, a);
    for (index_t digit = 0; digit < kDigits; ++digit) {
      index_t likeliest = 0;
      a.logits.row(document.answer - 1 + digit).maxCoeff(&likeliest);
      if (likeliest != document.tokens[static_cast<std::size_t>(document.answer + digit)]) return digit;
    }
    return kDigits;
  }

  std::vector<float> head_scores(const NeedleDocument& document, Activations& a) const {
    return model_.attention_on(weights_, rope_, a, document.needle, document.needle_size, document.answer - 1,
                               kDigits);
  }

  const Model& model_;
  std::span<const float> weights_;
  const Corpus& corpus_;
  index_t trained_;
  Extent extent_;
  std::uint64_t seed_;
  ssmax::ThreadPool& pool_;
  ssmax::Rope<float> rope_;
};

// Throws if the text is too short for training or evaluation.
inline void check_text(const Corpus& corpus, index_t trained, const Extent& extent) {
  const auto test = static_cast<index_t>(corpus.test.size());
  const index_t longest = extent.longest(trained), needle = longest_needle(corpus.tokenizer);
  require(test > longest, "the text leaves " + std::to_string(test) +
                              " tokens for tests, where a context takes " + std::to_string(longest) +
                              "; use more text");
  require(needle <= trained * std::ranges::min(extent.contexts),
          "a needle and its question take up to " + std::to_string(needle) +
              " tokens, more than a context of " + std::to_string(trained) +
              "; use longer ones, or a larger vocabulary");
}

}  // namespace longcontext
