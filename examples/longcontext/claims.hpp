// Compares the paper's claims to the study's measurements: differences between configurations, for every
// seed.
#pragma once

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "figures.hpp"

namespace longcontext {

// Statistics of numbers that are positive where a claim holds, one number per seed.
struct Measured {
  double mean = 0, error = 0;  // error is the standard error of the mean
  std::size_t count = 0;
  bool all_positive = true, all_negative = true;

  explicit Measured(const std::vector<double>& values) : count(values.size()) {
    const auto all = static_cast<double>(count);
    double squares = 0;
    for (const double value : values) {
      mean += value / all;
      all_positive = all_positive && value > 0, all_negative = all_negative && value < 0;
    }
    for (const double value : values) squares += (value - mean) * (value - mean);
    error = count > 1 ? std::sqrt(squares / (all - 1) / all) : 0;
  }

  // Returns the number of standard errors that a mean must differ from 0: Student's t, 95 % one-sided.
  double least_errors() const {
    constexpr double quantiles[] = {6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83};
    return count < 2 ? std::numeric_limits<double>::infinity()
                     : quantiles[std::min<std::size_t>(count - 2, 8)];
  }

  const char* verdict() const {
    const bool clear = std::abs(mean) > least_errors() * error;
    if (clear && all_positive) return "holds";
    return clear && all_negative ? "does not hold" : "too small to tell";
  }
};

struct Claim {
  int figure;
  std::string text, measure;
  Measured measured;
  bool learnt = true;  // both configurations find needles

