// Makes the ropes of published models (docs/options.md). Compares each rope with numbers of the model's configuration.
#include <algorithm>
#include <cmath>
#include <span>
#include <ssmax/rope.hpp>
#include <string>
#include <vector>

#include "check.hpp"

using namespace ssmax;

namespace {

// Llama 3.1: "rope_type": "llama3".
Rope<float> llama_3_1(index_t positions) {
  return {{.width = 128, .theta = 500'000, .scaling = RopeScaling::llama3(8, 8192, 1, 4)}, positions};
}

// gpt-oss: YaRN with "truncate": false, and no attention factor in the configuration.
Rope<float> gpt_oss(index_t positions) {
  return {{.width = 64,
           .theta = 150'000,
           .scaling = RopeScaling::yarn(32, 4096, 1, 32, false),
           .attention_factor = yarn_mscale(32)},
          positions};
}

// Ministral 3: YaRN with "mscale": 1 and "mscale_all_dim": 1. The attention factor is 1, the default.
Rope<float> ministral_3(index_t positions) {
  return {{.width = 128, .theta = 1e6, .scaling = RopeScaling::yarn(16, 16'384)}, positions};
}

// DeepSeek V3, latent attention: the last 64 of 576 channels. The call of attention has the scale of the model,
// yarn_mscale(40)² / √192.
Rope<float> deepseek_v3(index_t positions) {
  return {{.width = 64,
           .pairing = Pairing::interleaved,
           .scaling = RopeScaling::yarn(40, 4096),
           .first_channel = 512},
          positions};
}

// Gemma 4, global layers: channels i and i + 256, a quarter of the pairs. A pair with ω = 0 is not rotated.
Rope<float> gemma_4(index_t positions) {
  std::vector<double> omega = rope_frequencies({.width = 512, .theta = 1e6});
  std::fill(omega.begin() + 64, omega.end(), 0.0);
  return {{.width = 512, .frequencies = omega}, positions};
}

// Phi-3, LongRoPE: `factors` is "short_factor", or "long_factor" for sequences of more than 4096 tokens.
Rope<float> phi_3(std::span<const double> factors, index_t positions) {
  std::vector<double> omega = rope_frequencies({.width = 96});
  for (std::size_t i = 0; i < omega.size(); ++i) omega[i] /= factors[i];
  const double extension = 131'072.0 / 4096;
  return {{.width = 96,
           .attention_factor = std::sqrt(1 + std::log(extension) / std::log(4096)),
           .frequencies = omega},
          positions};
}

// Qwen2.5-VL: "mrope_section": [16, 24, 24]. `positions` is [3, tokens]: the time, row and column of each token.
Rope<float> qwen_2_5_vl(View<const index_t, 2> positions) {
  std::vector<index_t> axes(64, 2);
  std::fill_n(axes.begin(), 16, 0);
  std::fill_n(axes.begin() + 16, 24, 1);
  return {{.width = 128, .theta = 1e6}, positions, axes};
}

/// Compares m·cos ω and m·sin ω of a pair of half-split channels.
void compare(examples::Check& check, const std::string& model, const Rope<float>& rope, index_t pair,
             double omega, double m) {
  std::vector<float> row(static_cast<std::size_t>(rope.width()));
  float &a = row[static_cast<std::size_t>(pair)], &b = row[static_cast<std::size_t>(pair + rope.width() / 2)];
  a = 1;
  const View<float, 2> view(row.data(), {1, rope.width()});
  ssmax::rope<float>(view, view, rope, 1);
  check.near(model + ": cos", static_cast<double>(a), m * std::cos(omega), 1e-6);
  check.near(model + ": sin", static_cast<double>(b), m * std::sin(omega), 1e-6);
}

}  // namespace

int main() {
  examples::Check check;
  compare(check, "Llama 3.1", llama_3_1(2), 63, std::pow(500'000, -126.0 / 128) / 8, 1);
  compare(check, "gpt-oss", gpt_oss(2), 17, 1.293187e-4, 0.1 * std::log(32) + 1);
  compare(check, "Ministral 3", ministral_3(2), 63, std::pow(1e6, -126.0 / 128) / 16, 1);
  compare(check, "Gemma 4", gemma_4(2), 63, std::pow(1e6, -126.0 / 512), 1);
  compare(check, "Gemma 4, a pair that is not rotated", gemma_4(2), 64, 0, 1);
  const std::vector<double> factors(48, 2.0);
  compare(check, "Phi-3", phi_3(factors, 2), 1, std::pow(10'000, -2.0 / 96) / 2, 1.190238071);

  const std::vector<index_t> positions{0, 9, 0, 1, 0, 8};  // of two tokens; the column of the second is 8
  compare(check, "Qwen2.5-VL", qwen_2_5_vl(View<const index_t, 2>(positions.data(), {3, 2})), 40,
          8 * std::pow(1e6, -80.0 / 128), 1);

  // The last pair of DeepSeek V3 is divided by 40. Channels before 512 stay unchanged.
  std::vector<float> row(576, 1.0f);
  const View<float, 2> view(row.data(), {1, 576});
  ssmax::rope<float>(view, view, deepseek_v3(2), 1);
  const double omega = std::pow(10'000, -62.0 / 64) / 40;
  check.near("DeepSeek V3", static_cast<double>(row[575]), std::cos(omega) + std::sin(omega), 1e-6);
  check.holds("DeepSeek V3: other channels",
              std::all_of(row.begin(), row.begin() + 512, [](float x) { return x == 1; }));
  return check.exit_code();
}
