// Draws figure 1 of the paper: attention fading. The last of n logits is +3, all others are -2. The
// probability of the last logit is 1 / (1 + (n-1) e^-5) with Softmax and 1 / (1 + (n-1) n^-5s) with SSMax.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <ssmax/ssmax.hpp>
#include <string>
#include <vector>

#include "check.hpp"
#include "plot.hpp"

namespace {

constexpr double kS = 0.43;
constexpr double kGap = 5;  // difference of -2 and +3

double softmax_formula(double n) { return 1 / (1 + (n - 1) * std::exp(-kGap)); }
double ssmax_formula(double n) { return 1 / (1 + (n - 1) * std::pow(n, -kGap * kS)); }

struct Measured {
  double n, softmax, ssmax;
};

Measured measure(std::size_t n) {
  std::vector<float> z(n, -2.0f);
  z.back() = 3.0f;
  const auto fading = ssmax::Softmax{}(z);
  const auto focused = ssmax::SSMax<float>{static_cast<float>(kS)}(z);
  return {static_cast<double>(n), static_cast<double>(fading.back()), static_cast<double>(focused.back())};
}

void print_table(const std::vector<Measured>& rows) {
  std::printf("Figure 1: the largest probability of z = (-2, ..., -2, +3), s = %.2f\n\n", kS);
  std::printf("%9s %14s %14s %14s %14s\n", "n", "Softmax", "closed form", "SSMax", "closed form");
  for (const auto& [n, softmax, ssmax] : rows) {
    std::printf("%9.0f %14.8f %14.8f %14.8f %14.8f\n", n, softmax, softmax_formula(n), ssmax,
                ssmax_formula(n));
  }
  std::printf("\nUnder Softmax the largest logit fades as n grows; under SSMax it keeps the attention.\n");
}

examples::Plot figure(const std::vector<Measured>& rows) {
  examples::Curve softmax{"Softmax", "points pointtype 7 pointsize 1.6 linecolor rgb '#1f5fbf'", {}, {}};
  examples::Curve ssmax{
      "SSMax, s = 0.43", "points pointtype 5 pointsize 1.6 linecolor rgb '#d62728'", {}, {}};
  for (const auto& row : rows) {
    softmax.x.push_back(row.n), softmax.y.push_back(row.softmax);
    ssmax.x.push_back(row.n), ssmax.y.push_back(row.ssmax);
  }
  examples::Curve softmax_line{"closed form", "lines linewidth 2 linecolor rgb '#1f5fbf'", {}, {}};
  examples::Curve ssmax_line{"closed form", "lines linewidth 2 linecolor rgb '#d62728'", {}, {}};
  for (double exponent = 1; exponent <= 6.001; exponent += 0.05) {
    const double n = std::pow(10, exponent);
    softmax_line.x.push_back(n), softmax_line.y.push_back(softmax_formula(n));
    ssmax_line.x.push_back(n), ssmax_line.y.push_back(ssmax_formula(n));
  }
  return {.name = "figure_1",
          .title = "Attention fading: z = (-2, ..., -2, +3)",
          .x_label = "n, the number of logits",
          .y_label = "largest probability",
          .settings = {"set logscale x", "set format x '10^{%T}'", "set xrange [8:1.3e6]",
                       "set yrange [-0.02:1.05]", "set key at graph 0.98, 0.6"},
          .curves = {ssmax, ssmax_line, softmax, softmax_line}};
}

}  // namespace

int main(int argc, char** argv) {
  std::string folder;
  CLI::App app{"Figure 1 of the paper: Softmax fades as n grows, SSMax does not."};
  app.add_option("--plot", folder, "Write figure_1.gp and figure_1.png to this folder");
  CLI11_PARSE(app, argc, argv);

  std::vector<Measured> rows;
  for (std::size_t n = 10; n <= 1'000'000; n *= 10) rows.push_back(measure(n));
  print_table(rows);

  examples::Check check;
  for (const auto& [n, softmax, ssmax] : rows) {
    const std::string at = " at n = " + std::to_string(static_cast<long>(n));
    check.near("Softmax" + at, softmax, softmax_formula(n), 5e-7);
    check.near("SSMax" + at, ssmax, ssmax_formula(n), 5e-7);
  }
  try {
    if (!folder.empty()) examples::draw(figure(rows), folder);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "figure_1: %s\n", error.what());
    return EXIT_FAILURE;
  }
  return check.exit_code();
}
