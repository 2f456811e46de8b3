// Synthetic requests of a server: Poisson arrivals, log-normal lengths, and system prompts that requests share. All prompts
// are texts of the language of cycles.hpp. A prompt after a system prompt has the cycle of the system prompt.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <span>
#include <vector>

#include "cycles.hpp"

namespace examples {

struct SystemPrompt {
  Cycle cycle;
  std::vector<index_t> tokens;
};

struct Request {
  double arrival;               // in seconds
  index_t system;               // the number of the system prompt, or -1
  Cycle cycle;                  // of all tokens
  std::vector<index_t> tokens;  // the prompt after the system prompt
  index_t outputs;              // tokens to generate
};

// A log-normal length: half of the lengths are at most `median`. Lengths are cut at `shortest` and `longest`.
struct Length {
  double median, deviation;
  index_t shortest, longest;

  index_t draw(Random& random) const {
    const double radius = std::sqrt(-2 * std::log(1 - random.unit()));
    const double normal = radius * std::cos(2 * std::numbers::pi * random.unit());  // Box and Muller
    const double length = median * std::exp(deviation * normal);
    return static_cast<index_t>(
        std::clamp(length, static_cast<double>(shortest), static_cast<double>(longest)));
  }
};

struct Traffic {
  index_t requests;
  double rate;          // requests per second
  double system_share;  // the part of the requests that begin with a system prompt
  Length prompt, outputs;
};

inline SystemPrompt draw_system_prompt(index_t length, Random& random) {
  const Cycle cycle = draw_cycle(kLongestCycle, random);
  return {cycle, draw_text(cycle, length, random)};
}

// Returns the requests in the order of their arrivals.
inline std::vector<Request> draw_requests(const Traffic& traffic, std::span<const SystemPrompt> systems,
                                          Random& random) {
  std::vector<Request> requests;
  double now = 0;
  for (index_t i = 0; i < traffic.requests; ++i) {
    now -= std::log(1 - random.unit()) / traffic.rate;
    const index_t system = random.unit() < traffic.system_share ? random.below(std::ssize(systems)) : -1;
    const index_t length = traffic.prompt.draw(random);
    const Cycle cycle =
        system < 0 ? draw_cycle_for(length, random) : systems[static_cast<std::size_t>(system)].cycle;
    const std::vector<index_t> tokens = draw_text(cycle, length, random);
    requests.push_back({now, system, cycle, tokens, traffic.outputs.draw(random)});
  }
  return requests;
}

}  // namespace examples
