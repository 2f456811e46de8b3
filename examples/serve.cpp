// Trains a small transformer, then serves synthetic requests with continuous batching. Each step packs the new tokens of all running sequences: one token
// of a sequence that generates, a chunk of a prompt that is not complete. Requests with the same system prompt fork
// the sequence that holds its pages. If the pool is full, the youngest sequence loses its pages and waits.
//
// Two servers serve the same requests, in turns of one step. The first makes one call of attention per layer, with one
// plan per step. The second makes one call per layer and sequence. Both must generate the same tokens. The clock of a
// server stands still during the steps of the other one, and jumps to the next arrival if the server is idle.
//
// Every text of the language has a cycle of words of its own (cycles.hpp). The model learns to find the next word in the
// text. So the report can say which part of the generated tokens is right: the tokens that follow the text's cycle.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <exception>
#include <list>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "progress.hpp"
#include "requests.hpp"
#include "serving_report.hpp"
#include "transformer.hpp"

namespace {

using examples::Cache, examples::Calls, examples::Next, examples::Random, examples::Request, examples::Served,
    examples::ServedModel, examples::Step, examples::SystemPrompt;
using ssmax::index_t;

// The library computes the first 1,024 keys of a system prompt once for the sequences that were forked from it.
constexpr index_t kPage = 32, kSystems = 3, kSystemLength = 1100;
constexpr index_t kShortText = 64, kDoublings = 4;  // lengths of the texts of the training
constexpr index_t kBatchTokens = 1280;
constexpr int kCheckSteps = 450;

constexpr index_t pages_for(index_t tokens) { return (tokens + kPage - 1) / kPage; }

struct Options {
  index_t requests = 100, slots = 32, budget = 128, pages = 300;
  index_t layers = 4;
  int steps = 800;
  examples::Length prompt{.median = 100, .deviation = 1, .shortest = 16, .longest = 1500};
  examples::Length outputs{.median = 40, .deviation = 0.8, .shortest = 1, .longest = 256};
  double rate = 100;
  std::uint64_t seed = 1;
  index_t threads = std::clamp<index_t>(std::thread::hardware_concurrency(), 1, 2);
  bool batched = false, one_by_one = false, check = false;
  std::string plot;

