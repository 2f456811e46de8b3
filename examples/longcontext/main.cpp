// The paper in miniature: trains six small transformers that differ by their scaling alone, and draws the
// paper's figures of them.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <thread>

#include "page.hpp"

namespace {

using namespace longcontext;
namespace fs = std::filesystem;

struct Options {
  fs::path text, work = "longcontext", docs = "docs", checkpoint;
  std::string text_name, budget = "2h", configuration = "b";
  index_t threads = std::clamp<index_t>(std::thread::hardware_concurrency(), 1, 8);
  Shape shape;
  Training training;
  Extent extent;
};

Corpus corpus_of(const Options& options, index_t vocabulary) {
  Corpus corpus = read_corpus(options.text, vocabulary);
  std::printf("%s: %zu files, %zu bytes, %zu tokens to train on, %zu to test\n\n",
              options.text.string().c_str(), corpus.files, corpus.bytes, corpus.train.size(),
              corpus.test.size());
  return corpus;
}

// The plan of the study in the folder, or a new one.
Plan plan_of(const Options& options, const Corpus& corpus, ssmax::ThreadPool& pool) {
  const fs::path path = options.work / "plan.json";
  if (fs::exists(path)) {
    std::printf("The study in %s goes on; another folder begins a new one.\n", options.work.string().c_str());
    return nlohmann::json::parse(examples::read_file(path)).get<Plan>();
  }
  const Plan plan = make_plan(parse_budget(options.budget), corpus, pool);
  write_file(path, nlohmann::json(plan).dump(2) + "\n");
  return plan;
}

void run_all(const Options& options) {
  ssmax::ThreadPool pool(options.threads);
  const Corpus corpus = corpus_of(options, sized_plan(parse_budget(options.budget)).shape.vocabulary);
  const Plan plan = plan_of(options, corpus, pool);
  const Results results = Study(options.work, plan, corpus, pool).run();
  draw_figures(results, options.docs / "paper");
  const fs::path path = options.docs / "paper.md";
  const std::string name =
      options.text_name.empty() ? "`" + options.text.filename().string() + "`" : options.text_name;
  write_file(path, page(results, corpus, name, "longcontext all --budget " + options.budget));
  std::printf("Page: %s\n", path.string().c_str());
}

void run_train(const Options& options) {
  ssmax::ThreadPool pool(options.threads);
  const Configuration& of = configuration(options.configuration);
  if (of.origin != Origin::scratch)
    throw std::invalid_argument("(e) and (f) begin with (a); `all` trains them");
  const Corpus corpus = corpus_of(options, options.shape.vocabulary);
  const Model model(options.shape, of.form, options.training.length);
  train(options.checkpoint, std::string(of.title), start(of, model, corpus, options.training),
        options.training.steps, model, corpus, pool);
}

void run_evaluate(const Options& options) {
  ssmax::ThreadPool pool(options.threads);
  const Checkpoint state = load(options.checkpoint);
  const Configuration& of = configuration(state.configuration);
  if (of.form == Form::size_table) throw std::invalid_argument("a table of sizes ends at the trained length");
  const Corpus corpus = corpus_of(options, state.shape.vocabulary);
  if (corpus.tokenizer.merges() != state.merges)
    throw std::runtime_error("the checkpoint was trained on another text");
  const index_t trained = state.training.length;
  const Model model(state.shape, of.form, trained);
  const Evaluation found = evaluate(model, state.weights, corpus, trained, options.extent, pool);
  const Run run{state.configuration, state.training.seed, state.training.rate, state.curve, found};
  std::printf("%8s %8s %10s %10s\n", "context", "", "loss", "needles");
  index_t before = 0;
  for (const index_t multiple : options.extent.contexts) {
    const index_t context = multiple * trained;
    std::printf("%8td %7td× %10.4f %9.0f %%\n", context, multiple, loss_between(run, before, context),
                100 * found_between(run, context, context));
    before = context;
  }
}

void add_text(CLI::App& command, Options& options) {
  command.add_option("--text", options.text, "A text file or a folder of them; fetch_text.sh fetches one")
      ->required();
  command.add_option("--threads", options.threads)->capture_default_str()->check(CLI::Range(1, 1024));
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
  all.add_option("--text-name", options.text_name, "What the page calls the text");
  all.add_option("--budget", options.budget, "Time for it: 90s, 10m, 2h")->capture_default_str();
  all.add_option("--work", options.work, "Folder for checkpoints and results")->capture_default_str();
  all.add_option("--docs", options.docs, "Folder for paper.md and the figures")->capture_default_str();
  all.callback([&] { run_all(options); });

  CLI::App& train =
      *app.add_subcommand("train", "Train one configuration; goes on with the checkpoint if there is one");
  add_text(train, options);
  train.add_option("checkpoint", options.checkpoint)->required();
  train.add_option("--configuration", options.configuration, "a, b, c, d or table")->capture_default_str();
  train.add_option("--steps", options.training.steps)->capture_default_str();
  train.add_option("--length", options.training.length, "Tokens of a sequence")->capture_default_str();
  train.add_option("--sequences", options.training.sequences, "Of an update")->capture_default_str();
  train.add_option("--needles", options.training.needle_part, "Part of the sequences with a needle")
      ->capture_default_str();
  train.add_option("--rate", options.training.rate)->capture_default_str();
  train.add_option("--seed", options.training.seed)->capture_default_str();
  train.add_option("--layers", options.shape.layers)->capture_default_str();
  train.add_option("--heads", options.shape.heads)->capture_default_str();
  train.add_option("--head-width", options.shape.head_width)->capture_default_str();
  train.add_option("--hidden", options.shape.hidden, "Width of SwiGLU")->capture_default_str();
  train.add_option("--vocabulary", options.shape.vocabulary, "256 for bytes")->capture_default_str();
  train.add_flag("!--untied", options.shape.tied, "A head of its own instead of the embedding");
  train.callback([&] { run_train(options); });

  CLI::App& evaluate =
      *app.add_subcommand("evaluate", "Loss and needles of a checkpoint in ever longer contexts");
  add_text(evaluate, options);
  evaluate.add_option("checkpoint", options.checkpoint)->required();
  evaluate
      .add_option("--theta-factor", options.extent.theta_factor, "RoPE's θ becomes so many times as large")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  evaluate.callback([&] { run_evaluate(options); });

  try {
    CLI11_PARSE(app, argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "longcontext: %s\n", error.what());
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
