// Plans a study: which models it trains and evaluates within a budget of time.
#pragma once

#include <algorithm>
#include <charconv>
#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "evaluation.hpp"
#include "training.hpp"

namespace longcontext {

struct Plan {
  Shape shape;
  Training training;  // of every run; each run has its own seed and rate
  std::string budget;
  std::vector<double> rates{2.5e-4, 5e-4, 1e-3};  // tried for every configuration; the best rate is used
  index_t sweep_steps = 0;                        // steps to try a rate
  index_t extension_steps = 0;                    // steps at the larger θ, after training
  std::vector<std::uint64_t> seeds{1, 2, 3, 4, 5};
  double switch_part = 0.7;  // fraction of training with Softmax, before (f) continues with SSMax
  double theta_factor = 50;  // factor of RoPE's θ in contexts beyond the trained length
  Extent extent;

  bool operator==(const Plan&) const = default;

  // Returns the step at which (f) changes to SSMax. A point of the curve ends there.
  index_t switch_step() const {
    const auto points = std::llround(switch_part * static_cast<double>(kCurvePoints));
    return (points * training.steps + kCurvePoints - 1) / kCurvePoints;
  }
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Plan, shape, training, budget, rates, sweep_steps, extension_steps, seeds,
                                   switch_part, theta_factor, extent)

inline void check(const Plan& plan) {
  check(plan.shape), check(plan.training);
  require(!plan.rates.empty() && !plan.seeds.empty(), "a plan needs rates and seeds");
  require(std::ranges::min(plan.rates) > 0, "rates must be positive");
  const auto [fewest, most] = std::minmax(plan.sweep_steps, plan.extension_steps);
  require(fewest >= 1 && most <= kMostSteps, "sweep_steps and extension_steps must lie between 1 and 10^12");
  require(plan.switch_part >= 1.0 / kCurvePoints && plan.switch_part <= 1 - 1.0 / kCurvePoints,
          "switch_part must lie between 0.02 and 0.98");
  require(std::set(plan.seeds.begin(), plan.seeds.end()).size() == plan.seeds.size(),
          "every seed must be another");
  Shape extended = plan.shape;
  extended.theta *= plan.theta_factor;
  check(extended);
  const auto& contexts = plan.extent.contexts;
  require(contexts.size() > 1 && contexts.front() == 1 && contexts.back() > 4 && contexts.back() <= 1 << 20 &&
              std::ranges::adjacent_find(contexts, std::greater_equal<>()) == contexts.end(),
          "contexts must begin with 1, rise, and end above 4 and not above 2^20");
  require(plan.extent.scored_context <= contexts.back(), "scored_context must not be above all contexts");
  require(plan.extent.depths >= 2, "depths must be at least 2");
  require(std::min(
              {plan.extent.trials, plan.extent.windows, plan.extent.scored, plan.extent.scored_context}) >= 1,
          "trials, windows and what is scored must be at least 1");
}

// Returns seconds for a text such as "90s", "10m" or "2h".
inline double parse_budget(std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  const double seconds = unit == "s" ? 1 : unit == "m" ? 60 : unit == "h" ? 3600 : 0;
  if (error != std::errc() || !(number > 0 && number < 1e6) || seconds == 0) {
    throw std::invalid_argument("the budget '" + std::string(text) +
                                "' is not a time such as 90s, 10m or 2h");
  }
  return number * seconds;
}

// Returns a plan whose model fits the budget. The largest model is the default of Shape, Training and
// Extent. With sequences of 128 tokens, training finds needles sooner (docs/paper_tried.md).
inline Plan sized_plan(double seconds) {
  Plan plan;
  if (seconds < 90 * 60) {
    plan.shape = {.layers = 2, .heads = 4, .head_width = 16, .hidden = 176, .theta = 250};
    plan.training.length = 128, plan.training.sequences = 4;
    plan.rates = {5e-4, 1e-3, 2e-3};
  }
  if (seconds < 5 * 60) {
    plan.shape = {.layers = 2, .heads = 2, .head_width = 8, .hidden = 32, .theta = 250};
    plan.seeds = {1, 2, 3};
    plan.extent.contexts = {1, 4, 16};
    plan.extent.depths = 3;
  }
  return plan;
}

// Steps to try a rate, and steps of an extension, as fractions of the steps of a training.
inline constexpr double kTryPart = 0.25, kExtensionPart = 0.02;

// Returns the steps of the whole plan, in units of one training. Five configurations try every rate. (a) to
// (d), and the last part of (f), train with every seed. The table trains with one seed. Six configurations
// are extended with every seed.
inline double whole_trainings(const Plan& plan) {
  const double tries = kTryPart * 5 * static_cast<double>(plan.rates.size());
  return tries + static_cast<double>(plan.seeds.size()) * (4 + (1 - plan.switch_part) + 6 * kExtensionPart) +
         1;
}

// Measures the speed and makes a plan. Evaluation gets a fifth of the time. Exception: evaluation gets less
// if it needs less, and more if its minimum needs more. Training gets the rest.
inline Plan make_plan(const std::string& budget, const Corpus& corpus, ssmax::ThreadPool& pool) {
  using Clock = std::chrono::steady_clock;
  const double seconds = parse_budget(budget);
  Plan plan = sized_plan(seconds);
  plan.budget = budget;
  const Model model(plan.shape, Form::softmax, plan.training.length);
  Checkpoint state = start(kConfigurations.front(), model, corpus, plan.training);
  Trainer trainer(model, corpus, pool);
  trainer.step(state);  // allocates
  const double patience = std::min(5.0, 0.01 * seconds);
  const auto begin = Clock::now();
  double elapsed = 0;
  int steps = 0;
  while (elapsed < patience) {
    trainer.step(state), ++steps;
    elapsed = std::chrono::duration<double>(Clock::now() - begin).count();
  }
  const double step_seconds = elapsed / steps;
  const double flops_per_second = step_flops(model, plan.training) / step_seconds;

  const auto evaluations = static_cast<double>(6 * plan.seeds.size());
  const double wanted = evaluations * evaluation_flops(model, plan.training.length, plan.extent);
  const double part = std::min(1.0, 0.2 * seconds * flops_per_second / wanted);
  const auto shrink = [&](index_t& count) {
    count = std::max<index_t>(1, static_cast<index_t>(part * static_cast<double>(count)));
  };
  shrink(plan.extent.trials), shrink(plan.extent.windows), shrink(plan.extent.scored);
  const double evaluating =
      evaluations * evaluation_flops(model, plan.training.length, plan.extent) / flops_per_second;

  constexpr double kFewestSteps = 4 * kCurvePoints;  // a point of every curve, also of the tries of rates
  const double affordable = (0.95 * seconds - evaluating) / step_seconds / whole_trainings(plan);
  if (affordable < kFewestSteps) {
    const double least = (evaluating + kFewestSteps * step_seconds * whole_trainings(plan)) / 0.95;
    throw std::invalid_argument("the budget " + budget + " is too small for this machine; try " +
                                std::to_string(std::llround(least) + 1) + "s");
  }
  plan.training.steps = static_cast<index_t>(affordable);
  plan.sweep_steps = std::llround(kTryPart * affordable);
  plan.extension_steps = std::llround(kExtensionPart * affordable);
  return plan;
}

}  // namespace longcontext
