// Computes the attention of the models and papers in docs/family.md. Compares each result to its formula,
// key by key.
#include <algorithm>
#include <cmath>
#include <functional>
#include <ssmax/ssmax.hpp>
#include <string>
#include <vector>

#include "check.hpp"
#include "random.hpp"

using namespace ssmax;

namespace {

constexpr index_t kHeads = 2, kLength = 24, kWidth = 8;

std::vector<float> numbers(index_t count, float size = 1) {
  static examples::Random random(1);
  std::vector<float> values;
  for (index_t i = 0; i < count; ++i) values.push_back(size * random.standard());
  return values;
}

/// Returns z' of a query and a key.
using Score = std::function<double(double z, index_t head, index_t query, index_t key)>;

/// Returns the exact result of attention of q, k and v, where query i sees keys [first(i), i].
std::vector<double> expected(const std::vector<float>& q, const std::vector<float>& k,
                             const std::vector<float>& v, const std::function<index_t(index_t)>& first,
                             const std::function<double(index_t head, index_t query)>& c,
                             const Score& score = {},
                             const std::function<double(index_t head, double c)>& sink = {}) {
  std::vector<double> out(static_cast<std::size_t>(kHeads * kLength * kWidth));
  const auto row = [](const std::vector<float>& x, index_t head, index_t i) {
    return x.data() + (head * kLength + i) * kWidth;
  };
  for (index_t head = 0; head < kHeads; ++head) {
    for (index_t i = 0; i < kLength; ++i) {
      double sum = sink ? std::exp(sink(head, c(head, i))) : 0;
      double* to = out.data() + (head * kLength + i) * kWidth;
      for (index_t key = first(i); key <= i; ++key) {
        double z = 0;
        for (index_t x = 0; x < kWidth; ++x) {
          z += static_cast<double>(row(q, head, i)[x]) * static_cast<double>(row(k, head, key)[x]);
        }
        z /= std::sqrt(static_cast<double>(kWidth));
        const double weight = std::exp(c(head, i) * (score ? score(z, head, i, key) : z));
        sum += weight;
        for (index_t x = 0; x < kWidth; ++x) to[x] += weight * static_cast<double>(row(v, head, key)[x]);
      }
      for (index_t x = 0; x < kWidth; ++x) to[x] /= sum;
    }
  }
  return out;
}

}  // namespace

