// Runs the study: trains all configurations with the same rates and the same seeds, and evaluates them in
// the same way. Stores each finished run in a folder, so a stopped study continues. Exception: a rate that
// diverged stores no result and is tried again.
#pragma once

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "plan.hpp"
#include "training_run.hpp"

namespace longcontext {

// The results of a model: after training, and after its extension. An extension is a short training with
// the larger RoPE θ.
struct Evaluation {
  std::vector<double> position_loss;       // [position], trained model at the larger θ, mean over windows
  std::vector<NeedleCell> needles_before;  // trained model at its own θ
  std::vector<NeedleCell> needles;         // extended model, as are the following
  std::vector<double> head_scores;         // [head of any layer], the paper's needle in the middle of texts
  std::vector<ScoredNeedle> scored;
  std::vector<double> p;  // [n - 1], of the table of sizes only
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Evaluation, position_loss, needles_before, needles, head_scores, scored, p)

struct Run {
  std::uint64_t study = 0;  // checksum of plan and text
  std::string configuration;
  std::uint64_t seed = 0;
  double rate = 0;
  std::vector<CurvePoint> curve;
  Evaluation evaluation;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Run, study, configuration, seed, rate, curve, evaluation)

struct Trial {
  std::string configuration;
  double rate = 0;
  double loss = 0;  // mean over the last fifth of the steps; infinite if training diverged
};

struct Results {
  Plan plan;
  std::vector<Trial> trials;
  std::vector<Run> runs;

  // Returns the best trial of a configuration, or null if every rate diverged.
  const Trial* best_trial(std::string_view name) const {
    const Trial* best = nullptr;
    for (const Trial& trial : trials) {
      if (trial.configuration != name || std::isinf(trial.loss)) continue;
      if (best == nullptr || trial.loss < best->loss) best = &trial;
    }
    return best;
  }

  // Returns the runs of a configuration, in the order of the seeds.
  std::vector<const Run*> of(std::string_view name) const {
    std::vector<const Run*> found;
    for (const Run& run : runs) {
      if (run.configuration == name) found.push_back(&run);
    }
    return found;
  }
};

// Reads a file of write_file. Throws with the name of the file.
template <class T>
T read_json(const std::filesystem::path& path) {
  try {
    return nlohmann::json::parse(examples::read_file(path)).template get<T>();
  } catch (const nlohmann::json::exception& error) {
    throw std::runtime_error(path.string() + " is not what this program writes: " + error.what());
  }
}

// Returns the mean over the last fifth of the steps.
inline double last_mean(const std::vector<CurvePoint>& curve, double CurvePoint::*loss) {
  const std::size_t points = std::max<std::size_t>(1, curve.size() / 5);
  double sum = 0;
  for (std::size_t i = curve.size() - points; i < curve.size(); ++i) sum += curve[i].*loss;
  return sum / static_cast<double>(points);
}

class Study {
 public:
  Study(std::filesystem::path folder, const Plan& plan, const Corpus& corpus, ssmax::ThreadPool& pool)
      : folder_(std::move(folder)), corpus_(corpus), pool_(pool) {
    results_.plan = plan;
    identity_ = checksum(std::string(detail::kSignature) + nlohmann::json(plan).dump() +
                         std::to_string(corpus.identity));
  }

