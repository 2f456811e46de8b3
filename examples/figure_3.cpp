// Draws figure 3 of the paper: the probability of the largest logit z_max, for z = (0, 1/(n-2), 2/(n-2),
// ..., 1, z_max). With Softmax, the z_max that gets half of the attention grows with n. With SSMax, this
// z_max stays near 1 + 1/s.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <ssmax/ssmax.hpp>
#include <string>
#include <vector>

#include "check.hpp"
#include "plot.hpp"

namespace {

constexpr std::size_t kSizes[] = {10, 1'000, 100'000};
constexpr float kScales[] = {0.5f, 1.0f};
constexpr double kLargest = 20;  // largest z_max on the horizontal axis
constexpr int kSteps = 200;

std::vector<float> logits(std::size_t n) {
  std::vector<float> z(n);
  for (std::size_t i = 0; i + 1 < n; ++i) z[i] = static_cast<float>(static_cast<double>(i) / double(n - 2));
  return z;
}

// The probability of z_max by the formula in long double: e^(c z_max) / (e^(c z_max) + the sum of the other
// terms).
class Formula {
 public:
  Formula(const std::vector<float>& z, long double multiplier) : multiplier_(multiplier) {
    for (std::size_t i = 0; i + 1 < z.size(); ++i)
      others_ += std::exp(multiplier_ * static_cast<long double>(z[i]));
  }

  double probability(double z_max) const {
    return static_cast<double>(1 / (1 + others_ * std::exp(-multiplier_ * static_cast<long double>(z_max))));
  }

  // Returns the z_max that gets half of the attention.
  double half_point() const { return static_cast<double>(std::log(others_) / multiplier_); }

 private:
  long double multiplier_, others_ = 0;
};

struct Result {
  std::string name;
  std::size_t n;
  double half_point;
  examples::Curve curve;
};

// `function` is a functor of the library: Softmax{} or SSMax<float>{s}.
template <class Function>
Result measure(const std::string& name, const std::string& style, std::size_t n, const Function& function,
               long double multiplier, examples::Check& check) {
  std::vector<float> z = logits(n), y(n);
  const Formula formula(z, multiplier);
  const auto probability = [&](double z_max) {
    z.back() = static_cast<float>(z_max);
    function(z, y);
    const auto value = static_cast<double>(y.back());
    check.near(name + ", n = " + std::to_string(n) + ", z_max = " + std::to_string(z_max), value,
               formula.probability(static_cast<double>(z.back())), 5e-7);
    return value;
  };

  Result result{name, n, formula.half_point(), {name + ", n = " + std::to_string(n), style, {}, {}}};
  for (int step = 0; step <= kSteps; ++step) {
    const double z_max = kLargest * step / kSteps;
    result.curve.x.push_back(z_max), result.curve.y.push_back(probability(z_max));
  }
  check.near(name + " at its half point", probability(result.half_point), 0.5, 1e-5);
  return result;
}

std::vector<Result> measure_all(examples::Check& check) {
  const std::string colours[] = {"'#d62728'", "'#ff9f1c'"};
  const std::string dashes[] = {"1", "2", "3"};
  const auto style = [&](const std::string& colour, std::size_t dash) {
    return "lines linewidth 2.5 linecolor rgb " + colour + " dashtype " + dashes[dash];
  };
  std::vector<Result> results;
  for (std::size_t i = 0; i < std::size(kSizes); ++i) {
    results.push_back(measure("Softmax", style("'#1f5fbf'", i), kSizes[i], ssmax::Softmax{}, 1, check));
  }
  for (std::size_t k = 0; k < std::size(kScales); ++k) {
    const float s = kScales[k];
    const std::string name = k == 0 ? "SSMax, s = 0.5" : "SSMax, s = 1";
    for (std::size_t i = 0; i < std::size(kSizes); ++i) {
      const long double multiplier =
          static_cast<long double>(s) * std::log(static_cast<long double>(kSizes[i]));
      results.push_back(
          measure(name, style(colours[k], i), kSizes[i], ssmax::SSMax<float>{s}, multiplier, check));
    }
  }
  return results;
}

void print_table(const std::vector<Result>& results) {
  std::printf("Figure 3: the z_max that gets half of the attention, z = (0, 1/(n-2), ..., 1, z_max)\n\n");
  std::printf("%-18s %9s %9s\n", "", "n", "z_max");
  for (const auto& result : results) {
    std::printf("%-18s %9zu %9.4f\n", result.name.c_str(), result.n, result.half_point);
  }
  std::printf(
      "\nSoftmax asks for ln n more and more; SSMax never for more than 1 + 1/s (%.0f and %.0f here).\n",
      1 + 1 / static_cast<double>(kScales[0]), 1 + 1 / static_cast<double>(kScales[1]));
}

void check_relations(const std::vector<Result>& results, examples::Check& check) {
  const std::size_t sizes = std::size(kSizes);
  for (std::size_t i = 1; i < sizes; ++i) {
    check.holds("Softmax asks for at least 4 more when n grows a hundredfold",
                results[i].half_point > results[i - 1].half_point + 4);
  }
  for (std::size_t i = sizes; i < results.size(); ++i) {
    const auto s = static_cast<double>(kScales[i / sizes - 1]);
    check.holds("SSMax asks for at most 1 + 1/s", results[i].half_point <= 1 + 1 / s);
  }
}

examples::Plot figure(const std::vector<Result>& results) {
  examples::Plot plot{.name = "figure_3",
                      .title = "How large must a logit be? z = (0, 1/(n-2), ..., 1, z_{max})",
                      .x_label = "z_{max}",
                      .y_label = "probability of z_{max}",
                      .settings = {"set xrange [0:20]", "set yrange [-0.02:1.05]",
                                   "set key at graph 1, 0.47 samplen 3 font ',11'"},
                      .curves = {}};
  for (const auto& result : results) plot.curves.push_back(result.curve);
  return plot;
}

}  // namespace

int main(int argc, char** argv) {
  std::string folder;
  CLI::App app{"Figure 3 of the paper: the logit that gets the attention, under Softmax and SSMax."};
  app.add_option("--plot", folder, "Write figure_3.gp and figure_3.png to this folder");
  CLI11_PARSE(app, argc, argv);

  examples::Check check;
  const auto results = measure_all(check);
  print_table(results);
  check_relations(results, check);
  try {
    if (!folder.empty()) examples::draw(figure(results), folder);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "figure_3: %s\n", error.what());
    return EXIT_FAILURE;
  }
  return check.exit_code();
}
