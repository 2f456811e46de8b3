// Synthetic requests of a server: Poisson arrivals, log-normal lengths, and system prompts that requests share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <vector>

#include "random.hpp"

namespace examples {

using ssmax::index_t;

struct Request {
  double arrival;               // in seconds
  index_t system;               // the number of the system prompt, or -1
  std::vector<index_t> tokens;  // the prompt after the system prompt
  index_t outputs;              // tokens to generate
};

// A log-normal length: half of the lengths are at most `median`. Lengths are cut at `longest`.
struct Length {
  double median, deviation;
  index_t longest;

  index_t draw(Random& random) const {
    const double radius = std::sqrt(-2 * std::log(1 - random.unit()));
    const double normal = radius * std::cos(2 * std::numbers::pi * random.unit());  // Box and Muller
    const double length = median * std::exp(deviation * normal);
    return static_cast<index_t>(std::clamp(length, 1.0, static_cast<double>(longest)));
  }
};

struct Traffic {
  index_t requests, vocabulary, systems;
  double rate;          // requests per second
  double system_share;  // the part of the requests that begin with a system prompt
  Length prompt, outputs;
};

inline std::vector<index_t> draw_tokens(index_t count, index_t vocabulary, Random& random) {
  std::vector<index_t> tokens(static_cast<std::size_t>(count));
  for (index_t& token : tokens) token = random.below(vocabulary);
  return tokens;
}

// Returns the requests in the order of their arrivals.
inline std::vector<Request> draw_requests(const Traffic& traffic, Random& random) {
  std::vector<Request> requests;
  double now = 0;
  for (index_t i = 0; i < traffic.requests; ++i) {
    now -= std::log(1 - random.unit()) / traffic.rate;
    const index_t system = random.unit() < traffic.system_share ? random.below(traffic.systems) : -1;
    const index_t length = traffic.prompt.draw(random);
    requests.push_back(
        {now, system, draw_tokens(length, traffic.vocabulary, random), traffic.outputs.draw(random)});
  }
  return requests;
}

}  // namespace examples