  Results run() {
    for (const char* name : {"a", "b", "c", "d", "table"}) try_rates(configuration(name));
    begin_ = Clock::now();
    for (const std::uint64_t seed : results_.plan.seeds) {
      const Checkpoint softmax = train_softmax(seed);
      add(configuration("a"), softmax);
      for (const char* name : {"b", "c", "d"})
        add(configuration(name), train_whole(configuration(name), seed));
      add(configuration("e"), replaced(softmax));
      add(configuration("f"), train_switched(seed));
    }
    const Configuration& table = configuration("table");
    add(table, train_whole(table, results_.plan.seeds.front()));
    return results_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::filesystem::path file(const std::string& name, const char* kind) const {
    return folder_ / (name + kind);
  }

  Model model(Form form) const { return {results_.plan.shape, form, results_.plan.training.length}; }

  Training training(const Configuration& of, std::uint64_t seed) const {
    Training training = results_.plan.training;
    training.seed = seed;
    training.rate = best_rate(of);
    return training;
  }

  double best_rate(const Configuration& of) const {
    const Trial* best = results_.best_trial(of.name);
    if (best == nullptr) throw Diverged(std::string(of.title) + " diverged at every rate");
    return best->rate;
  }

  void try_rates(const Configuration& of) {
    const Model model = this->model(of.form);
    for (std::size_t i = 0; i < results_.plan.rates.size(); ++i) {
      Training training = results_.plan.training;
      training.seed = 1000;
      training.steps = results_.plan.sweep_steps;
      training.rate = results_.plan.rates[i];
      const std::string name = "rate_" + std::string(of.name) + "_" + std::to_string(i + 1);
      double loss = std::numeric_limits<double>::infinity();
      try {
        const Checkpoint done =
            train(file(name, ".checkpoint"), std::string(of.title) + ", trying a rate",
                  start(of, model, corpus_, training), training.steps, model, corpus_, pool_);
        // Uses the loss of text. The loss of answers depends on when a model starts to find needles, which
        // is chance.
        loss = last_mean(done.curve, &CurvePoint::text);
      } catch (const Diverged& diverged) {
        std::printf("  %s\n", diverged.what());
      }
      results_.trials.push_back({std::string(of.name), training.rate, loss});
    }
    std::printf("%s: the best rate is %g\n\n", std::string(of.title).c_str(), best_rate(of));
  }

  static std::string name_of(const Configuration& of, std::uint64_t seed) {
    return std::string(of.name) + "_seed" + std::to_string(seed);
  }

  Checkpoint train_whole(const Configuration& of, std::uint64_t seed) const {
    const Model model = this->model(of.form);
    const Training training = this->training(of, seed);
    return train(file(name_of(of, seed), ".checkpoint"), std::string(of.title),
                 start(of, model, corpus_, training), training.steps, model, corpus_, pool_);
  }

  // Trains (a), and stores the checkpoint at which (f) continues with SSMax.
  Checkpoint train_softmax(std::uint64_t seed) const {
    const Configuration& of = configuration("a");
    const Model model = this->model(of.form);
    const Training training = this->training(of, seed);
    const std::string title(of.title);
    const Checkpoint branch =
        train(file(name_of(of, seed) + "_branch", ".checkpoint"), title, start(of, model, corpus_, training),
              results_.plan.switch_step(), model, corpus_, pool_);
    return train(file(name_of(of, seed), ".checkpoint"), title, branch, training.steps, model, corpus_,
                 pool_);
  }

  Checkpoint train_switched(std::uint64_t seed) const {
    const Configuration &from = configuration("a"), &of = configuration("f");
    const Model softmax = model(from.form), model = this->model(of.form);
    const Checkpoint branch = load(file(name_of(from, seed) + "_branch", ".checkpoint"));
    return train(file(name_of(of, seed), ".checkpoint"), std::string(of.title),
                 with_scaling(branch, softmax, of, model), branch.training.steps, model, corpus_, pool_);
  }

  Checkpoint replaced(const Checkpoint& softmax) const {
    const Configuration& of = configuration("e");
    return with_scaling(softmax, model(Form::softmax), of, model(of.form));
  }

  // Returns the model after a short training at the larger θ, with half the rate.
  Checkpoint extended(const Configuration& of, const Checkpoint& trained) const {
    Training extension = trained.training;
    extension.steps = results_.plan.extension_steps;
    extension.rate /= 2;
    const Checkpoint begin = start_extension(trained, extension, results_.plan.theta_factor);
    const Model model(begin.shape, of.form, extension.length);
    return train(file(name_of(of, trained.training.seed) + "_extended", ".checkpoint"),
                 std::string(of.title) + ", extended", begin, extension.steps, model, corpus_, pool_);
  }

  Evaluation evaluate(const Configuration& of, const Checkpoint& trained) const {
    const Plan& plan = results_.plan;
    const std::uint64_t seed = trained.training.seed;
    const Checkpoint extended = this->extended(of, trained);
    const Model model = this->model(of.form), extended_model(extended.shape, of.form, plan.training.length);
    const auto evaluator = [&](const Model& of_form, const Checkpoint& state, double theta_factor) {
      return Evaluator(of_form, state.weights, theta_factor, corpus_, plan.training.length, plan.extent, seed,
                       pool_);
    };
    const Evaluator on_needles = evaluator(extended_model, extended, 1);
    Evaluation result{.position_loss = evaluator(model, trained, plan.theta_factor).position_loss(),
                      .needles_before = evaluator(model, trained, 1).needles(),
                      .needles = on_needles.needles(),
                      .head_scores = on_needles.score_heads(),
                      .scored = on_needles.score_needles(),
                      .p = {}};
    return result;
  }

  // Evaluates the model, or reads the stored evaluation.
  void add(const Configuration& of, const Checkpoint& state) {
    const auto path = file(name_of(of, state.training.seed), ".json");
    if (std::filesystem::exists(path)) {
      results_.runs.push_back(read_json<Run>(path));
      if (results_.runs.back().study == identity_) return;
      throw std::runtime_error(path.string() + " is of another plan or text; move it away");
    }
    Run run{identity_, std::string(of.name), state.training.seed, state.training.rate, state.curve, {}};
    if (of.form == Form::size_table) {  // the table has no p for longer contexts
      const auto p = model(of.form).scaling_parameters(state.weights, 0).p;
      run.evaluation.p.assign(p.begin(), p.end());
    } else {
      run.evaluation = evaluate(of, state);
    }
    write_file(path, nlohmann::json(run).dump() + "\n");
    results_.runs.push_back(std::move(run));
    report();
  }

  void report() {
    done_here_ += 1;
    const std::size_t done = results_.runs.size(), all = 6 * results_.plan.seeds.size() + 1;
    const double seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
    std::printf("%zu of %zu models are done, about %.0f s left\n\n", done, all,
                seconds / static_cast<double>(done_here_) * static_cast<double>(all - done));
    std::fflush(stdout);
  }

  std::filesystem::path folder_;
  const Corpus& corpus_;
  ssmax::ThreadPool& pool_;
  Results results_;
  std::uint64_t identity_;
  Clock::time_point begin_{};  // start of the first model, after all rates were tried
  std::size_t done_here_ = 0;  // models finished by this process
};

}  // namespace longcontext
