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
  std::vector<float> weights;
  Layout of_logits, of_gradient, of_losses;
  bool wants_gradient, in_place, wants_losses;
  AnyExecutor executor;

  std::string words() const {
    return std::string("cross_entropy of ") + name_of(element) + ", rows " + std::to_string(rows) +
           ", classes " + std::to_string(classes) + ", ignored " + std::to_string(options.ignored) +
           ", dloss " + number(options.dloss) + ", label_smoothing " + number(options.label_smoothing) +
           ", softcap " + number(options.softcap) + ", z_loss " + number(options.z_loss) +
           (weights.empty() ? "" : ", weights") + (wants_losses ? ", losses" : "") +
           (wants_gradient ? in_place ? ", gradient in place" : ", gradient" : "") + "; " + executor.words() +
           "\n  logits " + of_logits.words() + "; gradient " + of_gradient.words();
  }
};

struct ExpectedLoss {
  Real loss = 0, bound = 0;
  index_t count = 0;
  std::vector<Real> losses, loss_bounds, gradient, bounds;
};

/// Adds a row that is not ignored. `factor` multiplies its gradient.
void add_row(const LossCase& c, std::size_t row, Real factor, ExpectedLoss& expected) {
  const auto classes = static_cast<std::size_t>(c.classes), target = static_cast<std::size_t>(c.targets[row]);
  const Real smoothing = static_cast<Real>(c.options.label_smoothing),
             cap = static_cast<Real>(c.options.softcap), zeta = static_cast<Real>(c.options.z_loss);
  const Real u = (is_wide(c.element) ? 2e-15L : 1e-6L) * (1 + cap);
  // 1. The capped logits, and what a class's distance from lse is multiplied by.
  std::vector<Real> x, slopes, shares;
  for (std::size_t k = 0; k < classes; ++k) {
    const Real z = static_cast<Real>(c.logits[row * classes + k]), t = std::tanh(z / cap);
    const bool is_capped = cap > 0 && z != -reference::infinity;
    x.push_back(is_capped ? cap * t : z);
    slopes.push_back(is_capped ? (1 - t) * (1 + t) : cap > 0 ? 0 : 1);
    const Real weight = c.weights.empty() ? 1 : static_cast<Real>(c.weights[k]);
    shares.push_back(smoothing / static_cast<Real>(classes) * weight +
                     (k == target ? (1 - smoothing) * weight : 0));
  }
  // 2. The loss.
  const auto capped = reference::whole_row(std::span<const Real>(x), 1);
  const Real lse = reference::logsumexp(capped);
  const bool has_no_class = lse == -reference::infinity;
  Real loss = zeta * lse * lse, bound = 2 * zeta * std::max<Real>(1, lse * lse), mass = 0;
  for (std::size_t k = 0; k < classes; ++k) {
    const Real distance = lse - x[k];
    mass += shares[k];
    if (shares[k] == 0 && !std::isnan(lse)) continue;
    loss += shares[k] * distance;
    bound += shares[k] * std::max<Real>(1, distance);
  }
  expected.losses.push_back(has_no_class ? reference::infinity : loss);
  expected.loss_bounds.push_back(u * bound);
  // 3. The gradient. A probability may be flushed to 0.
  const Real flushed = is_wide(c.element) ? 0x1p-1019L : 0x1p-123L;
  const std::vector<Real> p = reference::softmax(capped);
  const Real size = mass + 2 * zeta * std::max<Real>(1, std::abs(lse));
  for (std::size_t k = 0; k < classes; ++k) {
    const Real value = (mass + 2 * zeta * lse) * p[k] - shares[k];
    const Real of_share = k == target ? 0 : shares[k];
    expected.gradient.push_back(has_no_class ? 0 : factor * value * slopes[k]);
    expected.bounds.push_back(std::abs(factor) * (u * (size * (k == target ? 1 : p[k]) + of_share) +
                                                  std::max<Real>(1, size) * flushed));
  }
}

ExpectedLoss expect(const LossCase& c) {
  ExpectedLoss expected;
  Real weight_sum = 0;
  for (const index_t target : c.targets) {
    if (target == c.options.ignored) continue;
    ++expected.count;
    weight_sum += c.weights.empty() ? 1 : static_cast<Real>(c.weights[static_cast<std::size_t>(target)]);
  }
  const Real factor = weight_sum == 0 ? 0 : static_cast<Real>(c.options.dloss) / weight_sum;
  for (std::size_t row = 0; row < c.targets.size(); ++row) {
    if (c.targets[row] != c.options.ignored) {
      add_row(c, row, factor, expected);
    } else {
      for (std::vector<Real>* zeros : {&expected.losses, &expected.loss_bounds}) zeros->push_back(0);
      for (std::vector<Real>* zeros : {&expected.gradient, &expected.bounds})
        zeros->insert(zeros->end(), static_cast<std::size_t>(c.classes), 0);
    }
    expected.loss += expected.losses.back();
    expected.bound += expected.loss_bounds.back();
  }
  expected.loss = weight_sum == 0 ? 0 : expected.loss / weight_sum;
  expected.bound = weight_sum == 0 ? 0 : expected.bound / weight_sum;
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
    const Tensor<double> losses({1, 1, 1, c.rows}, c.of_losses);
    ssmax::CrossEntropyOptions options = c.options;
    options.weights = c.weights;
    if (c.wants_losses) options.losses = View<double, 1>(losses.view().data_handle(), {c.rows});
    const ssmax::CrossEntropy got = ssmax::cross_entropy<T>(matrix(View<const T, 4>(logits.view())),
                                                            c.targets, into, options, c.executor);
    if (got.count != expected.count) throw Finding(target + ": count is " + std::to_string(got.count));
    check_value(target + " loss", 0, got.loss, static_cast<double>(expected.loss),
                static_cast<double>(expected.bound), Element::f64);
    if (!c.wants_gradient || !c.in_place) logits.check_untouched("logits", before);
    const auto check = [&](const char* name, const auto& tensor, const std::vector<Real>& right,
                           const std::vector<Real>& bounds, Element element) {
      const std::vector<double> values = tensor.values();
      for (std::size_t i = 0; i < values.size(); ++i) {
        check_value(target + name, static_cast<index_t>(i), values[i], static_cast<double>(right[i]),
                    static_cast<double>(bounds[i]), element);
      }
      tensor.erase();
      tensor.check_erased(target + name);
    };
    if (c.wants_losses) check(" losses", losses, expected.losses, expected.loss_bounds, Element::f64);
    if (c.wants_gradient) check(" dlogits", gradient, expected.gradient, expected.bounds, c.element);
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
  if (random.chance(0.3)) c.options.label_smoothing = random.pick({0.1, 0.5, 1.0});
  if (random.chance(0.3)) c.options.softcap = random.pick({0.5, 30.0, 1000.0});
  if (random.chance(0.3)) c.options.z_loss = random.pick({1e-4, 0.1});
  const double zeros = random.pick({0.0, 0.2, 1.0});
  for (index_t i = random.chance(0.7) ? c.classes : 0; i < c.classes; ++i)
    c.weights.push_back(random.chance(zeros) ? 0 : static_cast<float>(random.uniform(0, 3)));
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
  c.of_losses = draw_layout(random, false);
  c.wants_losses = random.chance(0.4);
  c.wants_gradient = random.chance(0.7);
  c.in_place = c.wants_gradient && random.chance(0.3);
  c.executor = draw_executor(random);
  words = c.words();
  with_element(c.element, [&](auto zero) { run<decltype(zero)>(c); });
}

}  // namespace fuzz
