// docs/attention.md and docs/options.md show these calls: masks, score functions, sinks, options, a plan.
// The program compares each call with a loop over the keys.
#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <ssmax/ssmax.hpp>
#include <string>
#include <vector>

#include "check.hpp"
#include "random.hpp"

using namespace ssmax;

struct Tensors {
  View<const float, 4> q, k, v;  // [batch, head, position, channel]
  View<float, 4> out;
};

// A window of 16 keys in padded sequences, capped logits, SSMax.
void window_in_padded_sequences(const Tensors& x, std::span<const float> s,
                                std::span<const index_t> lengths) {
  attention({.q = x.q, .k = x.k, .v = x.v, .out = x.out}, SSMax<float>{s},
            SlidingWindow{15} & KeyLengths{lengths}, Softcap{50});
}

// The first 4 keys and the last 16. Each head also has a learned sink.
void window_with_sinks(const Tensors& x, std::span<const float> s, std::span<const float> sinks) {
  attention({.q = x.q, .k = x.k, .v = x.v, .out = x.out, .sinks = sinks}, SSMax<float>{s},
            SlidingWindow{15, 0, 4});
}

// The logits are capped first. Then ALiBi adds slope · (key position - query position). The slopes are doubles.
void capped_then_alibi(const Tensors& x, std::span<const double> slopes) {
  attention({.q = x.q, .k = x.k, .v = x.v, .out = x.out}, Causal{}, Softcap{50} | Alibi{slopes});
}

// An additive mask [batch, head, query, key] that is -inf at keys to leave out: MatrixMask masks these keys, Bias adds
// the other numbers.
void additive_mask(const Tensors& x, View<const float, 4> additive) {
  attention({.q = x.q, .k = x.k, .v = x.v, .out = x.out}, MatrixMask(additive), Bias(additive));
}

// Keys of the same parity as the query: any function of query and key. Causal limits the keys that it is called for.
void every_second_key(const Tensors& x) {
  const auto same_parity = [](const Query& query, index_t key) { return (query.position() - key) % 2 == 0; };
  attention({.q = x.q, .k = x.k, .v = x.v, .out = x.out}, Causal{} & Where(same_parity));
}

// Options are members of one struct. Name the ones that you need, in the order of the struct.
void with_options(const Tensors& x, const Rope<float>& rope, std::span<const float> sinks,
                  Workspace& workspace) {
  attention({.q = x.q,
             .k = x.k,
             .v = x.v,
             .out = x.out,
             .scale = 0.25,
             .rope = &rope,
             .sinks = sinks,
             .workspace = &workspace},
            Causal{});
}

// Attention over two halves of the keys, each with a state of its own, and the result of both.
void two_halves(const Tensors& x, const AttentionState<float>& first, const AttentionState<float>& second) {
  const index_t keys = x.k.extent(2), middle = keys / 2;
  const auto part = [](const View<const float, 4>& all, index_t begin, index_t count) {
    return View<const float, 4>(&all(0, 0, begin, 0), {all.extent(0), all.extent(1), count, all.extent(3)},
                                {all.stride(0), all.stride(1), all.stride(2), 1});
  };
  const SSMax<float> scaling{0.43f};
  attention(
      {.q = x.q, .k = part(x.k, 0, middle), .v = part(x.v, 0, middle), .state = first, .all_keys = keys},
      scaling, Causal{});
  attention({.q = x.q,
             .k = part(x.k, middle, keys - middle),
             .v = part(x.v, middle, keys - middle),
             .state = second,
             .first_key = middle,
             .all_keys = keys},
            scaling, Causal{});
  merge(first, second);
  finish(first, x.out);
}

// All layers of a model: one plan checks shapes and mask once, one piece of memory serves all calls.
void all_layers(std::span<const Tensors> layers, ThreadPool& pool) {
  const Plan plan({.q = layers[0].q, .k = layers[0].k, .v = layers[0].v}, pool.concurrency(), Causal{});
  Workspace workspace;
  const std::span memory(workspace.reserve(plan.bytes()), plan.bytes());
  for (const Tensors& x : layers) {
    plan.run({.q = x.q, .k = x.k, .v = x.v, .out = x.out}, memory, SSMax<float>{0.43f}, pool);
  }
}

namespace {

constexpr index_t kHeads = 4, kKvHeads = 2, kLength = 40, kWidth = 8;

std::vector<float> random_numbers(index_t count, examples::Random& random) {
  std::vector<float> numbers;
  for (index_t i = 0; i < count; ++i) numbers.push_back(random.standard());
  return numbers;
}

// Compares `out` with Σ p v, where p = softmax(c(head, n) · score(head, i, j, z)) over the keys with visible(i, j),
// and sinks, if given, are one more term of each head.
template <class Visible, class Score, class Multiplier>
void compare(examples::Check& check, const std::string& what, const Tensors& x, const Visible& visible,
             const Score& score, const Multiplier& c, std::span<const float> sinks = {}) {
  for (index_t head = 0; head < kHeads; ++head) {
    const index_t kv_head = head / (kHeads / kKvHeads);
    for (index_t i = 0; i < kLength; ++i) {
      index_t n = 0;
      for (index_t j = 0; j < kLength; ++j) n += visible(i, j) ? 1 : 0;
      std::vector<double> weights;
      double sum = sinks.empty() ? 0 : std::exp(static_cast<double>(sinks[static_cast<std::size_t>(head)]));
      for (index_t j = 0; j < kLength; ++j) {
        double z = 0;
        for (index_t channel = 0; channel < kWidth; ++channel) {
          z += static_cast<double>(x.q(0, head, i, channel)) *
               static_cast<double>(x.k(0, kv_head, j, channel));
        }
        z = score(head, i, j, z / std::sqrt(static_cast<double>(kWidth)));
        weights.push_back(visible(i, j) ? std::exp(c(head, n) * z) : 0);
        sum += weights.back();
      }
      double expected = 0;
      for (index_t j = 0; j < kLength; ++j) {
        const double weight = weights[static_cast<std::size_t>(j)];
        if (weight > 0) expected += weight / sum * static_cast<double>(x.v(0, kv_head, j, 0));
      }
      check.holds(what, std::abs(static_cast<double>(x.out(0, head, i, 0)) - expected) < 1e-5);
    }
  }
}

}  // namespace

