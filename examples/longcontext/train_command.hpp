// The command `train` and its options.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>

#include "evaluation.hpp"
#include "training_run.hpp"

namespace longcontext {

struct TrainOptions {
  std::filesystem::path text, checkpoint;
  std::string configuration = "b";
  index_t threads = std::clamp<index_t>(std::thread::hardware_concurrency(), 1, 8);
  bool saves = true;  // true if the process writes checkpoints
  Shape shape;
  Training training;
};

inline Corpus corpus_of(const TrainOptions& options, index_t vocabulary) {
  Corpus corpus = read_corpus(options.text, vocabulary);
  std::printf("%s: %zu files, %zu bytes, %zu tokens to train on, %zu to test\n\n",
              options.text.string().c_str(), corpus.files, corpus.bytes, corpus.train.size(),
              corpus.test.size());
  return corpus;
}

inline void run_train(const TrainOptions& options) {
  ssmax::ThreadPool pool(options.threads);
  const Configuration& of = configuration(options.configuration);
  if (of.origin != Origin::scratch)
    throw std::invalid_argument("(e) and (f) begin with (a); `all` trains them");
  check(options.shape), check(options.training);
  const Corpus corpus = corpus_of(options, options.shape.vocabulary);
  const Model model(options.shape, of.form, options.training.length);
  check_text(corpus, options.training.length, {.contexts = {1}});
  train(options.checkpoint, std::string(of.title), start(of, model, corpus, options.training),
        options.training.steps, model, corpus, pool, options.saves);
}

inline void add_text(CLI::App& command, TrainOptions& options) {
  command.add_option("--text", options.text, "A text file or a folder of them; fetch_text.sh fetches one")
      ->required();
}

inline void add_training(CLI::App& command, TrainOptions& options) {
  command.add_option("--steps", options.training.steps)->capture_default_str();
  command.add_option("--sequences", options.training.sequences, "Of an update")->capture_default_str();
  command.add_option("--needles", options.training.needle_part, "Part of the sequences with a needle")
      ->capture_default_str();
  command.add_option("--rate", options.training.rate)->capture_default_str();
}

inline CLI::App& add_train(CLI::App& app, TrainOptions& options) {
  CLI::App& train =
      *app.add_subcommand("train", "Train one configuration; goes on with the checkpoint if there is one");
  add_text(train, options);
  train.add_option("checkpoint", options.checkpoint)->required();
  train.add_option("--configuration", options.configuration, "a, b, c, d or table")->capture_default_str();
  train.add_option("--length", options.training.length, "Tokens of a sequence")->capture_default_str();
  add_training(train, options);
  train.add_option("--seed", options.training.seed)->capture_default_str();
  train.add_option("--layers", options.shape.layers)->capture_default_str();
  train.add_option("--heads", options.shape.heads)->capture_default_str();
  train.add_option("--head-width", options.shape.head_width)->capture_default_str();
  train.add_option("--hidden", options.shape.hidden, "Width of SwiGLU")->capture_default_str();
  train.add_option("--vocabulary", options.shape.vocabulary, "256 for bytes")->capture_default_str();
  train.add_option("--theta", options.shape.theta, "Of RoPE")->capture_default_str();
  train.add_flag("--tied", options.shape.tied, "The embedding is the head as well");
  return train;
}

}  // namespace longcontext
