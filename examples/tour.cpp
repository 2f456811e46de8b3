// What docs/quick_start.md shows of rows and of training, and that it works: ds is what moving s does.
#include <cmath>
#include <span>
#include <ssmax/ssmax.hpp>
#include <vector>

#include "check.hpp"
#include "random.hpp"

using namespace ssmax;

// Scores [batch, head, query, key] become weights, causally; then their gradient, with ds and db for each head.
void rows(View<const float, 4> scores, View<float, 4> weights, View<const float, 4> dweights,
          View<float, 4> dscores, std::span<const float> s, std::span<const float> b, std::span<float> ds,
          std::span<float> db) {
  const SSMax<float> scaling{s, b};
  softmax(scores, weights, scaling, Causal{});
  softmax_backward<float, 4>({.out = weights, .dout = dweights, .logits = scores, .dlogits = dscores},
                             scaling.gradient(ds, db), Causal{});
}

struct Layer {
  View<float, 4> q, k, v, out, dout, dq, dk, dv;  // [batch, head, position, channel]
  View<float, 3> lse;                             // [batch, head, position]: what the backward needs
};

// dq, dk and dv are written; what belongs to parameters, as ds, is added to.
void attention_in_training(const Layer& x, std::span<const float> s, std::span<float> ds,
                           const Rope<float>& rope, ThreadPool& pool) {
  const SSMax<float> scaling{s};
  const Softcap score{50};
  attention<float>({.q = x.q, .k = x.k, .v = x.v, .out = x.out, .lse = x.lse}, scaling, Causal{}, score,
                   {.rope = &rope}, pool);
  // Here the rest of the model makes dout of out.
  attention_backward<float>({.q = x.q, .k = x.k, .v = x.v, .out = x.out, .lse = x.lse},
                            {.dout = x.dout, .dq = x.dq, .dk = x.dk, .dv = x.dv}, scaling.gradient(ds),
                            Causal{}, score, {.rope = &rope}, pool);
}

namespace {

constexpr index_t kHeads = 2, kLength = 24, kWidth = 8;

class Numbers {
 public:
  explicit Numbers(index_t last) : last_(last), values_(static_cast<std::size_t>(kHeads * kLength * last)) {
    for (float& value : values_) value = random().standard();
  }
  View<float, 4> view() { return {values_.data(), {1, kHeads, kLength, last_}}; }
  // Σ this·other, what a loss of gradient `other` changes by.
  double dot(const Numbers& other) const {
    double sum = 0;
    for (std::size_t i = 0; i < values_.size(); ++i) {
      sum += static_cast<double>(values_[i]) * static_cast<double>(other.values_[i]);
    }
    return sum;
  }

 private:
  static examples::Random& random() {
    static examples::Random random(1);
    return random;
  }
  index_t last_;
  std::vector<float> values_;
};

}  // namespace

int main() {
  examples::Check check;
  const float step = 0.01f;
  {
    Numbers scores(kLength), weights(kLength), dweights(kLength), dscores(kLength);
    const auto loss = [&](std::vector<float> s, std::vector<float>& ds, std::vector<float>& db) {
      const std::vector<float> b(kHeads, 0.1f);
      rows(scores.view(), weights.view(), dweights.view(), dscores.view(), s, b, ds, db);
      return weights.dot(dweights);
    };
    std::vector<float> ds(kHeads), db(kHeads), unused(kHeads);
    loss({0.4f, 0.5f}, ds, db);
    const double difference =
        loss({0.4f + step, 0.5f}, unused, unused) - loss({0.4f - step, 0.5f}, unused, unused);
    check.near("ds of rows", static_cast<double>(ds[0]), difference / (2 * static_cast<double>(step)), 0.01);
  }
  {
    Numbers q(kWidth), k(kWidth), v(kWidth), out(kWidth), dout(kWidth), dq(kWidth), dk(kWidth), dv(kWidth);
    std::vector<float> lse(kHeads * kLength);
    const Layer layer{q.view(),   k.view(),    v.view(),
                      out.view(), dout.view(), dq.view(),
                      dk.view(),  dv.view(),   {lse.data(), {1, kHeads, kLength}}};
    const Rope<float> rope({.width = kWidth, .theta = 10'000}, kLength);
    ThreadPool pool(2);
    const auto loss = [&](std::vector<float> s, std::vector<float>& ds) {
      attention_in_training(layer, s, ds, rope, pool);
      return out.dot(dout);
    };
    std::vector<float> ds(kHeads), unused(kHeads);
    loss({0.4f, 0.5f}, ds);
    const double difference = loss({0.4f + step, 0.5f}, unused) - loss({0.4f - step, 0.5f}, unused);
    check.near("ds of attention", static_cast<double>(ds[0]), difference / (2 * static_cast<double>(step)),
               0.01);
  }
  return check.exit_code();
}