int main() {
  examples::Check check;
  examples::Random random(1);
  const auto q = random_numbers(kHeads * kLength * kWidth, random);
  auto k = random_numbers(kKvHeads * kLength * kWidth, random), v = random_numbers(std::ssize(k), random);
  std::vector<float> out(q.size());
  const View<const float, 4> keys(k.data(), {1, kKvHeads, kLength, kWidth});
  const Tensors x{{q.data(), {1, kHeads, kLength, kWidth}},
                  keys,
                  {v.data(), {1, kKvHeads, kLength, kWidth}},
                  {out.data(), {1, kHeads, kLength, kWidth}}};
  const std::vector<float> s{0.3f, 0.4f, 0.5f, 0.6f}, sinks{0.0f, 1.0f, -1.0f, 2.0f};
  const auto ssmax_of_head = [&](index_t head, index_t n) {
    return static_cast<double>(s[static_cast<std::size_t>(head)]) * std::log(static_cast<double>(n));
  };
  const auto one = [](index_t, index_t) { return 1.0; };
  const auto unchanged = [](index_t, index_t, index_t, double z) { return z; };
  const auto capped = [](double z) { return 50 * std::tanh(z / 50); };

  const std::vector<index_t> lengths{30};
  window_in_padded_sequences(x, s, lengths);
  compare(
      check, "a window in a padded sequence", x,
      [](index_t i, index_t j) { return j <= i && j >= i - 15 && j < 30; },
      [&](index_t, index_t, index_t, double z) { return capped(z); }, ssmax_of_head);

  window_with_sinks(x, s, sinks);
  compare(
      check, "a window with sinks", x, [](index_t i, index_t j) { return j <= i && (j < 4 || j > i - 16); },
      unchanged, ssmax_of_head, sinks);

  const std::vector<double> slopes = Alibi::slopes(kHeads);
  const auto causal = [](index_t i, index_t j) { return j <= i; };
  capped_then_alibi(x, slopes);
  compare(
      check, "a cap, then ALiBi", x, causal,
      [&](index_t head, index_t i, index_t j, double z) {
        return capped(z) + slopes[static_cast<std::size_t>(head)] * static_cast<double>(j - i);
      },
      one);

  every_second_key(x);
  compare(
      check, "every second key", x, [](index_t i, index_t j) { return j <= i && (i - j) % 2 == 0; },
      unchanged, one);

  ThreadPool pool(2);
  all_layers({&x, 1}, pool);
  compare(check, "a plan", x, causal, unchanged,
          [](index_t, index_t n) { return 0.43 * std::log(static_cast<double>(n)); });

  std::fill(out.begin(), out.end(), 0.0f);
  std::vector<float> shifts(2 * kHeads * kLength), sums(shifts), values(2 * out.size());
  const auto state = [&](index_t i) {
    return AttentionState<float>{.shift = {shifts.data() + i * kHeads * kLength, {1, kHeads, kLength}},
                                 .sum = {sums.data() + i * kHeads * kLength, {1, kHeads, kLength}},
                                 .o = {values.data() + i * std::ssize(out), {1, kHeads, kLength, kWidth}}};
  };
  two_halves(x, state(0), state(1));
  compare(check, "two halves", x, causal, unchanged,
          [](index_t, index_t n) { return 0.43 * std::log(static_cast<double>(n)); });

  // The call leaves its memory in the workspace.
  Workspace workspace;
  with_options(x, Rope<float>({.width = kWidth}, kLength), sinks, workspace);
  check.holds("a workspace", workspace.size() > 0);

  // Key 7 is masked for every query, and its value is NaN.
  std::vector<float> mask(kLength * kLength, 0.25f);
  for (index_t i = 0; i < kLength; ++i) {
    mask[static_cast<std::size_t>(i * kLength + 7)] = -std::numeric_limits<float>::infinity();
  }
  for (index_t head = 0; head < kKvHeads; ++head) {
    std::fill_n(v.begin() + (head * kLength + 7) * kWidth, kWidth, std::nanf(""));
  }
  additive_mask(x, {mask.data(), {1, kHeads, kLength, kLength}, {0, 0, kLength, 1}});
  compare(
      check, "an additive mask", x, [](index_t, index_t j) { return j != 7; }, unchanged, one);
  return check.exit_code();
}