  index_t longest() const { return kSystemLength + prompt.longest + outputs.longest; }
};

void validate(const Options& options) {
  if (options.budget < options.slots) throw std::runtime_error("--budget must be at least --slots");
  const index_t shared = kSystemLength / kPage * kPage;  // full pages
  const index_t fewest = kSystems * pages_for(kSystemLength) + pages_for(options.longest() - shared);
  if (options.pages < fewest) {
    throw std::runtime_error("--pages must be at least " + std::to_string(fewest) +
                             ": the system prompts and the longest sequence");
  }
}

// ---- The model and its training. ------------------------------------------------------------------------

// RoPE rotates a quarter of a head's channels; the other channels compare words. The longest wavelength, 35 words, is
// shorter than the texts of the training.
examples::ModelShape model_shape(index_t layers, index_t longest) {
  return {.layers = layers,
          .heads = 2,
          .kv_heads = 1,
          .head_width = 32,
          .inner = 128,
          .words = examples::kWords,
          .rope = {.width = 8, .theta = 10},
          .longest = std::max(longest, kShortText << kDoublings),
          .rate = 1e-2,
          .decay = 0.2};
}

struct Losses {
  double first = 0, last = 0;  // last: the mean of the last twentieth of the steps
};

// Trains with short texts, and in the last third of the steps with texts of all lengths.
Losses train(ServedModel& model, int steps, Random& random) {
  Losses losses;
  double right = 0;
  const int averaged = std::max(1, steps / 20);
  const auto start = examples::Clock::now();
  examples::Progress progress(steps);
  for (int step = 1; step <= steps; ++step) {
    const index_t doublings = 3 * step <= 2 * steps ? 0 : random.below(kDoublings + 1);
    const index_t length = kShortText << doublings;
    const examples::Result result =
        model.train(examples::draw_batch(kBatchTokens / length, length, random), step, steps);
    if (step == 1) losses.first = result.loss;
    if (step > steps - averaged) losses.last += result.loss / averaged, right += result.accuracy / averaged;
    progress.advance(1);
  }
  if (steps > 0) {
    std::printf(
        "Training  %d steps in %.0f s; loss %.3f at the start, %.3f at the end; %.1f %% of the words right\n",
        steps, examples::seconds_since(start), losses.first, losses.last, 100 * right);
  }
  return losses;
}

// The keys and values of all layers.
double mebibytes(const examples::ModelShape& shape, index_t pages) {
  const index_t numbers = shape.layers * shape.kv_heads * 2 * shape.head_width;
  return static_cast<double>(pages * kPage * numbers * index_t{sizeof(ssmax::bfloat16)}) / (1 << 20);
}

// ---- The server. ----------------------------------------------------------------------------------------

struct Sequence {
  const Request& request;
  std::vector<index_t> tokens;  // system prompt, prompt and outputs
  std::vector<Next> outputs;
  double last = 0;  // time of the last output
  index_t id = -1;  // in the caches, while the sequence runs
};

// Packs the next step. Every running sequence gets a token. The older sequences share the rest of the budget for their
// prompts.
Step pack(std::span<Sequence* const> running, const Cache& cache, index_t budget) {
  Step step;
  index_t left = budget - std::ssize(running);
  for (const Sequence* sequence : running) {
    const std::span<const index_t> tokens = sequence->tokens;
    const auto pending = tokens.subspan(static_cast<std::size_t>(cache.length(sequence->id)));
    const index_t count = std::min(std::ssize(pending), 1 + left);
    step.add(sequence->id, pending.first(static_cast<std::size_t>(count)));
    left -= count - 1;
  }
  return step;
}

class Server {
 public:
  Server(Calls calls, const ServedModel& model, const std::vector<SystemPrompt>& systems,
         const std::vector<Request>& requests, const Options& options, ssmax::ThreadPool& pool)
      : options_(options),
        shape_(model.shape()),
        caches_(shape_, kPage, options.pages),
        decoder_(model, calls, pool) {
    served_.name = calls == Calls::batched ? "batched" : "one by one";
    served_.colour = calls == Calls::batched ? "'#d62728'" : "'#1f5fbf'";
    served_.contiguous_mebibytes = mebibytes(shape_, options.slots * pages_for(options.longest()));
    Step step;
    for (const SystemPrompt& system : systems) step.add(systems_.emplace_back(caches_.add()), system.tokens);
    examples::Decoder(model, calls, pool).forward(step, caches_);
    for (const Request& request : requests) {
      Sequence& sequence = sequences_.emplace_back(Sequence{request, {}, {}});
      if (request.system >= 0) sequence.tokens = systems[static_cast<std::size_t>(request.system)].tokens;
      sequence.tokens.insert(sequence.tokens.end(), request.tokens.begin(), request.tokens.end());
      waiting_.push_back(&sequence);
    }
  }

  bool finished() const { return waiting_.empty() && running_.empty(); }
  const Served& served() const { return served_; }
  index_t used_pages() const { return options_.pages - caches_.first().free_pages(); }

  std::vector<std::vector<Next>> outputs() const {
    std::vector<std::vector<Next>> result;
    for (const Sequence& sequence : sequences_) result.push_back(sequence.outputs);
    return result;
  }

  // Returns the number of tokens that the step generates.
  std::size_t step() {
    if (running_.empty()) served_.seconds = std::max(now(), waiting_.front()->request.arrival);
    admit();
    const auto start = examples::Clock::now();
    const std::vector<Next> next = forward();
    const double seconds = examples::seconds_since(start);
    served_.seconds += seconds, served_.busy += seconds;
    served_.attention = decoder_.attention_seconds(), served_.shared = decoder_.shared_sequences();
    served_.steps += 1, served_.sequences += static_cast<double>(running_.size());
    served_.used_mebibytes = std::max(served_.used_mebibytes, mebibytes(shape_, used_pages()));
    return collect(next);
  }

