// Writes the numbers of the figures as CSV. The scripts in figures/*.gp draw the figures.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <ssmax/softmax.hpp>
#include <string>
#include <vector>

#include "../plot.hpp"
#include "study.hpp"

namespace longcontext {

class Table {
 public:
  explicit Table(const std::vector<std::string>& columns) { line(columns); }

  template <class... Cells>
  void add(const Cells&... cells) {
    line({cell(cells)...});
  }
  void line(const std::vector<std::string>& cells) {
    for (std::size_t i = 0; i < cells.size(); ++i) text_ += (i > 0 ? "," : "") + cells[i];
    text_ += "\n";
  }
  const std::string& text() const { return text_; }

  static std::string cell(index_t number) { return std::to_string(number); }
  static std::string cell(double number) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", number);
    return text;
  }

 private:
  std::string text_;
};

// The fit p_n ≈ a₁ ln n + a₂ by least squares over n ≥ 2. p_1 has no gradient.
struct Fit {
  double slope = 0, intercept = 0, r2 = 0;
};

inline Fit fit_to_logarithm(const std::vector<double>& p) {
  double count = 0, x = 0, y = 0, xx = 0, xy = 0, yy = 0;
  for (std::size_t n = 2; n <= p.size(); ++n) {
    const double at = std::log(static_cast<double>(n)), value = p[n - 1];
    count += 1, x += at, y += value, xx += at * at, xy += at * value, yy += value * value;
  }
  const double sxx = xx - x * x / count, sxy = xy - x * y / count, syy = yy - y * y / count;
  const double slope = sxy / sxx;
  return {slope, (y - slope * x) / count, sxy * sxy / (sxx * syy)};
}

// Returns the mean over runs of f(run).
inline double mean_over(const std::vector<const Run*>& runs, const std::function<double(const Run&)>& f) {
  double sum = 0;
  for (const Run* run : runs) sum += f(*run);
  return sum / static_cast<double>(runs.size());
}

// Returns the mean loss over the positions [first, last) of a context.
inline double loss_between(const std::vector<double>& loss, index_t first, index_t last) {
  double sum = 0;
  for (index_t i = first; i < last; ++i) sum += loss[static_cast<std::size_t>(i)];
  return sum / static_cast<double>(last - first);
}

// Returns the fraction of needles found at any depth, in contexts from `shortest` to `longest`.
inline double found_between(const std::vector<NeedleCell>& cells, index_t shortest, index_t longest) {
  index_t right = 0, trials = 0;
  for (const NeedleCell& cell : cells) {
    if (cell.context < shortest || cell.context > longest) continue;
    right += cell.right, trials += cell.trials;
  }
  return static_cast<double>(right) / static_cast<double>(trials);
}

inline std::vector<double> sorted_down(std::vector<double> values) {
  std::ranges::sort(values, std::greater<>());
  return values;
}

