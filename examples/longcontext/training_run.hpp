// Runs a training from its last checkpoint to its end. Writes checkpoints and prints the progress.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <utility>

#include "training.hpp"

namespace longcontext {

// Prints a line for every tenth of the training, and about every minute: losses, speed, time left.
class TrainingReport {
 public:
  TrainingReport(const std::string& what, const Checkpoint& state, const Model& model)
      : first_(state.step), flops_(step_flops(model, state.training)) {
    std::printf("%s: %td steps of %td × %td tokens, rate %g, seed %llu\n", what.c_str(), state.training.steps,
                state.training.sequences, state.training.length, state.training.rate,
                static_cast<unsigned long long>(state.training.seed));
    if (first_ > 0) std::printf("  goes on after step %td\n", first_);
    std::printf("  %8s %10s %10s %10s %10s %8s\n", "step", "text", "answers", "tokens/s", "GFLOP/s", "left");
  }

  void show(const Checkpoint& state) {
    const Training& training = state.training;
    const bool is_tenth = state.step * 10 / training.steps > (state.step - 1) * 10 / training.steps;
    if (!is_tenth && Clock::now() - shown_ < std::chrono::minutes(1)) return;
    shown_ = Clock::now();
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    const double rate = static_cast<double>(state.step - first_) / seconds;
    const auto tokens = static_cast<double>(training.sequences * training.length);
    std::printf("  %8td %10.4f %10.4f %10.0f %10.1f %6.0f s\n", state.step, state.curve.back().text,
                state.curve.back().answer, rate * tokens, 1e-9 * rate * flops_,
                static_cast<double>(training.steps - state.step) / rate);
    std::fflush(stdout);
  }

 private:
  using Clock = std::chrono::steady_clock;
  index_t first_;
  double flops_;  // of a step
  Clock::time_point start_ = Clock::now(), shown_ = start_;
};

struct Diverged : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Trains to step `last`, at which a point of the curve must end. Continues from the checkpoint at `path` if
// there is one. If `saves` is true, writes a checkpoint at the end, and before the end about once a minute
// where a point of the curve ends.
inline Checkpoint train(const std::filesystem::path& path, const std::string& what, Checkpoint state,
                        index_t last, const Model& model, const Corpus& corpus, ssmax::ThreadPool& pool,
                        bool saves = true) {
  using Clock = std::chrono::steady_clock;
  if (std::filesystem::exists(path)) {
    Checkpoint saved = load(path);
    if (saved.configuration != state.configuration || saved.shape != state.shape ||
        saved.training != state.training || saved.text != state.text ||
        saved.weights.size() != state.weights.size()) {
      throw std::runtime_error(path.string() +
                               " was trained with other settings or another text; move it away");
    }
    if (saved.step >= last) return saved;
    state = std::move(saved);
  }
  TrainingReport report(what, state, model);
  Trainer trainer(model, corpus, pool);
  Losses sum;
  auto saved = Clock::now();
  while (state.step < last) {
    sum += trainer.step(state);
    const index_t steps = state.training.steps;
    if (points_until(state.step, steps) == points_until(state.step - 1, steps)) continue;
    state.curve.push_back({state.step, sum.mean_text(), sum.mean_answer()});
    sum = {};
    if (!std::isfinite(state.curve.back().text + state.curve.back().answer)) {
      throw Diverged(what + " diverged before step " + std::to_string(state.step) + ", at the rate " +
                     std::to_string(state.training.rate));
    }
    report.show(state);
    if (Clock::now() - saved < std::chrono::minutes(1) && state.step < last) continue;
    if (saves) save(path, state);
    saved = Clock::now();
  }
  return state;
}

// Returns a state with another form, to continue a training with Softmax. Parameters that both forms have
// keep their values and averages. s is set so that the multiplier is 1 on average.
inline Checkpoint with_scaling(const Checkpoint& from, const Model& softmax, const Configuration& to,
                               const Model& model) {
  Checkpoint state = from;
  state.configuration = to.name;
  const auto size = static_cast<std::size_t>(model.layout().size());
  for (auto* values : {&state.weights, &state.averages.mean, &state.averages.square}) {
    const Values before = std::exchange(*values, Values(size));
    model.layout().take_over(*values, softmax.layout(), before);
  }
  model.start_s(state.weights, state.training.length);
  return state;
}

// Returns a new training that starts with the weights of another, with other samples and with RoPE's θ
// multiplied by theta_factor.
inline Checkpoint start_extension(const Checkpoint& from, Training extension, double theta_factor) {
  check(extension);
  extension.seed = from.training.seed + 1000;
  Checkpoint state{from.configuration, from.shape, extension, from.text};
  state.shape.theta *= theta_factor;
  state.weights = from.weights;
  state.averages.mean.resize(state.weights.size());
  state.averages.square.resize(state.weights.size());
  return state;
}

}  // namespace longcontext