int main() {
  examples::Check check;
  const index_t all = kHeads * kLength * kWidth;
  const std::vector<float> of_q = numbers(all), of_k = numbers(all), of_v = numbers(all);
  std::vector<float> of_out(static_cast<std::size_t>(all));
  const View<const float, 4> q(of_q.data(), {1, kHeads, kLength, kWidth});
  const View<const float, 4> k(of_k.data(), {1, kHeads, kLength, kWidth});
  const View<const float, 4> v(of_v.data(), {1, kHeads, kLength, kWidth});
  const View<float, 4> out(of_out.data(), {1, kHeads, kLength, kWidth});

  const auto from_0 = [](index_t) { return index_t{0}; };
  const auto one = [](index_t, index_t) { return 1.0; };
  const auto ln = [](index_t n) { return std::log(static_cast<double>(n)); };
  const auto is = [&](const std::string& what, const std::vector<double>& exact) {
    for (std::size_t i = 0; i < exact.size(); ++i) {
      if (std::abs(static_cast<double>(of_out[i]) - exact[i]) <= 1e-5) continue;
      check.near(what, static_cast<double>(of_out[i]), exact[i], 1e-5);
      return;
    }
  };
  const auto is_scaled = [&](const std::string& what, const std::function<double(index_t, index_t)>& c) {
    is(what, expected(of_q, of_k, of_v, from_0, c));
  };

  const std::vector<float> s{0.4f, 0.7f}, b{0.1f, -0.2f};
  const auto s_of = [&](index_t head) { return static_cast<double>(s[static_cast<std::size_t>(head)]); };
  const auto b_of = [&](index_t head) { return static_cast<double>(b[static_cast<std::size_t>(head)]); };
  {
    const std::vector<index_t> cumulative{
        0, 10, kLength};  // first token of each document, then the number of tokens
    attention({.q = q, .k = k, .v = v, .out = out}, SSMax<float>{s}, Documents{cumulative, true});
    const auto begin = [](index_t i) { return i < 10 ? index_t{0} : index_t{10}; };
    is("OLMo 3.5", expected(of_q, of_k, of_v, begin,
                            [&](index_t head, index_t i) { return s_of(head) * ln(i - begin(i) + 1); }));
  }
  {
    attention({.q = q, .k = k, .v = v, .out = out}, SSMax<float>{0.08496f}, Causal{});
    is_scaled("Step-5", [&](index_t, index_t i) { return 0.08496 * ln(i + 1); });
  }
  {
    std::vector<float> of_c = numbers(kHeads * kLength), of_dc(of_c.size());
    View<const float, 3> c(of_c.data(), {1, kHeads, kLength});  // [batch, head, query], from the MLPs
    attention({.q = q, .k = k, .v = v, .out = out}, PerQuery(c), Causal{});
    is_scaled("a multiplier per query", [&](index_t head, index_t i) {
      return static_cast<double>(of_c[static_cast<std::size_t>(head * kLength + i)]);
    });
  }
  {
    const std::vector<float> of_bias = numbers(kHeads * kLength * kLength);
    const View<const float, 4> bias(of_bias.data(), {1, kHeads, kLength, kLength});
    const auto biased = [&](double z, index_t head, index_t i, index_t key) {
      return z + static_cast<double>(bias(0, head, i, key));
    };
    attention({.q = q, .k = k, .v = v, .out = out}, InklingTemperature{0.1, 8}, Causal{}, Bias(bias));
    is("Inkling", expected(
                      of_q, of_k, of_v, from_0,
                      [](index_t, index_t i) {
                        return 1 + 0.1 * std::log(std::max(1.0, static_cast<double>(i + 1) / 8));
                      },
                      biased));
  }
  {
    attention({.q = q, .k = k, .v = v, .out = out}, QwenLogN{8}, Causal{});
    is_scaled("Qwen", [](index_t, index_t i) {
      return std::max(1.0, std::log(static_cast<double>(i + 1)) / std::log(8.0));
    });
    attention({.q = q, .k = k, .v = v, .out = out}, Llama4Temperature{0.1, 8}, Causal{});
    is_scaled("Llama 4",
              [](index_t, index_t i) { return 1 + 0.1 * std::log(1.0 + static_cast<double>((i + 1) / 8)); });
    attention({.q = q, .k = k, .v = v, .out = out}, MinistralTemperature{0.1, 8}, Causal{});
    is_scaled("Ministral 3",
              [](index_t, index_t i) { return 1 + 0.1 * std::log(1.0 + static_cast<double>(i / 8)); });
  }
  {
    const auto grok = [](const Row& row) {
      const double trained = 8, position = static_cast<double>(row.position);
      return position > trained ? std::log2(position) / std::log2(trained) : 1.0;
    };
    attention({.q = q, .k = k, .v = v, .out = out}, grok, Causal{});
    is_scaled("Grok-2",
              [](index_t, index_t i) { return i > 8 ? std::log2(static_cast<double>(i)) / 3 : 1.0; });
  }
  {
    attention({.q = q, .k = k, .v = v, .out = out}, AdjustedSize{SSMax<float>{s, b}, 0, 2}, Causal{});
    is_scaled("axolotl", [&](index_t head, index_t i) {
      return s_of(head) * ln(std::max<index_t>(2, i + 1)) + b_of(head);
    });
    attention({.q = q, .k = k, .v = v, .out = out}, AdjustedSize{SSMax<float>{s}, 1}, Causal{});
    is_scaled("n + 1", [&](index_t head, index_t i) { return s_of(head) * ln(i + 2); });
  }
  {
    const index_t before = 4, window = 8;  // the window grew from 4 to 8
    const double grown = 0.2 * std::log(static_cast<double>(window) / static_cast<double>(before)) + 1;
    attention({.q = q, .k = k, .v = v, .out = out}, Constant{grown}, SlidingWindow{window - 1});
    is("modded-nanogpt", expected(
                             of_q, of_k, of_v, [](index_t i) { return std::max<index_t>(0, i - 7); },
                             [](index_t, index_t) { return 0.2 * std::log(2.0) + 1; }));
  }
  {
    const ScaleInvariant score(10, kLength);  // τ, and the longest context; make it once for all calls
    attention({.q = q, .k = k, .v = v, .out = out}, Causal{}, score);
    is("scale-invariant attention",
       expected(of_q, of_k, of_v, from_0, one, [](double z, index_t, index_t i, index_t key) {
         const double square = 1 + 2 * std::log(1 + static_cast<double>(i - key) / 10);
         return std::sqrt(square) * z + 1 - square;
       }));
  }
  {
    // of_f is -F[batch, head, key]. F is the cumulative sum of the logarithms of the forget gates. The stride along
    // the queries is 0: F of the query is the same for all of its keys, so it does not change the softmax.
    const std::vector<float> of_f = numbers(kHeads * kLength);
    const View<const float, 4> minus_f(of_f.data(), {1, kHeads, kLength, kLength}, {0, kLength, 0, 1});
    attention({.q = q, .k = k, .v = v, .out = out}, Causal{}, Bias(minus_f));
    is("the forgetting transformer",
       expected(of_q, of_k, of_v, from_0, one, [&](double z, index_t head, index_t, index_t key) {
         return z + static_cast<double>(of_f[static_cast<std::size_t>(head * kLength + key)]);
       }));
  }
  {
    const std::vector<float> sinks{0.5f, -1};
    const auto sink_of = [&](index_t head) {
      return static_cast<double>(sinks[static_cast<std::size_t>(head)]);
    };
    const auto c = [&](index_t head, index_t i) { return s_of(head) * ln(i + 1); };
    attention({.q = q, .k = k, .v = v, .out = out, .sinks = sinks}, Causal{});
    is("sinks",
       expected(of_q, of_k, of_v, from_0, one, {}, [&](index_t head, double) { return sink_of(head); }));
    attention({.q = q, .k = k, .v = v, .out = out, .sinks = sinks, .scaled_sinks = true}, SSMax<float>{s},
              Causal{});
    is("scaled sinks", expected(of_q, of_k, of_v, from_0, c, {},
                                [&](index_t head, double by) { return by * sink_of(head); }));
    const std::vector<float> zeros(kHeads);
    attention({.q = q, .k = k, .v = v, .out = out, .sinks = zeros}, Causal{});
    is("softmax off by one",
       expected(of_q, of_k, of_v, from_0, one, {}, [](index_t, double) { return 0.0; }));
  }
  {
    const std::vector<float> gate = numbers(all), dgated = numbers(all);
    std::vector<float> gated(gate.size()), dout(gate.size()), dgate(gate.size());
    for (std::size_t i = 0; i < gate.size(); ++i) {
      const float sigma = 1 / (1 + std::exp(-gate[i]));
      gated[i] = sigma * of_out[i];
      // Backward: dout is the input of attention_backward, dgate is the gradient of the layer that made the gate.
      dout[i] = sigma * dgated[i];
      dgate[i] = sigma * (1 - sigma) * of_out[i] * dgated[i];
    }
    const auto value = [&](double g) { return 1 / (1 + std::exp(-g)) * static_cast<double>(of_out[3]); };
    const double g = static_cast<double>(gate[3]), dg = static_cast<double>(dgated[3]);
    check.near("the gate", static_cast<double>(gated[3]), value(g), 1e-5);
    check.near("its gradient", static_cast<double>(dgate[3]), (value(g + 1e-4) - value(g - 1e-4)) / 2e-4 * dg,
               1e-3);
    check.near("the gradient behind it", static_cast<double>(dout[3]),
               value(g) / static_cast<double>(of_out[3]) * dg, 1e-5);
  }
  {
    const std::vector<float> of_logits = numbers(kHeads * kLength * kLength),
                             of_c = numbers(kHeads * kLength);
    std::vector<float> of_weights(of_logits.size());
    const View<const float, 4> logits(of_logits.data(), {1, kHeads, kLength, kLength});
    const View<float, 4> weights(of_weights.data(), {1, kHeads, kLength, kLength});
    const View<const float, 3> c(of_c.data(), {1, kHeads, kLength});  // δ + β·(ln n)^γ of each query
    entmax15(logits, weights, PerQuery(c), Causal{});
    for (index_t row = 0; row < kHeads * kLength; ++row) {
      double sum = 0;
      for (index_t key = 0; key < kLength; ++key) {
        sum += static_cast<double>(of_weights[static_cast<std::size_t>(row * kLength + key)]);
      }
      check.near("ASEntmax's weights", sum, 1, 1e-5);
    }
  }
  return check.exit_code();
}