  const char* verdict() const { return learnt ? measured.verdict() : "not applicable"; }
};

using Quantity = std::function<double(const Run&)>;

// Returns the difference of the quantity between two configurations, for every seed.
inline std::vector<double> differences(const Results& results, std::string_view larger,
                                       std::string_view smaller, const Quantity& quantity) {
  const auto of_larger = results.of(larger), of_smaller = results.of(smaller);
  std::vector<double> all;
  for (std::size_t i = 0; i < of_larger.size(); ++i)
    all.push_back(quantity(*of_larger[i]) - quantity(*of_smaller[i]));
  return all;
}

// Returns how much nearer to `centre` is `near` than `far`, for every seed.
inline std::vector<double> nearness(const Results& results, std::string_view near, std::string_view far,
                                    std::string_view centre, const Quantity& quantity) {
  const auto to_near = differences(results, near, centre, quantity),
             to_far = differences(results, far, centre, quantity);
  std::vector<double> all;
  for (std::size_t i = 0; i < to_near.size(); ++i) all.push_back(std::abs(to_far[i]) - std::abs(to_near[i]));
  return all;
}

// The quantities of the claims.
struct Quantities {
  Quantity training_loss, answer_loss, near_loss, far_loss, found_near, found_far, found_near_before,
      found_far_before, best_head, best_score, answered;
};

inline Quantities quantities(const Plan& plan) {
  const index_t trained = plan.training.length;
  const index_t longest = plan.extent.longest(trained);
  return {
      .training_loss = [](const Run& run) { return last_mean(run.curve, &CurvePoint::text); },
      .answer_loss = [](const Run& run) { return last_mean(run.curve, &CurvePoint::answer); },
      .near_loss = [=](const Run& run) { return loss_between(run.evaluation.position_loss, 0, trained); },
      .far_loss =
          [=](const Run& run) { return loss_between(run.evaluation.position_loss, 4 * trained, longest); },
      .found_near = [=](const Run& run) { return found_between(run.evaluation.needles, 0, trained); },
      .found_far =
          [=](const Run& run) { return found_between(run.evaluation.needles, trained + 1, longest); },
      .found_near_before =
          [=](const Run& run) { return found_between(run.evaluation.needles_before, 0, trained); },
      .found_far_before =
          [=](const Run& run) { return found_between(run.evaluation.needles_before, trained + 1, longest); },
      .best_head = [](const Run& run) { return std::ranges::max(run.evaluation.head_scores); },
      .best_score =
          [](const Run& run) {
            double sum = 0;
            for (const auto& scored : run.evaluation.scored) sum += scored.best_score;
            return sum / static_cast<double>(run.evaluation.scored.size());
          },
      .answered =
          [](const Run& run) {
            const auto right = std::ranges::count(run.evaluation.scored, kDigits, &ScoredNeedle::digits);
            return static_cast<double>(right) / static_cast<double>(run.evaluation.scored.size());
          },
  };
}

inline std::vector<Claim> claims(const Results& results) {
  std::vector<Claim> all;
  const Quantities q = quantities(results.plan);
  const std::string far_loss = "loss beyond 4 × the trained length",
                    found = "needles found beyond the trained length", training = "training loss at the end";
  // Claims about longer contexts require that both configurations find half of the needles within the trained
  // length.
  const auto learnt = [&](int figure, const char* one, const char* other) {
    const auto by = [&](const char* name) {
      return std::ranges::all_of(results.of(name), [&](const Run* run) { return q.found_near(*run) >= 0.5; });
    };
    return figure < 6 || (by(one) && by(other));
  };
  // less(…, "b", "a", …) claims that the quantity of b is less than that of a.
  const auto less = [&](int figure, const std::string& text, const std::string& measure, const char* small,
                        const char* large, const Quantity& quantity) {
    all.push_back({figure, text, measure + ", (" + large + ") − (" + small + ")",
                   Measured(differences(results, large, small, quantity)), learnt(figure, large, small)});
  };
  const auto nearer = [&](int figure, const char* text, const std::string& measure, const char* near,
                          const char* far, const char* centre, const Quantity& quantity) {
    const auto from = [&](const char* one) {
      return "distance of (" + std::string(one) + ") from (" + centre + ")";
    };
    all.push_back({figure, text, measure + ": " + from(far) + " less " + from(near),
                   Measured(nearness(results, near, far, centre, quantity))});
  };
  less(4, "(b) trains to a lower loss than (a)", training, "b", "a", q.training_loss);
  less(4, "(c) trains to a lower loss than (a)", training, "c", "a", q.training_loss);
  less(4, "(d) trains to a lower loss than (a)", training, "d", "a", q.training_loss);
  less(4, "(d) is the lowest: below (b)", training, "d", "b", q.training_loss);
  less(4, "(d) is the lowest: below (c)", training, "d", "c", q.training_loss);
  nearer(4, "(c) is nearer to (b) than (a) is", training, "c", "a", "b", q.training_loss);
  less(5, "(b) loses less than (a) far beyond the trained length", far_loss, "b", "a", q.far_loss);
  less(5, "(c) loses less than (a) there", far_loss, "c", "a", q.far_loss);
  less(5, "(d) is degraded there: loses more than (b)", far_loss, "b", "d", q.far_loss);
  less(5, "(e) is weak in short contexts: loses more than (a)", "loss within the trained length", "a", "e",
       q.near_loss);
  nearer(5, "(f) is nearer to (b) than (a) is", far_loss, "f", "a", "b", q.far_loss);
  less(5, "not the paper's: (e), which has (a)'s weights, loses less than (a)", far_loss, "e", "a",
       q.far_loss);
  std::vector<double> lost;
  for (const Run* run : results.of("a")) lost.push_back(q.found_near(*run) - q.found_far(*run));
  all.push_back({6, "(a) fails in longer contexts: it finds fewer there",
                 "needles found by (a) within the trained length, less beyond it", Measured(lost),
                 learnt(6, "a", "a")});
  less(6, "(b) finds more needles than (a)", found, "a", "b", q.found_far);
  less(6, "(b) finds more than (c)", found, "c", "b", q.found_far);
  less(6, "(b) finds more than (d)", found, "d", "b", q.found_far);
  less(6, "(e) finds more than (a)", found, "a", "e", q.found_far);
  less(6, "(e) finds fewer than (b)", found, "e", "b", q.found_far);
  less(6, "(f) finds more than (a)", found, "a", "f", q.found_far);
  less(6, "(f) finds fewer than (b)", found, "f", "b", q.found_far);
  // The captions of both figures claim the same order of the configurations.
  const auto attention = [&](int figure, const std::string& measure, const Quantity& quantity) {
    less(figure, "(b) attends more to the needle than (a)", measure, "a", "b", quantity);
    for (const char* other : {"c", "d", "e", "f"}) {
      less(figure, "(" + std::string(other) + ") more than (a)", measure, "a", other, quantity);
      less(figure, "(" + std::string(other) + ") less than (b)", measure, other, "b", quantity);
    }
  };
  attention(7, "best needle score of a head", q.best_head);
  attention(8, "mean of the best scores", q.best_score);
  less(8, "(b) answers more of these trials than (a)", "part with all digits right", "a", "b", q.answered);
  return all;
}

}  // namespace longcontext
