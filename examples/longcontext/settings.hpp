// The sizes of a model and of its training. Checkpoints contain the settings as JSON.
#pragma once

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <ssmax/config.hpp>
#include <stdexcept>
#include <string>

namespace longcontext {

using ssmax::index_t;

struct Shape {
  index_t layers = 2, heads = 4, head_width = 32, hidden = 352;
  index_t vocabulary = 512;  // 256: bytes
  bool tied = false;         // true if the head's weights are the embedding's
  // RoPE's θ in training. With θ · F, a pair of channels of wavelength λ rotates (λ / 2π)^(ln F / ln θ)
  // times slower. For F = 50 and the trained length as λ, the factor is 8.8 here, 8.5 for 128 tokens and θ
  // = 250, and 8.7 in the paper. The paper's θ of 10,000 would give 4.8 here.
  double theta = 800;

  index_t width() const { return heads * head_width; }
  bool operator==(const Shape&) const = default;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Shape, layers, heads, head_width, hidden, vocabulary, tied, theta)

struct Training {
  index_t length = 256;   // tokens of a sequence
  index_t sequences = 2;  // sequences per update; few sequences allow many updates
  index_t steps = 5000;
  double needle_part = 0.5;  // fraction of sequences that contain a needle and ask for it
  double rate = 1e-3;
  double decay = 0.1;  // weight decay of matrices
  double clip = 1;     // largest norm of a gradient
  std::uint64_t seed = 1;

  bool operator==(const Training&) const = default;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Training, length, sequences, steps, needle_part, rate, decay, clip, seed)

inline constexpr index_t kMostSteps = 1'000'000'000'000;

inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

inline void check(const Shape& shape) {
  require(shape.layers >= 1 && shape.layers <= 1024, "layers must lie between 1 and 1024");
  require(shape.heads >= 1 && shape.heads <= 1024, "heads must lie between 1 and 1024");
  require(shape.head_width >= 2 && shape.head_width <= 1024 && shape.head_width % 2 == 0,
          "head_width must be even and lie between 2 and 1024");
  require(shape.hidden >= 1 && shape.hidden <= 1 << 20, "hidden must lie between 1 and 2^20");
  require(shape.vocabulary >= 256 && shape.vocabulary <= 65'536, "vocabulary must lie between 256 and 65536");
  require(shape.theta > 1 && shape.theta <= 1e12, "theta must lie above 1 and not above 1e12");
}

inline void check(const Training& training) {
  require(training.length >= 1 && training.length <= 1 << 20, "length must lie between 1 and 2^20");
  require(training.sequences >= 1 && training.sequences <= 1 << 20, "sequences must lie between 1 and 2^20");
  require(training.steps >= 1 && training.steps <= kMostSteps, "steps must lie between 1 and 10^12");
  require(training.needle_part >= 0 && training.needle_part <= 1, "needle_part must lie between 0 and 1");
  const double needles = training.needle_part * static_cast<double>(training.sequences);
  require(
      std::abs(needles - std::round(needles)) < 1e-6,
      "needle_part of " + std::to_string(training.sequences) + " sequences must be a whole number of them");
  require(training.rate > 0, "rate must be positive");
  require(training.decay >= 0, "decay must not be negative");
  require(training.clip > 0, "clip must be positive");
}

}  // namespace longcontext
