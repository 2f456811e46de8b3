// The page that puts the paper's claims beside what was measured.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "claims.hpp"

namespace longcontext {

namespace detail {

inline std::string number(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

// The mean over seeds, and from which to which.
inline std::string spread(const std::vector<const Run*>& runs, const Quantity& quantity, const char* format) {
  std::vector<double> values;
  for (const Run* run : runs) values.push_back(quantity(*run));
  const auto [least, most] = std::ranges::minmax(values);
  return number(format, mean_over(runs, quantity)) + " (" + number(format, least) + " – " +
         number(format, most) + ")";
}

inline std::string claims_table(const Results& results, int figure) {
  std::string text =
      "\n| the paper's claim | measured as | mean over the seeds ± its standard error | "
      "|\n|---|---|---|---|\n";
  bool any = false;
  for (const Claim& claim : claims(results)) {
    if (claim.figure != figure) continue;
    any = true;
    text += "| " + claim.text + " | " + claim.measure + " | " + number("%+.4f", claim.measured.mean) + " ± " +
            number("%.4f", claim.measured.error) + " | **" + claim.measured.verdict() + "** |\n";
  }
  return any ? text : "";
}

inline std::string picture(int figure, const std::string& title) {
  const std::string name = "paper/figure_" + std::to_string(figure);
  return "\n## Figure " + std::to_string(figure) + ": " + title + "\n\n![" + title + "](" + name +
         ".png)\n\n([" + "numbers](" + name + ".csv), [SVG](" + name + ".svg))\n";
}

inline std::string setup(const Results& results, const Corpus& corpus, const std::string& text_name) {
  const Plan& plan = results.plan;
  const Model model(plan.shape, Form::softmax, plan.training.length);
  const auto tokens =
      static_cast<double>(plan.training.steps * plan.training.sequences * plan.training.length);
  std::string text =
      "A decoder of " + std::to_string(plan.shape.layers) + " layers with " +
      std::to_string(plan.shape.heads) + " heads of " + std::to_string(plan.shape.head_width) + ", width " +
      std::to_string(plan.shape.width()) + ", SwiGLU of " + std::to_string(plan.shape.hidden) +
      ", RoPE with θ = " + number("%g", plan.shape.theta) + ", " + std::to_string(plan.shape.vocabulary) +
      " byte-pair tokens and an embedding that is the head as well: " +
      number("%.2f", static_cast<double>(model.layout().size()) / 1e6) +
      " million weights. Text: " + text_name + ", " +
      number("%.1f", static_cast<double>(corpus.bytes) / 1e6) + " MB in " + std::to_string(corpus.files) +
      " files, " + number("%.2f", static_cast<double>(corpus.train.size()) / 1e6) +
      " million tokens to train on and " + number("%.2f", static_cast<double>(corpus.test.size()) / 1e6) +
      " to test. Every run: " + std::to_string(plan.training.steps) + " updates of " +
      std::to_string(plan.training.sequences) + " sequences of " + std::to_string(plan.training.length) +
      " tokens, " + number("%.1f", tokens / 1e6) + " million in all, of which a part of " +
      number("%g", plan.training.needle_part) +
      " hides a needle and asks for it (learnt from the answer's digits alone, as in fine-tuning). AdamW "
      "(0.9, 0.95), decay " +
      number("%g", plan.training.decay) + " on matrices, clip " + number("%g", plan.training.clip) +
      ", rates as below. (f) leaves (a) after " + number("%g", 100 * plan.switch_part) +
      " % of the updates. Contexts are evaluated with θ × " + number("%g", plan.extent.theta_factor) + ".\n";
  text +=
      "\nEvery configuration tried the same rates for " + std::to_string(plan.sweep_steps) +
      " updates and keeps the one with the lowest training loss at the end ((e) and (f) have (a)'s):\n\n| |";
  for (const double rate : plan.rates) text += " " + number("%g", rate) + " |";
  text += "\n|---|";
  for (std::size_t i = 0; i < plan.rates.size(); ++i) text += "---|";
  for (std::size_t i = 0; i < results.trials.size(); ++i) {
    const Trial& trial = results.trials[i];
    if (i % plan.rates.size() == 0)
      text += "\n| " + std::string(configuration(trial.configuration).title) + " |";
    bool is_best = true;
    for (const Trial& other : results.trials) {
      if (other.configuration == trial.configuration && other.loss < trial.loss) is_best = false;
    }
    text += is_best ? " **" + number("%.4f", trial.loss) + "** |" : " " + number("%.4f", trial.loss) + " |";
  }
  return text + "\n";
}

inline std::string summary(const Results& results) {
  const Quantities q = quantities(results.plan);
  std::string text =
      "\n| mean (least – most of the seeds) | training loss, text | test loss within the trained length | "
      "beyond 4 × that "
      "| needles found within the trained length | beyond it |\n|---|---|---|---|---|---|\n";
  for_each_evaluated([&](const Configuration& each) {
    const auto runs = results.of(each.name);
    text += "| " + std::string(each.title);
    for (const Quantity& quantity : {q.training_loss, q.near_loss, q.far_loss})
      text += " | " + spread(runs, quantity, "%.3f");
    for (const Quantity& quantity : {q.found_near, q.found_far})
      text += " | " + spread(runs, quantity, "%.2f");
    text += " |\n";
  });
  return text;
}

}  // namespace detail

inline std::string page(const Results& results, const Corpus& corpus, const std::string& text_name,
                        const std::string& command) {
  using detail::number, detail::picture, detail::claims_table;
  const Fit fit = fit_to_logarithm(results.of("table").front()->evaluation.p);
  const std::string seeds = std::to_string(results.plan.seeds.size());
  std::string text =
      "# The paper in miniature\n\nWritten by `" + command +
      "`: six small transformers, trained by this library alone, against the claims of "
      "[Scalable-Softmax Is Superior for Attention](https://arxiv.org/abs/2501.19399). All six had the same "
      "budget, the same " +
      seeds +
      " seeds and the same rates to choose from; nothing was set for one of them.\n\n"
      "A claim *holds* (*does not hold*) if all seeds agree on its sign and the mean is over two standard "
      "errors from 0; "
      "otherwise the difference is *too small to tell* here. The model is a thousandth of the paper's and "
      "saw a "
      "millionth of its tokens: what holds here is evidence, what does not is none against the paper.\n\n";
  text += "## What was trained\n\n" + detail::setup(results, corpus, text_name);
  text += "\n## In one table\n" + detail::summary(results);

  text += picture(1, "attention fading") +
          "\nOf n logits all are −2 but one, which is +3. The library's functors on both curves; nothing is "
          "trained. Under "
          "Softmax the one's probability goes to 0 as n grows, under SSMax to 1: **holds**, by arithmetic.\n";
  text += picture(2, "the multiplier that is learnt for every size") +
          "\nWith the multiplier s·p_n + b and a p_n of its own for every n, the paper found p_n ≈ a₁ ln n + "
          "a₂. Here: a₁ = " +
          number("%.3f", fit.slope) + ", a₂ = " + number("%.3f", fit.intercept) +
          ", R² = " + number("%.3f", fit.r2) + " over n = 2 … " +
          std::to_string(results.plan.training.length) + ", one seed: **" +
          (fit.r2 >= 0.9 && fit.slope > 0 ? "holds"
           : fit.slope > 0                ? "holds in direction only"
                                          : "does not hold") +
          "** (R² of 0.9 or more is called a logarithm).\n";
  text += picture(3, "how large a logit must be") +
          "\nThe others lie evenly between 0 and 1. Softmax asks for a larger z_max the more there are; "
          "SSMax for no more than 1 + "
          "1/s, whatever n: **holds**, by arithmetic.\n";
  text += picture(4, "learning curves") + claims_table(results, 4);
  text += picture(5, "loss at each position") + claims_table(results, 5);
  text += picture(6, "a needle in a haystack") + "\nGreedy decoding, all seven digits right; " +
          std::to_string(results.plan.extent.trials) + " × " + seeds +
          " trials a cell, texts that were not trained on.\n" + claims_table(results, 6);
  text += picture(7, "needle scores of heads") + "\nThe paper's needle in the middle of a context of " +
          std::to_string(results.plan.extent.scored_context) +
          " × the trained length. A head's score is the attention that the queries which produce the "
          "answer's digits spend on the "
          "needle's sentence; the paper's own formula was not at hand.\n" +
          claims_table(results, 7);
  text += picture(8, "best needle scores of single trials") +
          "\nRandom city, number and depth, the same context; the picture is of the first seed.\n" +
          claims_table(results, 8);
  return text;
}

}  // namespace longcontext
