// Trains six small transformers that differ only in their scaling, and draws the paper's figures.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>

#include "generation.hpp"
#include "page.hpp"
#include "train_command.hpp"

namespace {

using namespace longcontext;
namespace fs = std::filesystem;

struct Options : TrainOptions {
  fs::path work = "longcontext_study", docs = "docs", extended;
  std::string text_name, budget = "2h", city = "Tokyo", number = "8106422";
  index_t context = 1024;
  double depth = 0.5;
  double theta_factor = 1;
};

// Continues the study in the folder. Without a study there, makes a new plan.
void run_all(const Options& options) {
  ssmax::ThreadPool pool(options.threads);
  const fs::path path = options.work / "plan.json";
  const bool goes_on = fs::exists(path);
  Plan plan = goes_on ? read_json<Plan>(path) : sized_plan(parse_budget(options.budget));
  if (goes_on) check(plan);
  const Corpus corpus = corpus_of(options, plan.shape.vocabulary);
  check_text(corpus, plan.training.length, plan.extent);
  if (goes_on) {
    std::printf("The study in %s, of %s, goes on; another folder begins a new one.\n\n",
                options.work.string().c_str(), plan.budget.c_str());
  } else {
    plan = make_plan(options.budget, corpus, pool);
    write_file(path, nlohmann::json(plan).dump(2) + "\n");
  }
  const Results results = Study(options.work, plan, corpus, pool).run();
  draw_figures(results, options.docs / "paper");
  write_file(options.docs / "paper" / "plan.json", nlohmann::json(plan).dump(2) + "\n");
  const std::string file_name = fs::absolute(options.text / "").parent_path().filename().string();
  const std::string name = options.text_name.empty() ? "`" + file_name + "`" : options.text_name;
  write_file(options.docs / "paper.md", page(results, corpus, name));
  std::printf("Page: %s\n", (options.docs / "paper.md").string().c_str());
}

// A checkpoint, and the text that it was trained on.
struct Trained {
  Checkpoint state;
  Corpus corpus;
  Model model;