namespace detail {

inline std::string fading() {
  Table table({"n", "Softmax", "SSMax"});
  for (double exponent = 1; exponent < 6.01; exponent += 0.25) {
    const auto n = static_cast<std::size_t>(std::lround(std::pow(10, exponent)));
    std::vector<float> z(n, -2.0f);
    z.back() = 3.0f;
    table.add(static_cast<index_t>(n), static_cast<double>(ssmax::Softmax{}(z).back()),
              static_cast<double>(ssmax::SSMax<float>{0.43f}(z).back()));
  }
  return table.text();
}

inline std::string transition() {
  constexpr index_t sizes[] = {10, 1000, 100'000};
  constexpr float scales[] = {0.5f, 1.0f};
  std::vector<std::string> columns{"z_max"};
  for (const index_t n : sizes) columns.push_back("Softmax n = " + std::to_string(n));
  for (const float s : scales) {
    for (const index_t n : sizes) {
      columns.push_back("SSMax s = " + Table::cell(static_cast<double>(s)) + " n = " + std::to_string(n));
    }
  }
  Table table(columns);
  for (double largest = 0; largest < 20.01; largest += 0.2) {
    std::vector<std::string> cells{Table::cell(largest)};
    const auto add = [&](index_t n, const auto& function) {
      std::vector<float> z(static_cast<std::size_t>(n));
      for (std::size_t i = 0; i + 1 < z.size(); ++i) z[i] = static_cast<float>(i) / static_cast<float>(n - 2);
      z.back() = static_cast<float>(largest);
      cells.push_back(Table::cell(static_cast<double>(function(z).back())));
    };
    for (const index_t n : sizes) add(n, ssmax::Softmax{});
    for (const float s : scales) {
      for (const index_t n : sizes) add(n, ssmax::SSMax<float>{s});
    }
    table.line(cells);
  }
  return table.text();
}

inline std::string learnt_sizes(const Results& results) {
  Table table({"n", "p_n", "fit"});
  const auto& p = results.of("table").front()->evaluation.p;
  const Fit fit = fit_to_logarithm(p);
  for (std::size_t n = 2; n <= p.size(); ++n) {
    table.add(static_cast<index_t>(n), p[n - 1],
              fit.slope * std::log(static_cast<double>(n)) + fit.intercept);
  }
  return table.text();
}

// Calls f for the configurations (a) to (f).
template <class F>
void for_each_evaluated(const F& f) {
  for (const auto& each : kConfigurations) {
    if (each.form != Form::size_table) f(each);
  }
}

inline std::vector<std::string> titles(const char* first) {
  std::vector<std::string> columns{first};
  for_each_evaluated([&](const auto& each) { columns.emplace_back(each.title); });
  return columns;
}

// Adds a line with one number per configuration: the mean over its seeds.
inline void add_line(Table& table, double x, const Results& results,
                     const std::function<double(const Run&)>& f) {
  std::vector<std::string> cells{Table::cell(x)};
  for_each_evaluated(
      [&](const auto& each) { cells.push_back(Table::cell(mean_over(results.of(each.name), f))); });
  table.line(cells);
}

inline std::string learning_curves(const Results& results) {
  Table table(titles("tokens"));
  const auto& points = results.of("a").front()->curve;
  const Training& training = results.plan.training;
  const auto tokens = static_cast<double>(training.sequences * training.length);
  for (std::size_t i = 0; i < points.size(); ++i) {
    add_line(table, static_cast<double>(points[i].step) * tokens, results,
             [&](const Run& run) { return run.curve[i].text; });
  }
  return table.text();
}

inline std::string position_losses(const Results& results) {
  Table table(titles("position"));
  const auto length = static_cast<index_t>(results.of("a").front()->evaluation.position_loss.size());
  for (index_t first = 8; first < length;) {
    const index_t last = std::min(length, first + std::max<index_t>(1, first / 4));
    add_line(table, std::sqrt(static_cast<double>(first * last)), results,
             [&](const Run& run) { return loss_between(run.evaluation.position_loss, first, last); });
    first = last;
  }
  return table.text();
}

inline std::string needle_accuracy(const Results& results) {
  std::vector<std::string> columns = titles("context");
  columns.insert(columns.begin() + 1, "depth");
  Table table(columns);
  const auto& cells = results.of("a").front()->evaluation.needles;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    std::vector<std::string> line{Table::cell(cells[i].context), Table::cell(cells[i].depth)};
    for_each_evaluated([&](const auto& each) {
      line.push_back(Table::cell(mean_over(results.of(each.name), [&](const Run& run) {
        const NeedleCell& cell = run.evaluation.needles[i];
        return static_cast<double>(cell.right) / static_cast<double>(cell.trials);
      })));
    });
    table.line(line);
  }
  return table.text();
}

inline std::string head_scores(const Results& results) {
  Table table(titles("rank"));
  const std::size_t heads = std::min<std::size_t>(25, results.of("a").front()->evaluation.head_scores.size());
  for (std::size_t rank = 0; rank < heads; ++rank) {
    add_line(table, static_cast<double>(rank + 1), results,
             [&](const Run& run) { return sorted_down(run.evaluation.head_scores)[rank]; });
  }
  return table.text();
}

// Returns the trials of the first seed, sorted by score for each configuration, with the number of right
// digits.
inline std::string scored_needles(const Results& results) {
  std::vector<std::string> columns{"rank"};
  std::vector<std::vector<ScoredNeedle>> sorted;
  for_each_evaluated([&](const auto& each) {
    columns.emplace_back(each.title), columns.emplace_back("digits");
    sorted.push_back(results.of(each.name).front()->evaluation.scored);
    std::ranges::sort(sorted.back(), std::greater<>(), &ScoredNeedle::best_score);
  });
  Table table(columns);
  for (std::size_t rank = 0; rank < sorted.front().size(); ++rank) {
    std::vector<std::string> line{std::to_string(rank + 1)};
    for (const auto& scored : sorted) {
      line.push_back(Table::cell(scored[rank].best_score)), line.push_back(Table::cell(scored[rank].digits));
    }
    table.line(line);
  }
  return table.text();
}

}  // namespace detail

// Writes folder/figure_1.csv … figure_8.csv and the scripts that draw the figures. Writes the figures as
// PNG and SVG if gnuplot is installed.
inline void draw_figures(const Results& results, const std::filesystem::path& folder) {
  const std::vector<std::string> tables{detail::fading(),
                                        detail::learnt_sizes(results),
                                        detail::transition(),
                                        detail::learning_curves(results),
                                        detail::position_losses(results),
                                        detail::needle_accuracy(results),
                                        detail::head_scores(results),
                                        detail::scored_needles(results)};
  const Plan& plan = results.plan;
  const Fit fit = fit_to_logarithm(results.of("table").front()->evaluation.p);
  char settings[512];
  std::snprintf(settings, sizeof settings,
                "# Written with the figures' numbers.\ntrained = %td\ndepths = %td\ntheta_factor = %g\n"
                "scored_context = %td\nslope = %.6g\nintercept = %.6g\nr2 = %.6g\n",
                plan.training.length, plan.extent.depths, plan.theta_factor, plan.extent.scored_context,
                fit.slope, fit.intercept, fit.r2);
  write_file(folder / "settings.gp", settings);
  const std::filesystem::path scripts = std::filesystem::path(LONGCONTEXT_FOLDER) / "figures";
  write_file(folder / "style.gp", examples::read_file(scripts / "style.gp"));
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const std::string name = "figure_" + std::to_string(i + 1);
    write_file(folder / (name + ".csv"), tables[i]);
    write_file(folder / (name + ".gp"), examples::read_file(scripts / (name + ".gp")));
  }
  if (!examples::detail::has_gnuplot()) {
    std::printf("No pictures: gnuplot was not found. Install it with `sudo apt install gnuplot-nox`\n");
    return;
  }
  const examples::detail::InFolder inside(folder);
  for (std::size_t i = 1; i <= tables.size(); ++i) {
    for (const char* format : {"png", "svg"}) {
      const std::string name = "figure_" + std::to_string(i);
      const std::string command =
          std::string("gnuplot -e \"format = '") + format + "'; name = '" + name + "'\" " + name + ".gp";
      if (std::system(command.c_str()) != 0) throw std::runtime_error("gnuplot failed on " + name + ".gp");
    }
  }
  std::printf("Figures: %s\n", folder.string().c_str());
}

}  // namespace longcontext
