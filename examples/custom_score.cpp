// A score of your own: what becomes of a logit before the softmax, and its derivative. Here z / (1 + |z| / cap),
// a softcap without a tanh, which stays within ±cap.
#include <cmath>
#include <limits>
#include <ssmax/ssmax.hpp>
#include <string>
#include <vector>

#include "check.hpp"
#include "random.hpp"

struct Squashed {
  double cap;

  template <std::floating_point T>
  T operator()(T z, const ssmax::Key&) const {
    const bool hidden = z == -std::numeric_limits<T>::infinity();  // by a Bias: it stays hidden
    return hidden ? z : z / (1 + std::abs(z) / static_cast<T>(cap));
  }
  template <std::floating_point T>
  T derivative(T z, const ssmax::Key&) const {
    const T slope = 1 / (1 + std::abs(z) / static_cast<T>(cap));
    return slope * slope;
  }

  // Vectorized: replaces the logits of many lanes.
  template <std::floating_point T>
  void apply(const ssmax::Lanes<T>& lanes) const {
    for (ssmax::index_t i = 0; i < lanes.count; ++i) lanes.z[i] = (*this)(lanes.z[i], ssmax::Key{});
  }
  // Multiplies d by the derivative. The lanes hold what apply made: 1 - |z'| / cap is 1 / (1 + |z| / cap).
  template <std::floating_point T>
  void differentiate(const ssmax::Lanes<const T>& squashed, T* d) const {
    for (ssmax::index_t i = 0; i < squashed.count; ++i) {
      const T slope = 1 - std::abs(squashed.z[i]) / static_cast<T>(cap);
      d[i] *= slope * slope;
    }
  }
};

template <>
inline constexpr bool ssmax::by_lanes<Squashed> = true;

namespace {

using ssmax::index_t;
using ssmax::View;
constexpr index_t kLength = 40, kWidth = 8;

struct Attention {
  std::vector<double> q, k, v, out, lse, dout, dq, dk, dv;

  static View<double, 4> tensor(std::vector<double>& x) { return {x.data(), {1, 1, kLength, kWidth}}; }
  View<double, 3> of_lse() { return {lse.data(), {1, 1, kLength}}; }

  // Σ out·dout.
  double forward() {
    ssmax::attention<double>(
        {.q = tensor(q), .k = tensor(k), .v = tensor(v), .out = tensor(out), .lse = of_lse()},
        ssmax::Softmax{}, ssmax::Causal{}, Squashed{2});
    double sum = 0;
    for (std::size_t i = 0; i < out.size(); ++i) sum += out[i] * dout[i];
    return sum;
  }
  void backward() {
    ssmax::attention_backward<double>(
        {.q = tensor(q), .k = tensor(k), .v = tensor(v), .out = tensor(out), .lse = of_lse()},
        {.dout = tensor(dout), .dq = tensor(dq), .dk = tensor(dk), .dv = tensor(dv)}, ssmax::Softmax{},
        ssmax::Causal{}, Squashed{2});
  }
};

}  // namespace

int main() {
  examples::Random random(1);
  Attention a;
  for (auto* x : {&a.q, &a.k, &a.v, &a.out, &a.dout, &a.dq, &a.dk, &a.dv}) {
    for (index_t i = 0; i < kLength * kWidth; ++i) x->push_back(2 * static_cast<double>(random.standard()));
  }
  a.lse.resize(kLength);
  a.forward();
  a.backward();

  // The gradient against what moving a query's or a key's channel does to the sum.
  examples::Check check;
  const auto compare = [&](const std::string& name, std::vector<double>& x, const std::vector<double>& dx) {
    // Not query 0: it sees one key, so its dq is 0.
    for (const std::size_t i : {std::size_t{11}, std::size_t{171}, std::size_t{319}}) {
      const double before = x[i], step = 1e-5;
      x[i] = before + step;
      const double above = a.forward();
      x[i] = before - step;
      const double below = a.forward();
      x[i] = before;
      check.near(name + std::to_string(i), dx[i], (above - below) / (2 * step), 1e-5);
    }
  };
  compare("dq", a.q, a.dq);
  compare("dk", a.k, a.dk);
  return check.exit_code();
}