 private:
  double now() const { return served_.seconds; }

  // Starts the next request if the pool has pages for its tokens. Full pages of a system prompt are shared.
  void admit() {
    if (waiting_.empty() || std::ssize(running_) == options_.slots) return;
    Sequence& sequence = *waiting_.front();
    const index_t system = sequence.request.system;
    const index_t needed = pages_for(std::ssize(sequence.tokens)) - (system < 0 ? 0 : kSystemLength / kPage);
    if (sequence.request.arrival > now() || needed > caches_.first().free_pages()) return;
    sequence.id = system < 0 ? caches_.add() : caches_.fork(systems_[static_cast<std::size_t>(system)]);
    waiting_.pop_front();
    running_.push_back(&sequence);
  }

  // The youngest sequence loses its pages. It computes its tokens again when it is admitted.
  void preempt() {
    caches_.remove(running_.back()->id);
    waiting_.push_front(running_.back());
    running_.pop_back();
    ++served_.preempted;
  }

  std::vector<Next> forward() {
    for (;;) {
      try {
        return decoder_.forward(pack(running_, caches_.first(), options_.budget), caches_);
      } catch (const ssmax::PagedKvCacheFull&) {
        preempt();
      }
    }
  }

  // Stores the next tokens of the sequences whose prompts are complete. Removes the finished sequences.
  std::size_t collect(const std::vector<Next>& next) {
    std::size_t generated = 0;
    std::vector<Sequence*> rest;
    for (std::size_t b = 0; b < running_.size(); ++b) {
      Sequence& sequence = *running_[b];
      if (caches_.first().length(sequence.id) == std::ssize(sequence.tokens)) {
        const bool is_first = sequence.outputs.empty();
        const double since = is_first ? sequence.request.arrival : sequence.last;
        (is_first ? served_.first : served_.next).push_back(1e3 * (now() - since));
        sequence.last = now();
        served_.right += sequence.request.cycle.follows(next[b].token, sequence.tokens.back()) ? 1 : 0;
        sequence.outputs.push_back(next[b]);
        sequence.tokens.push_back(next[b].token);
        ++generated;
      }
      if (std::ssize(sequence.outputs) < sequence.request.outputs) {
        rest.push_back(&sequence);
      } else {
        caches_.remove(sequence.id);
      }
    }
    running_ = std::move(rest);
    served_.tokens += static_cast<double>(generated);
    return generated;
  }

