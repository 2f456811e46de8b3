// docs/training.md shows these calls: gradients of parameters, and gradients that add up over calls. The program
// compares them with differences of a loss.
#include <array>
#include <cmath>
#include <span>
#include <ssmax/ssmax.hpp>
#include <string>
#include <type_traits>
#include <vector>

#include "check.hpp"
#include "random.hpp"

using namespace ssmax;

// Views of one layer: [batch, head, position, channel], lse is [batch, head, position].
struct Tensors {
  View<const float, 4> q, k, v;
  View<float, 4> out;
  View<float, 3> lse;
  View<const float, 4> dout;
  View<float, 4> dq, dk, dv;
};

struct Parameters {
  std::span<const float> s, b;     // of SSMax, one number per head
  std::span<const double> slopes;  // of ALiBi: doubles, one number per head
  std::span<const float> sinks;    // one number per head
};

struct ParameterGradients {
  std::span<float> ds, db;
  std::span<double> dslopes;
  std::span<float> dsinks;
};

void forward(const Tensors& x, const Parameters& p) {
  attention({.q = x.q, .k = x.k, .v = x.v, .out = x.out, .lse = x.lse, .sinks = p.sinks},
            SSMax<float>{p.s, p.b}, Causal{}, Alibi{p.slopes});
}

// Adds to the gradients of the parameters: set them to 0 before the first call of a step.
void backward(const Tensors& x, const Parameters& p, const ParameterGradients& g) {
  attention_backward({.q = x.q, .k = x.k, .v = x.v, .out = x.out, .lse = x.lse, .sinks = p.sinks},
                     {.dout = x.dout, .dq = x.dq, .dk = x.dk, .dv = x.dv, .dsinks = g.dsinks},
                     SSMax<float>{p.s, p.b}.gradient(g.ds, g.db), Causal{},
                     Alibi{p.slopes}.gradient(g.dslopes));
}

// Adds to dq, dk and dv as well.
void backward_accumulated(const Tensors& x, const Parameters& p) {
  attention_backward({.q = x.q, .k = x.k, .v = x.v, .out = x.out, .lse = x.lse, .sinks = p.sinks},
                     {.dout = x.dout, .dq = x.dq, .dk = x.dk, .dv = x.dv, .accumulate = true},
                     SSMax<float>{p.s, p.b}, Causal{}, Alibi{p.slopes});
}

// The loss of a step over 50,000 classes, with label smoothing. Rows with the target -100 are ignored. Writes the
// gradient over the logits.
CrossEntropy loss_of_step(View<float, 2> logits, std::span<const index_t> targets, ThreadPool& pool) {
  return cross_entropy<float>(logits, targets, logits, {.ignored = -100, .label_smoothing = 0.1}, pool);
}

namespace {

constexpr index_t kHeads = 2, kLength = 24, kWidth = 8, kCount = kHeads * kLength * kWidth;

std::vector<float> random_numbers(index_t count, examples::Random& random) {
  std::vector<float> numbers;
  for (index_t i = 0; i < count; ++i) numbers.push_back(random.standard());
  return numbers;
}

// Compares loss and gradient of two rows, one of them ignored, with the formula.
void check_loss(examples::Check& check) {
  constexpr index_t classes = 50'000, target = 7;
  examples::Random random(2);
  std::vector<float> logits = random_numbers(2 * classes, random);
  double sum = 0, mean = 0;
  for (index_t j = 0; j < classes; ++j) {
    const auto z = static_cast<double>(logits[static_cast<std::size_t>(j)]);
    sum += std::exp(z);
    mean += z / static_cast<double>(classes);
  }
  const double lse = std::log(sum), z = static_cast<double>(logits[target]);
  const std::vector<index_t> targets{target, -100};
  ThreadPool pool(2);
  const auto [loss, count] = loss_of_step({logits.data(), {2, classes}}, targets, pool);
  check.holds("one row has a loss", count == 1);
  check.near("the loss", loss, lse - 0.9 * z - 0.1 * mean, 1e-5);
  check.near("dlogits of the target", static_cast<double>(logits[target]),
             std::exp(z - lse) - 0.9 - 0.1 / static_cast<double>(classes), 1e-6);
  check.holds("dlogits of the ignored row", logits.back() == 0);
}

}  // namespace

int main() {
  examples::Check check;
  examples::Random random(1);
  check_loss(check);
  const auto q = random_numbers(kCount, random), k = random_numbers(kCount, random),
             v = random_numbers(kCount, random), dout = random_numbers(kCount, random);
  std::vector<float> out(kCount), lse(kHeads * kLength), dq(kCount), dk(kCount), dv(kCount);
  const std::array<index_t, 4> extents{1, kHeads, kLength, kWidth};
  const Tensors x{.q = {q.data(), extents},
                  .k = {k.data(), extents},
                  .v = {v.data(), extents},
                  .out = {out.data(), extents},
                  .lse = {lse.data(), {1, kHeads, kLength}},
                  .dout = {dout.data(), extents},
                  .dq = {dq.data(), extents},
                  .dk = {dk.data(), extents},
                  .dv = {dv.data(), extents}};
  std::vector<float> s{0.4f, 0.5f}, b{0.1f, 0.2f}, sinks{0.0f, 0.5f};
  std::vector<double> slopes = Alibi::slopes(kHeads);
  const Parameters p{s, b, slopes, sinks};
  const auto loss = [&] {
    forward(x, p);
    double sum = 0;
    for (std::size_t i = 0; i < out.size(); ++i)
      sum += static_cast<double>(out[i]) * static_cast<double>(dout[i]);
    return sum;
  };

  std::vector<float> ds(kHeads), db(kHeads), dsinks(kHeads);
  std::vector<double> dslopes(kHeads);
  loss();
  backward(x, p, {ds, db, dslopes, dsinks});
  const std::vector<float> dq_once = dq;
  backward_accumulated(x, p);
  for (std::size_t i = 0; i < dq.size(); ++i) check.holds("dq of two calls", dq[i] == 2 * dq_once[i]);

  // Moves head 1's number of a parameter.
  const auto compare = [&](const std::string& what, auto& parameter, double gradient) {
    const auto before = parameter[1];
    const auto step = static_cast<std::remove_cvref_t<decltype(before)>>(0.01);
    parameter[1] = before + step;
    const double above = loss();
    parameter[1] = before - step;
    const double below = loss();
    parameter[1] = before;
    check.near(what, gradient, (above - below) / 0.02, 0.01);
  };
  compare("ds", s, static_cast<double>(ds[1]));
  compare("db", b, static_cast<double>(db[1]));
  compare("dslopes", slopes, dslopes[1]);
  compare("dsinks", sinks, static_cast<double>(dsinks[1]));
  return check.exit_code();
}
