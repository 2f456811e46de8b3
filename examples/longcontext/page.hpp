// Writes the page that compares the paper's claims to the measurements. Its text is in paper.md.in.
#pragma once

#include <filesystem>
#include <map>
#include <numbers>
#include <string>
#include <vector>

#include "claims.hpp"

namespace longcontext {

namespace detail {

using Fields = std::map<std::string, std::string>;

// Replaces every {name} by its field. Throws if a name has no field.
inline std::string fill(const std::string& form, const Fields& fields) {
  std::string text;
  for (std::size_t at = 0; at < form.size();) {
    const std::size_t open = form.find('{', at), close = form.find('}', open);
    text += form.substr(at, open - at);
    if (close == std::string::npos) break;
    const auto field = fields.find(form.substr(open + 1, close - open - 1));
    if (field == fields.end())
      throw std::logic_error("the page has no " + form.substr(open, close - open + 1));
    text += field->second;
    at = close + 1;
  }
  return text;
}

inline std::string number(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

inline std::string millions(double value) { return number("%.2f", value / 1e6) + " million"; }

inline std::string row(const std::vector<std::string>& cells) {
  std::string text = "|";
  for (const auto& cell : cells) text += " " + cell + " |";
  return text + "\n";
}

inline std::string header(const std::vector<std::string>& cells) {
  return row(cells) + row(std::vector<std::string>(cells.size(), "---"));
}

// Returns the mean over seeds, with the smallest and the largest value.
inline std::string spread(const std::vector<const Run*>& runs, const Quantity& quantity, const char* format) {
  std::vector<double> values;
  for (const Run* run : runs) values.push_back(quantity(*run));
  const auto [least, most] = std::ranges::minmax(values);
  return number(format, mean_over(runs, quantity)) + " (" + number(format, least) + " – " +
         number(format, most) + ")";
}

inline std::string claims_table(const Results& results, int figure) {
  std::string text =
      header({"the paper's claim", "measured as", "mean over the seeds ± its standard error", ""});
  for (const Claim& claim : claims(results)) {
    if (claim.figure != figure) continue;
    text += row({claim.text, claim.measure,
                 number("%+.4f", claim.measured.mean) + " ± " + number("%.4f", claim.measured.error),
                 "**" + std::string(claim.verdict()) + "**"});
  }
  return text;
}

inline std::string rates_table(const Results& results) {
  std::vector<std::string> cells{"training loss of text at the rate"};
  for (const double rate : results.plan.rates) cells.push_back(number("%g", rate));
  std::string text = header(cells);
  for (const auto& each : kConfigurations) {
    if (each.origin != Origin::scratch) continue;
    cells = {std::string(each.title)};
    for (const Trial& trial : results.trials) {
      if (trial.configuration != each.name) continue;
      const std::string loss = std::isinf(trial.loss) ? "diverged" : number("%.4f", trial.loss);
      cells.push_back(&trial == results.best_trial(each.name) ? "**" + loss + "**" : loss);
    }
    text += row(cells);
  }
  return text;
}

inline std::string summary(const Results& results) {
  const Quantities q = quantities(results.plan);
  const auto table = [&](const std::vector<std::string>& titles, const std::vector<Quantity>& of,
                         const char* format) {
    std::string text = header(titles);
    for_each_evaluated([&](const Configuration& each) {
      std::vector<std::string> cells{std::string(each.title)};
      for (const Quantity& quantity : of) cells.push_back(spread(results.of(each.name), quantity, format));
      text += row(cells);
    });
    return text;
  };
  return table({"loss", "training, text", "training, answers",
                "test, at the enlarged θ, within the trained length", "beyond 4 × that"},
               {q.training_loss, q.answer_loss, q.near_loss, q.far_loss}, "%.3f") +
         "\n" +
         table({"needles found", "trained, at its own θ, within the trained length", "beyond it",
                "extended, at the enlarged θ, within the trained length", "beyond it"},
               {q.found_near_before, q.found_far_before, q.found_near, q.found_far}, "%.2f");
}

}  // namespace detail

inline std::string page(const Results& results, const Corpus& corpus, const std::string& text_name) {
  using detail::number, detail::millions;
  const Plan& plan = results.plan;
  const Training& training = plan.training;
  const Model model(plan.shape, Form::softmax, training.length);
  const auto weights = static_cast<double>(model.layout().size());
  const auto tokens =
      static_cast<double>(training.steps) * static_cast<double>(training.sequences * training.length);
  constexpr double kPaperUpdate = 2048.0 * 1024;  // tokens
  const Fit fit = fit_to_logarithm(results.of("table").front()->evaluation.p);
  const char* logarithm = fit.slope <= 0  ? "does not hold"
                          : fit.r2 >= 0.9 ? "holds"
                                          : "holds in direction only";

  const auto largest_chosen = std::ranges::count_if(kConfigurations, [&](const Configuration& each) {
    return each.origin == Origin::scratch &&
           results.best_trial(each.name)->rate == std::ranges::max(plan.rates);
  });

  // Returns the factor by which the larger θ stretches the wavelength of one training sequence.
  const auto run = [&](double theta) {
    const double turn = static_cast<double>(training.length) / (2 * std::numbers::pi);
    return std::pow(turn, std::log(plan.theta_factor) / std::log(theta));
  };
  detail::Fields fields{
      {"command", "longcontext all --budget " + plan.budget},
      {"seeds", std::to_string(plan.seeds.size())},
      {"errors", number("%.1f", Measured(std::vector<double>(plan.seeds.size())).least_errors())},
      {"weights", millions(weights)},
      {"updates", number("%.1f", tokens / kPaperUpdate)},
      {"layers", std::to_string(plan.shape.layers)},
      {"heads", std::to_string(plan.shape.heads)},
      {"head_width", std::to_string(plan.shape.head_width)},
      {"hidden", std::to_string(plan.shape.hidden)},
      {"theta", number("%g", plan.shape.theta)},
      {"head", plan.shape.tied ? "embedding and head share their weights"
                               : "embedding and head have separate weights"},
      {"text", text_name},
      {"megabytes", number("%.1f", static_cast<double>(corpus.bytes) / 1e6)},
      {"files", std::to_string(corpus.files)},
      {"train", millions(static_cast<double>(corpus.train.size()))},
      {"test", millions(static_cast<double>(corpus.test.size()))},
      {"vocabulary", std::to_string(plan.shape.vocabulary)},
      {"steps", std::to_string(training.steps)},
      {"sequences", std::to_string(training.sequences)},
      {"length", std::to_string(training.length)},
      {"tokens", millions(tokens)},
      {"needle_part", number("%g %%", 100 * training.needle_part)},
      {"decay", number("%g", training.decay)},
      {"clip", number("%g", training.clip)},
      {"switch", number("%g %%", 100 * plan.switch_part)},
      {"longest", std::to_string(plan.extent.longest(training.length))},
      {"stretch", number("%.1f", run(plan.shape.theta))},
      {"stretch_at_10000", number("%.1f", run(10'000))},
      {"theta_factor", number("%g", plan.theta_factor)},
      {"extension_steps", std::to_string(plan.extension_steps)},
      {"sweep_steps", std::to_string(plan.sweep_steps)},
      {"rates", detail::rates_table(results)},
      {"summary", detail::summary(results)},
      {"slope", number("%.3f", fit.slope)},
      {"intercept", number("%.3f", fit.intercept)},
      {"r2", number("%.3f", fit.r2)},
      {"logarithm", logarithm},
      {"trials", std::to_string(plan.extent.trials)},
      {"windows", std::to_string(plan.extent.windows)},
      {"scored", std::to_string(plan.extent.scored)},
      {"claims", std::to_string(claims(results).size())},
      {"largest_chosen", std::to_string(largest_chosen)},
      {"longest_multiple", std::to_string(plan.extent.contexts.back())},
      {"scored_context", std::to_string(plan.extent.scored_context)}};
  for (int figure = 1; figure <= 8; ++figure) {
    const std::string n = std::to_string(figure), file = "paper/figure_" + n;
    fields["figure " + n] =
        "![Figure " + n + "](" + file + ".png)\n\n[Numbers](" + file + ".csv), [SVG](" + file + ".svg)";
    fields["claims " + n] = detail::claims_table(results, figure);
  }
  return detail::fill(examples::read_file(std::filesystem::path(LONGCONTEXT_FOLDER) / "paper.md.in"), fields);
}

}  // namespace longcontext