  Options options_;
  examples::ModelShape shape_;
  examples::Caches caches_;
  examples::Decoder decoder_;
  std::vector<index_t> systems_;   // the sequences of the system prompts
  std::list<Sequence> sequences_;  // in the order of the requests
  std::deque<Sequence*> waiting_;
  std::vector<Sequence*> running_;  // the youngest last
  Served served_;
};

// ---- The program. ---------------------------------------------------------------------------------------

// A short training, and a workload for a pool that is too small for all slots. All requests arrive almost at once. Both servers must
// generate the same tokens although only the first one preempts sequences.
Options small_workload(Options options) {
  options.requests = 12, options.slots = 12, options.budget = 64, options.pages = 130;
  options.layers = 2, options.steps = std::min(options.steps, kCheckSteps);
  options.prompt.longest = 200, options.outputs.longest = 50;
  options.rate = 1e6;
  return options;
}

int run(const Options& options) {
  validate(options);
  Random random(options.seed);
  ssmax::ThreadPool pool(options.threads);
  ServedModel model(model_shape(options.layers, options.longest()), random, pool);
  std::printf("Model     %td layers of width %td, %td heads on %td\n", model.shape().layers,
              model.shape().width(), model.shape().heads, model.shape().kv_heads);
  const Losses losses = train(model, options.steps, random);
  std::vector<SystemPrompt> systems;
  for (index_t i = 0; i < kSystems; ++i)
    systems.push_back(examples::draw_system_prompt(kSystemLength, random));
  const std::vector<Request> requests = examples::draw_requests({.requests = options.requests,
                                                                 .rate = options.rate,
                                                                 .system_share = 0.75,
                                                                 .prompt = options.prompt,
                                                                 .outputs = options.outputs},
                                                                systems, random);
  std::printf("Requests  %td, %g per second; %td slots, %td pages of %td keys, %td threads\n\n",
              options.requests, options.rate, options.slots, options.pages, kPage, options.threads);
  std::list<Server> all;
  double outputs = 0;
  for (const Calls calls : {Calls::batched, Calls::one_by_one}) {
    const bool other_only = calls == Calls::batched ? options.one_by_one : options.batched;
    if (other_only) continue;
    Options own = options;
    if (options.check && calls == Calls::one_by_one) own.pages *= 10;  // this server preempts no sequence
    all.emplace_back(calls, model, systems, requests, own, pool);
    for (const Request& request : requests) outputs += static_cast<double>(request.outputs);
  }
  examples::Progress progress(outputs);
  while (!std::ranges::all_of(all, &Server::finished)) {
    for (Server& server : all) {
      if (!server.finished()) progress.advance(static_cast<double>(server.step()));
    }
  }

  std::list<Served> served;
  for (const Server& server : all) served.push_back(server.served());
  examples::print_table(served);
  if (!options.plot.empty()) examples::draw(examples::figure("serve", served), options.plot);

  examples::Check check;
  const index_t expected_pages = kSystems * pages_for(kSystemLength);
  for (const Server& server : all)
    check.holds("only the system prompts use pages at the end", server.used_pages() == expected_pages);
  if (all.size() == 2) {
    const bool equal = all.front().outputs() == all.back().outputs();
    check.holds("both servers generate the same tokens", equal);
    if (equal) std::printf("Both servers generated the same tokens, with bit-identical logits.\n");
  }
  if (options.check) {
    check.holds("the pool was full", options.one_by_one || served.front().preempted > 0);
    check.holds("the loss fell to a half", losses.last < losses.first / 2);
    for (const Served& s : served)
      check.holds("half of the generated tokens are right", 2 * s.right > s.tokens);
    check.holds("sequences shared steps", served.front().sequences > 2 * served.front().steps);
  }
  return check.exit_code();
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Trains a small model, then serves synthetic requests with continuous batching over a paged cache."};
  app.add_option("--requests", options.requests)->capture_default_str()->check(CLI::Range(1, 1'000'000));
  app.add_option("--rate", options.rate, "Requests per second")
      ->capture_default_str()
      ->check(CLI::Range(1e-3, 1e6));
  app.add_option("--slots", options.slots, "Most sequences of a step")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app.add_option("--budget", options.budget, "Most tokens of a step")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  app.add_option("--pages", options.pages, "Pages of the pool of a layer")
      ->capture_default_str()
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--layers", options.layers)->capture_default_str()->check(CLI::Range(1, 64));
  app.add_option("--steps", options.steps, "Steps of the training; 0 serves random weights")
      ->capture_default_str()
      ->check(CLI::Range(0, 1'000'000));
  app.add_option("--seed", options.seed, "Of the model, its training and the requests")
      ->capture_default_str();
  app.add_option("--threads", options.threads)->capture_default_str()->check(CLI::Range(1, 1024));
  auto* batched = app.add_flag("--batched", options.batched, "Only the server with one call per layer");
  app.add_flag("--one-by-one", options.one_by_one, "Only the server with one call per layer and sequence")
      ->excludes(batched);
  app.add_flag("--check", options.check,
               "Train for a short time, serve a small workload, and fail unless the first pool was full");
  app.add_option("--plot", options.plot, "Write serve.gp and serve.png to this folder");
  CLI11_PARSE(app, argc, argv);
  try {
    return run(options.check ? small_workload(options) : options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "serve: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