  explicit Trained(const Options& options)
      : state(load(options.checkpoint)),
        corpus(corpus_of(options, state.shape.vocabulary)),
        model(state.shape, configuration(state.configuration).form, state.training.length) {
    if (corpus.identity != state.text) {
      throw std::runtime_error(options.checkpoint.string() + " was trained on another text than " +
                               options.text.string());
    }
    if (static_cast<index_t>(state.weights.size()) != model.layout().size()) {
      throw std::runtime_error(options.checkpoint.string() + " has " + std::to_string(state.weights.size()) +
                               " weights, its model " + std::to_string(model.layout().size()));
    }
  }
};

void run_extend(const Options& options) {
  check(options.training);
  ssmax::ThreadPool pool(options.threads);
  const Trained from(options);
  Training extension = options.training;
  extension.length = from.state.training.length;
  const Checkpoint begin = start_extension(from.state, extension, options.theta_factor);
  const Model model(begin.shape, from.model.form(), extension.length);
  train(options.extended, "extension", begin, extension.steps, model, from.corpus, pool);
}

void run_evaluate(const Options& options) {
  ssmax::ThreadPool pool(options.threads);
  const Trained trained(options);
  const Checkpoint& state = trained.state;
  const index_t length = state.training.length;
  if (trained.model.form() == Form::size_table) {
    throw std::invalid_argument("a table of sizes ends at the trained length");
  }
  const Extent extent;
  check_text(trained.corpus, length, extent);
  const Evaluator evaluator(trained.model, state.weights, options.theta_factor, trained.corpus, length,
                            extent, state.training.seed, pool);
  const auto loss = evaluator.position_loss();
  const auto needles = evaluator.needles();
  std::printf("%8s %8s %10s %10s\n", "context", "", "loss", "needles");
  index_t before = 0;
  for (const index_t multiple : extent.contexts) {
    const index_t context = multiple * length;
    std::printf("%8td %7td× %10.4f %8.0f %%\n", context, multiple, loss_between(loss, before, context),
                100 * found_between(needles, context, context));
    before = context;
  }
}

// Puts a needle into a text that the model was not trained on, and prints the model's answer.
void run_ask(const Options& options) {
  const Trained trained(options);
  const Tokenizer& tokenizer = trained.corpus.tokenizer;
  examples::Random random(options.training.seed);
  const NeedleDocument document = hide_needle(Needle(tokenizer, options.city, options.number),
                                              trained.corpus.test, options.context, options.depth, random);
  const auto rope = trained.model.rope(options.context, options.theta_factor);
  const auto print = [&](index_t first, index_t count) {
    const auto size = static_cast<index_t>(document.tokens.size());
    const index_t begin = std::max<index_t>(0, first), end = std::min(first + count, size);
    std::string text = tokenizer.decode({document.tokens.begin() + begin, document.tokens.begin() + end});
    std::replace(text.begin(), text.end(), kBoundary, '\n');  // kBoundary is 0, which would end %s
    std::printf("%s", text.c_str());
  };
  std::printf("%td tokens, the needle is number %td: …", options.context, document.needle);
  print(document.needle - 20, document.needle_size + 40);
  std::printf("…\n\n…");
  print(document.answer - 60, 60);
  const std::span prompt = std::span(document.tokens).first(static_cast<std::size_t>(document.answer));
  const index_t digits = options.context - document.answer;
  std::string said;
  continue_text(trained.model, trained.state.weights, rope, prompt, digits, [&](index_t token) {
    std::printf("%s", tokenizer.spelling(token).c_str());
    std::fflush(stdout);
    said += tokenizer.spelling(token);
  });
  std::printf("\n\n%s\n", said == options.number ? "That is right." : "That is wrong.");
}

void add_theta_factor(CLI::App& command, Options& options) {
  command.add_option("--theta-factor", options.theta_factor, "RoPE's θ becomes so many times as large")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
}

void add_threads(CLI::App& command, Options& options) {
  command.add_option("--threads", options.threads, "Training takes no more than an update has sequences")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Softmax and SSMax in small transformers: the figures of arXiv:2501.19399 within a budget of time."};
  app.require_subcommand(1);

  CLI::App& all =
      *app.add_subcommand("all", "Train, evaluate, draw, and write the page; goes on where it was stopped");
  add_text(all, options);
  add_threads(all, options);
  all.add_option("--text-name", options.text_name, "What the page calls the text");
  all.add_option("--budget", options.budget, "Time for it: 90s, 10m, 2h")->capture_default_str();
  all.add_option("--work", options.work, "Folder for checkpoints and results")->capture_default_str();
  all.add_option("--docs", options.docs, "Folder for paper.md and the figures")->capture_default_str();
  all.callback([&] { run_all(options); });

  CLI::App& train = add_train(app, options);
  add_threads(train, options);
  train.callback([&] { run_train(options); });

  CLI::App& extend =
      *app.add_subcommand("extend", "Train a checkpoint on, at a larger θ, and save it as a new one");
  add_text(extend, options);
  add_threads(extend, options);
  extend.add_option("checkpoint", options.checkpoint)->required();
  extend.add_option("extended", options.extended)->required();
  add_theta_factor(extend, options);
  add_training(extend, options);
  extend.callback([&] { run_extend(options); });

  CLI::App& evaluate =
      *app.add_subcommand("evaluate", "Loss and needles of a checkpoint in ever longer contexts");
  add_text(evaluate, options);
  add_threads(evaluate, options);
  evaluate.add_option("checkpoint", options.checkpoint)->required();
  add_theta_factor(evaluate, options);
  evaluate.callback([&] { run_evaluate(options); });

  CLI::App& ask = *app.add_subcommand("ask", "Hide a needle, ask for it, and show the answer");
  add_text(ask, options);
  ask.add_option("checkpoint", options.checkpoint)->required();
  ask.add_option("--context", options.context, "Tokens, answer included")->capture_default_str();
  ask.add_option("--depth", options.depth, "Part of the text before the needle")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1.0));
  ask.add_option("--city", options.city)->capture_default_str();
  ask.add_option("--number", options.number)->capture_default_str()->check([](const std::string& number) {
    const bool digits = !number.empty() && number.find_first_not_of("0123456789") == std::string::npos;
    return std::string(digits ? "" : "must consist of digits");
  });
  add_theta_factor(ask, options);
  ask.add_option("--seed", options.training.seed, "Of the text around it")->capture_default_str();
  ask.callback([&] { run_ask(options); });

  try {
    CLI11_PARSE(app, argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "longcontext: %s\n", error.what());
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
