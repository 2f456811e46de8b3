// Cases of cross_entropy, against the formula at the top of its header.
#include <ssmax/cross_entropy.hpp>

#include "../reference.hpp"
#include "kinds.hpp"
#include "targets.hpp"

namespace fuzz {
namespace {

struct LossCase {
  Element element;
  index_t rows, classes;
  std::vector<double> logits;
  std::vector<index_t> targets;
  ssmax::CrossEntropyOptions options;
  Layout of_logits, of_gradient;
  bool wants_gradient, in_place;
  AnyExecutor executor;

  std::string words() const {
    return std::string("cross_entropy of ") + name_of(element) + ", rows " + std::to_string(rows) +
           ", classes " + std::to_string(classes) + ", ignored " + std::to_string(options.ignored) +
           ", dloss " + number(options.dloss) +
           (wants_gradient ? in_place ? ", gradient in place" : ", gradient" : "") + "; " + executor.words() +
           "\n  logits " + of_logits.words() + "; gradient " + of_gradient.words();
  }
};

struct ExpectedLoss {
  Real loss = 0, bound = 0;
  index_t count = 0;
  std::vector<Real> gradient, bounds;
};

ExpectedLoss expect(const LossCase& c) {
  ExpectedLoss expected;
  const Real promised = is_wide(c.element) ? 2e-15L : 1e-6L;
  for (const index_t target : c.targets) expected.count += target != c.options.ignored ? 1 : 0;
  const Real factor =
      expected.count == 0 ? 0 : static_cast<Real>(c.options.dloss) / static_cast<Real>(expected.count);
  const auto classes = static_cast<std::size_t>(c.classes);
  for (index_t i = 0; i < c.rows; ++i) {
    const std::size_t first = static_cast<std::size_t>(i) * classes;
    const index_t target = c.targets[static_cast<std::size_t>(i)];
    if (target == c.options.ignored) {
      expected.gradient.insert(expected.gradient.end(), classes, 0);
      expected.bounds.insert(expected.bounds.end(), classes, 0);
      continue;
    }
    const auto row = reference::whole_row(std::span<const double>(c.logits.data() + first, classes), 1);
    Real lse = reference::logsumexp(row);
    // +inf poisons its row; a row of nothing but -inf has an infinite loss and no gradient.
    const Real own = row.logit(target);
    Real loss = lse == -reference::infinity ? reference::infinity : lse - own;
    const std::vector<Real> y = reference::softmax(row);
    if (std::isfinite(loss) && loss < 1) {
      // Without cancellation: ln Σ exp(z - z_target).
      Real others = 0;
      for (index_t k = 0; k < c.classes; ++k)
        others += k == target || row.logit(k) == -reference::infinity ? 0 : std::exp(row.logit(k) - own);
      loss = std::log1p(others);
    }
    expected.loss += loss;
    expected.bound += promised * std::max<Real>(1, std::abs(loss));
    for (std::size_t k = 0; k < classes; ++k) {
      const bool is_target = static_cast<index_t>(k) == target;
      if (lse == -reference::infinity) {
        expected.gradient.push_back(0);
        expected.bounds.push_back(0);
        continue;
      }
      Real value = y[k];
      if (is_target) {
        value = 0 * y[k];  // NaN stays
        for (std::size_t other = 0; other < classes; ++other) value -= other == k ? 0 : y[other];
        if (own == -reference::infinity && !std::isnan(lse)) value = -1;
      }
      expected.gradient.push_back(factor * value);
      const Real size = is_target ? 1 : y[k];
      expected.bounds.push_back(std::abs(factor) *
                                (promised * size + (is_wide(c.element) ? 0x1p-1019L : 0x1p-123L)));
    }
  }
  if (expected.count > 0) {
    expected.loss /= static_cast<Real>(expected.count);
    expected.bound /= static_cast<Real>(expected.count);
  }
  return expected;
}

template <class T>
void run(const LossCase& c) {
  const ExpectedLoss expected = expect(c);
  const std::array<index_t, 4> extents{1, 1, c.rows, c.classes};
  for_each_target([&](const std::string& target) {
    const Tensor<T> logits(extents, c.of_logits), separate(extents, c.of_gradient);
    logits.fill(c.logits);
    const auto before = logits.bytes();
    const Tensor<T>& gradient = c.in_place ? logits : separate;
    const auto matrix = [&]<class U>(const View<U, 4>& all) {
      return View<U, 2>(all.data_handle(), {c.rows, c.classes}, {all.stride(2), 1});
    };
    const View<T, 2> into = c.wants_gradient ? matrix(gradient.view()) : View<T, 2>{};
    const ssmax::CrossEntropy got = ssmax::cross_entropy<T>(matrix(View<const T, 4>(logits.view())),
                                                            c.targets, into, c.options, c.executor);
    if (got.count != expected.count) throw Finding(target + ": count is " + std::to_string(got.count));
    check_value(target + " loss", 0, got.loss, static_cast<double>(expected.loss),
                static_cast<double>(expected.bound), Element::f64);
    if (!c.wants_gradient || !c.in_place) logits.check_untouched("logits", before);
    if (!c.wants_gradient) return;
    const std::vector<double> values = gradient.values();
    for (std::size_t i = 0; i < values.size(); ++i) {
      check_value(target + " dlogits", static_cast<index_t>(i), values[i],
                  static_cast<double>(expected.gradient[i]), static_cast<double>(expected.bounds[i]),
                  c.element);
    }
    gradient.erase();
    gradient.check_erased(target + " dlogits");
  });
}

}  // namespace

void run_cross_entropy(Random& random, const Options&, std::string& words) {
  LossCase c{};
  c.element = random.pick({Element::f32, Element::f32, Element::f64, Element::f16, Element::bf16});
  c.rows = random.chance(0.03) ? 0 : random.between(1, 40);
  c.classes = random.chance(0.5) ? random.between(1, 20)
                                 : random.pick<index_t>({1, 2, 16, 17, 64, 255, 256, 1000, 1025, 4096, 4097});
  if (c.rows * c.classes > 20'000) c.rows = 3;
  c.options.ignored = random.pick<index_t>({-100, 0, 5});
  c.options.dloss = random.pick({1.0, -0.3, 0.0, 16.0});
  const double size = random.pick({1.0, 1.0, 10.0, 100.0}), special = random.chance(0.1) ? 0.01 : 0;
  const double hidden = random.chance(0.2) ? 0.3 : 0;
  for (index_t i = 0; i < c.rows * c.classes; ++i) {
    double value = size * random.normal();
    if (hidden > 0 && random.chance(hidden)) value = -infinity;
    if (special > 0 && random.chance(special)) value = random.pick({nan, infinity, -infinity});
    c.logits.push_back(rounded(c.element, value));
  }
  for (index_t i = 0; i < c.rows; ++i) {
    c.targets.push_back(random.chance(0.2) ? c.options.ignored : random.between(0, c.classes - 1));
  }
  c.of_logits = draw_layout(random, false);
  c.of_gradient = draw_layout(random, false);
  c.wants_gradient = random.chance(0.7);
  c.in_place = c.wants_gradient && random.chance(0.3);
  c.executor = draw_executor(random);
  words = c.words();
  with_element(c.element, [&](auto zero) { run<decltype(zero)>(c); });
}

}  // namespace fuzz
