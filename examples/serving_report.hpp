// Measurements of a server: a table with a column per server, and a plot of the times of tokens.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <list>
#include <string>
#include <vector>

#include "plot.hpp"

namespace examples {

struct Served {
  std::string name, colour;
  double seconds = 0, busy = 0;  // busy: without the time in which the server waits for the next arrival
  double attention = 0;          // seconds in attention
  double steps = 0, sequences = 0, tokens = 0, preempted = 0;
  double right = 0;   // tokens that follow the rule of the language
  double shared = 0;  // of all steps: sequences whose first keys are computed once for several sequences
  double used_mebibytes = 0, contiguous_mebibytes = 0;
  std::vector<double> first, next;  // milliseconds to the first token of a request, and to each other token
};

// Returns 0 without values.
inline double percentile(std::vector<double> values, double part) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  return values[static_cast<std::size_t>(part * static_cast<double>(values.size() - 1))];
}

inline void print_table(const std::list<Served>& servers) {
  std::printf("%-38s", "");
  for (const Served& s : servers) std::printf("%14s", s.name.c_str());
  const auto row = [&](const char* name, int digits, const auto& value) {
    std::printf("\n%-38s", name);
    for (const Served& s : servers) std::printf("%14.*f", digits, value(s));
  };
  row("right tokens, %", 1, [](const Served& s) { return 100 * s.right / s.tokens; });
  row("tokens/s while busy", 0, [](const Served& s) { return s.tokens / s.busy; });
  row("busy part of the time, %", 0, [](const Served& s) { return 100 * s.busy / s.seconds; });
  row("time to first token, p50, ms", 1, [](const Served& s) { return percentile(s.first, 0.5); });
  row("time to first token, p99, ms", 1, [](const Served& s) { return percentile(s.first, 0.99); });
  row("time per output token, p50, ms", 1, [](const Served& s) { return percentile(s.next, 0.5); });
  row("time per output token, p99, ms", 1, [](const Served& s) { return percentile(s.next, 0.99); });
  row("time in attention, %", 0, [](const Served& s) { return 100 * s.attention / s.busy; });
  row("attention per step, ms", 2, [](const Served& s) { return 1e3 * s.attention / s.steps; });
  row("steps", 0, [](const Served& s) { return s.steps; });
  row("sequences per step", 1, [](const Served& s) { return s.sequences / s.steps; });
  row("with common keys computed once", 1, [](const Served& s) { return s.shared / s.steps; });
  row("preempted sequences", 0, [](const Served& s) { return s.preempted; });
  row("peak memory of used pages, MiB", 1, [](const Served& s) { return s.used_mebibytes; });
  row("contiguous caches of all slots, MiB", 1, [](const Served& s) { return s.contiguous_mebibytes; });
  std::printf("\n");
}

// The part of the tokens that take at most x milliseconds.
inline Curve distribution(const std::string& label, const std::string& look, std::vector<double> times) {
  Curve curve{label, "lines linewidth 2.5 linecolor rgb " + look, times, {}};
  std::ranges::sort(curve.x);
  for (std::size_t i = 1; i <= times.size(); ++i)
    curve.y.push_back(static_cast<double>(i) / static_cast<double>(times.size()));
  return curve;
}

inline Plot figure(const std::string& name, const std::list<Served>& servers) {
  Plot plot{.name = name,
            .title = "Continuous batching: how long tokens take",
            .x_label = "time of a token at most, ms",
            .y_label = "part of the tokens",
            .settings = {"set logscale x", "set yrange [0:1.02]", "set key top left"},
            .curves = {}};
  for (const Served& s : servers) {
    plot.curves.push_back(distribution("output token, " + s.name, s.colour, s.next));
    plot.curves.push_back(distribution("first token, " + s.name, s.colour + " dashtype 2", s.first));
  }
  return plot;
}

}  // namespace examples
