// docs/training.md shows this function: QK-clip of Kimi K2 (arXiv:2507.20534, section 2.1) by the largest logit of each
// head. The program clips the weights of a layer and calls attention again.
#include <cmath>
#include <span>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "check.hpp"
#include "random.hpp"

using namespace ssmax;

// After a step of the optimizer: multiplies each head's projections of q and k by √γ with γ = min(1, limit / largest
// logit). `largest` has the largest logit of each head. wq and wk are [head][numbers of a head].
void clip_logits(std::span<const float> largest, float limit, std::span<float> wq, std::span<float> wk) {
  const std::size_t size = wq.size() / largest.size();
  for (std::size_t head = 0; head < largest.size(); ++head) {
    if (largest[head] <= limit) continue;
    const float factor = std::sqrt(limit / largest[head]);
    for (float& weight : wq.subspan(head * size, size)) weight *= factor;
    for (float& weight : wk.subspan(head * size, size)) weight *= factor;
  }
}

namespace {

constexpr index_t kHeads = 3, kLength = 40, kInputs = 16, kWidth = 8;

std::vector<float> random_numbers(index_t count, examples::Random& random) {
  std::vector<float> numbers;
  for (index_t i = 0; i < count; ++i) numbers.push_back(random.standard());
  return numbers;
}

/// Returns x·w, [head, position, channel], for x [position, input] and w [head][input][channel].
std::vector<float> project(const std::vector<float>& x, const std::vector<float>& w) {
  std::vector<float> result;
  for (index_t head = 0; head < kHeads; ++head) {
    for (index_t i = 0; i < kLength; ++i) {
      for (index_t c = 0; c < kWidth; ++c) {
        float sum = 0;
        for (index_t t = 0; t < kInputs; ++t)
          sum += x[static_cast<std::size_t>(i * kInputs + t)] *
                 w[static_cast<std::size_t>((head * kInputs + t) * kWidth + c)];
        result.push_back(sum);
      }
    }
  }
  return result;
}

}  // namespace

int main() {
  examples::Check check;
  examples::Random random(1);
  const std::vector<float> x = random_numbers(kLength * kInputs, random);
  std::vector<float> wq = random_numbers(kHeads * kInputs * kWidth, random), wk = wq, v = project(x, wk),
                     out(v), largest(kHeads * kLength);
  for (float& weight : std::span(wk).first(kInputs * kWidth)) weight *= 0.01f;  // head 0 has small logits
  std::vector<float> heads(kHeads);
  const View<float, 3> rows(largest.data(), {1, kHeads, kLength});
  const auto forward = [&] {
    const std::vector<float> q = project(x, wq), k = project(x, wk);
    attention({.q = {q.data(), {1, kHeads, kLength, kWidth}},
               .k = {k.data(), {1, kHeads, kLength, kWidth}},
               .v = {v.data(), {1, kHeads, kLength, kWidth}},
               .out = {out.data(), {1, kHeads, kLength, kWidth}},
               .statistics = {.largest = rows}},
              Causal{});
    reduce_heads<float>({.largest = rows}, {.largest = heads});
    return heads;
  };
  const float limit = 20;
  const std::vector<float> before = forward();
  clip_logits(before, limit, wq, wk);
  const std::vector<float> after = forward();
  check.holds("a head below the limit is unchanged", before[0] < limit && after[0] == before[0]);
  for (const std::size_t head : {1u, 2u}) {
    check.holds("a head exceeds the limit", before[head] > limit);
    check.near("its largest logit after the step", static_cast<double>(after[head]),
               static_cast<double>(limit), 1e-3);
  }
  return check.exit_code();
}
