// Uses SSMax in a model that has Softmax, by changing one argument of the call. Shows that n is correct for
// every way to call attention, and shows the errors of common mistakes. docs/drop_in.md is the guide.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "check.hpp"
#include "random.hpp"

namespace {

using namespace ssmax;

constexpr index_t kHeads = 4, kKvHeads = 2, kWidth = 32, kTokens = 96, kTrained = 1024;

// A tensor [1, head, position, channel] in one array, in the order of positions.
struct Tensor {
  index_t heads, tokens;
  std::vector<float> values = std::vector<float>(static_cast<std::size_t>(heads * tokens * kWidth));

  View<float, 4> view(index_t first, index_t count) {
    return {values.data() + first * heads * kWidth,
            {1, heads, count, kWidth},
            {tokens * heads * kWidth, kWidth, heads * kWidth, 1}};
  }
  View<float, 4> view() { return view(0, tokens); }
};

Tensor random_tensor(index_t heads, index_t tokens, examples::Random& random) {
  Tensor tensor{heads, tokens};
  for (float& x : tensor.values) x = random.standard();
  return tensor;
}

// A score that adds the same number to every logit.
struct Added {
  double value;

  double operator()(double logit, const Key&) const { return logit + value; }
  double derivative(double, const Key&) const { return 1; }
};

// Computes a layer's attention. A Softmax model calls it with Softmax{}.
template <class S, class M>
void attend(Tensor& q, Tensor& k, Tensor& v, Tensor& out, const S& scaling, const M& mask) {
  attention({.q = q.view(), .k = k.view(), .v = v.view(), .out = out.view()}, scaling, mask);
}

// Returns the largest absolute difference. Exception: returns NaN if a difference is NaN.
double largest_difference(View<float, 4> a, View<float, 4> b) {
  double largest = 0;
  for (index_t head = 0; head < a.extent(1); ++head) {
    for (index_t token = 0; token < a.extent(2); ++token) {
      for (index_t i = 0; i < kWidth; ++i) {
        const auto difference = static_cast<double>(a(0, head, token, i) - b(0, head, token, i));
        if (!(std::abs(difference) <= largest)) largest = std::abs(difference);
        if (std::isnan(largest)) return largest;
      }
    }
  }
  return largest;
}

}  // namespace

int main() {
  examples::Random random(1);
  examples::Check check;
  Tensor q = random_tensor(kHeads, kTokens, random), k = random_tensor(kKvHeads, kTokens, random),
         v = random_tensor(kKvHeads, kTokens, random);
  Tensor before{kHeads, kTokens}, after{kHeads, kTokens}, other{kHeads, kTokens};

  // Choose s for a trained model: the multiplier s·ln n is 1 on average over the trained lengths.
  double sum = 0;
  for (index_t n = 1; n <= kTrained; ++n) sum += std::log(static_cast<double>(n));
  const std::vector<float> s(kHeads, static_cast<float>(kTrained / sum));
  const SSMax<float> scaling{s};

  attend(q, k, v, before, Softmax{}, Causal{});  // before
  attend(q, k, v, after, scaling, Causal{});     // after
  std::printf("s = %.5f for a model that was trained at %td; its multiplier at n = 1, 64, 1024, 16384:", s[0],
              kTrained);
  for (const index_t n : {1, 64, 1024, 16'384}) std::printf(" %.2f", scaling(Row{.n = n}));
  std::printf("\n\n%-62s %10s\n", "expected to be the same", "difference");
  const auto report = [&](const char* what, double difference, bool same) {
    std::printf("%-62s %10.1e\n", what, difference);
    check.holds(what, same ? difference < 1e-5 : difference > 1e-3);
  };

  // Decode token by token. n comes from the cache: for the last token n is 96, not 1.
  KvCache<float> cache({.kv_heads = kKvHeads, .width = kWidth, .capacity = kTokens});
  cache.append(k.view(0, 64), v.view(0, 64));
  for (index_t token = 64; token < kTokens; ++token) {
    cache.append(k.view(token, 1), v.view(token, 1));
    attention({.q = q.view(token, 1), .keys = cache, .out = other.view(token, 1)}, scaling, Causal{});
  }
  report("token by token against a cache", largest_difference(after.view(64, 32), other.view(64, 32)), true);

  // Mask the padding after a sequence of 64 keys. The padding is not counted in n and not read. The mask is
  // not causal, as in an encoder: causal queries of the sequence do not see the padding.
  Tensor padded_k = k, padded_v = v, expected{kHeads, kTokens};
  std::fill(padded_k.values.begin() + 64 * kKvHeads * kWidth, padded_k.values.end(), 1e30f);
  std::fill(padded_v.values.begin() + 64 * kKvHeads * kWidth, padded_v.values.end(), std::nanf(""));
  const std::vector<index_t> lengths{64};
  attend(q, padded_k, padded_v, other, scaling, KeyLengths{lengths});
  attention({.q = q.view(), .k = k.view(0, 64), .v = v.view(0, 64), .out = expected.view()}, scaling);
  report("padded after token 64", largest_difference(expected.view(), other.view()), true);

  // Use a window of 32 keys: n of the last token is 32.
  attend(q, k, v, other, scaling, SlidingWindow{31});
  attention({.q = q.view(95, 1), .k = k.view(64, 32), .v = v.view(64, 32), .out = expected.view(95, 1)},
            scaling);
  report("in a window of 32, for the last token", largest_difference(expected.view(95, 1), other.view(95, 1)),
         true);

  std::printf("\n%-62s %10s\n", "expected to differ, and mistakes", "difference");
  report("Softmax, in a model that was trained with it", largest_difference(before.view(), after.view()),
         false);

  // Add s·ln n to the logits: softmax does not change if the same number is added to every logit.
  attention({.q = q.view(), .k = k.view(), .v = v.view(), .out = other.view()}, Softmax{}, Causal{},
            Added{std::log(96.0)});
  report("s·ln n added to the logits: the same as Softmax", largest_difference(before.view(), other.view()),
         true);
  report("                            and not SSMax", largest_difference(after.view(), other.view()), false);

  // Multiply all rows by the multiplier of n = 96, like a kernel with a single scale.
  attend(q, k, v, other, Constant{static_cast<double>(s[0]) * std::log(96.0)}, Causal{});
  report("s·ln 96 for all rows: wrong for all but the last",
         largest_difference(after.view(0, 95), other.view(0, 95)), false);
  report("                      where n is 96", largest_difference(after.view(95, 1), other.view(95, 1)),
         true);
  return check.exit_code();
}
