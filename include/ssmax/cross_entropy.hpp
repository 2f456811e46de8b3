/// @defgroup cross_entropy Cross-entropy (cross_entropy.hpp)
/// Computes the cross-entropy of logits against one class per row, and its gradient: the usual loss of a model.
///
///     loss      = 1/count · Σ_i (ln Σ_j exp(z_ij) - z_i,t(i))       over the rows i that are not ignored
///     dlogits   = dloss/count · (softmax(z_i)_j - [j = t(i)])       0 in ignored rows
///
/// logits and dlogits are [row, class] with last stride 1. targets holds the class t(i) of every row. A row is
/// ignored if its target is options.ignored. cross_entropy does not read ignored rows. count is the number of the
/// other rows. If count is 0, the loss is 0. Rows of float, half and bfloat16 are computed in float, rows of double
/// in double. The sum over rows is in double.
///
/// The options add label smoothing ε, class weights w, a softcap and a z-loss with the factor ζ. For one row with
/// target t and C classes:
///
///     x_j       = softcap·tanh(z_j / softcap), or z_j without a softcap
///     lse       = ln Σ_j exp(x_j),  p_j = exp(x_j - lse)
///     l         = (1 - ε)·w_t·(lse - x_t) + ε/C·Σ_j w_j·(lse - x_j) + ζ·lse²
///     loss      = Σ_i l_i / Σ_i w_t(i)                              over the rows i that are not ignored
///     mass      = (1 - ε)·w_t + ε/C·Σ_j w_j + 2·ζ·lse
///     dlogits_j = dloss/Σ_i w_t(i) · (1 - (x_j/softcap)²) · (mass·p_j - ε/C·w_j - (1 - ε)·w_t·[j = t])
///
/// With dlosses, dlogits is the gradient of dloss·loss + Σ_i dlosses_i·l_i: dlosses_i is added to dloss/Σ_i w_t(i) in
/// row i. For losses that are not averaged, set dloss to 0.
///
/// Smoothing and weights have the definition of PyTorch's cross_entropy with reduction "mean". Sources: label smoothing
/// arXiv:1512.00567, softcap arXiv:2408.00118 (Gemma 2), z-loss arXiv:2204.02311 (PaLM, ζ = 1e-4). The weights do not
/// multiply the z-loss. If Σ_i w_t(i) is 0, loss and dlogits are 0.
///
/// | special value | result |
/// |---|---|
/// | a logit of -inf | probability 0, gradient 0; with ε > 0 and a weight above 0: loss +inf, gradient by the formula |
/// | a target's logit of -inf | loss +inf; gradient by the formula: -dloss/count for the target |
/// | -inf with a softcap | stays -inf; gradient 0 |
/// | a row with only -inf | loss +inf, gradient 0 |
/// | NaN or +inf in a row | loss NaN, dlogits of this row NaN, dlogits of other rows unaffected |
/// | +inf with a softcap | becomes the softcap; gradient 0 |
/// | one class | without a z-loss, loss and gradient are exactly 0 |
/// | a probability that softmax.hpp may flush to 0 | the loss of this target is finite, within double's range |
///
/// Finite logits may have any size. Exception: with label smoothing, two logits may differ by at most the largest
/// float, or double for rows of double. A loss is never negative.
///
/// | result | bound of the error in float | in double |
/// |---|---|---|
/// | loss of a row | 1e-6·max(1, loss) | 2e-15·max(1, loss) |
/// | dlogits | 1e-6·abs(dlogits) | 2e-15·abs(dlogits) |
/// | dlogits of the target | 1e-6·abs(dloss)/count | 2e-15·abs(dloss)/count |
///
/// The worst case is a row with thousands of small terms and one large term. Normally distributed logits have a third
/// of this error. With other options, u is 1e-6·(1 + softcap) in float and 2e-15·(1 + softcap) in double:
///
/// | result | bound of the error |
/// |---|---|
/// | loss of a row | u·((1 - ε)·w_t·max(1, lse - x_t) + ε/C·Σ_j w_j·max(1, lse - x_j) + 2·ζ·max(1, lse²)) |
/// | dlogits | u·abs(dloss)/Σ_i w_t(i) · (m·p_j + ε/C·w_j), m = (1 - ε)·w_t + ε/C·Σ_j w_j + 2·ζ·max(1, abs(lse)) |
/// | dlogits of the target | the same with 1 in place of p_j |
///
/// With dlosses, abs(dloss)/count is the absolute value of the sum of the row.
///
/// The executor distributes rows. The number of rows per task and the order of the sums depend on the extents only.
/// So loss and gradient are bit-identical for every executor. The loss is also bit-identical with and without
/// dlogits. The view dlogits may be the memory of the logits. Otherwise dlogits must not overlap the logits. To omit
/// dlogits, pass `View{}`. Throws std::invalid_argument for every error, before anything is written. The function
/// does not allocate.
#pragma once

#include <algorithm>
#include <limits>
#include <span>
#include <type_traits>

#include "detail/checks/views.hpp"
#include "detail/rows/cross_entropy.hpp"
#include "detail/rows/fill.hpp"
#include "execution.hpp"
#include "view.hpp"

/// @addtogroup cross_entropy
/// @{
SSMAX_BEGIN_DATA

/// The optional arguments of cross_entropy. `weights`, `losses` and `dlosses` are your memory.
struct CrossEntropyOptions {
  index_t ignored = -100;           ///< Target of rows that are ignored; may be a class.
  double dloss = 1;                 ///< The gradient of the loss.
  double label_smoothing = 0;       ///< ε, from 0 to 1.
  KeptSpan<const float> weights{};  ///< w, one finite number of at least 0 per class. Empty: 1.
  double softcap = 0;               ///< A normal float of at most 500,000. 0: logits are not capped.
  double z_loss = 0;                ///< ζ, finite and at least 0.
  View<double, 1> losses{};         ///< [rows]: receives l_i, 0 for ignored rows; may be left out.
  View<const double, 1> dlosses{};  ///< [rows]: gradients of l_i, added to that of the mean; may be left out.
};

/// The result of cross_entropy.
struct CrossEntropy {
  double loss;    ///< The mean over `count` rows, or Σ_i l_i / Σ_i w_t(i).
  index_t count;  ///< Number of rows that are not ignored.
};

SSMAX_END

SSMAX_BEGIN_CODE
namespace detail {

/// Limits of the tasks, the same for every executor. At most max_loss_calls tasks, because their losses are on the
/// stack. If rows are short, a task has at least min_call_logits logits, which take some microseconds.
inline constexpr index_t max_loss_calls = 256;
inline constexpr index_t min_call_logits = 16'384;

/// The targets that are not ignored.
struct CountedTargets {
  index_t count = 0;
  double weight_sum = 0;
};

/// Counts the targets that are not ignored. Throws at the first target that is not a class.
inline CountedTargets count_targets(Integers targets, const CrossEntropyOptions& options, index_t classes) {
  CountedTargets result{};
  for (std::size_t row = 0; row < targets.size(); ++row) {
    const index_t target = targets[row];
    if (target == options.ignored) continue;
    if (target < 0 || target >= classes) {
      fail_format("ssmax::cross_entropy: targets has class %td in row %td, logits has %td classes", target,
                  static_cast<index_t>(row), classes);
    }
    ++result.count;
    if (!options.weights.empty())
      result.weight_sum += static_cast<double>(options.weights[static_cast<std::size_t>(target)]);
  }
  if (options.weights.empty()) result.weight_sum = static_cast<double>(result.count);
  return result;
}

/// Returns the terms of the loss. Throws for an option out of its range.
inline LossTerms loss_terms(const CrossEntropyOptions& options, index_t classes) {
  const char* function = "cross_entropy";
  const auto check = [&](const char* name, double value, double least, double most) {
    if (value >= least && value <= most) return;
    fail_format("ssmax::%s: %s is %g, must be from %g to %g", function, name, value, least, most);
  };
  check("label_smoothing", options.label_smoothing, 0, 1);
  check("z_loss", options.z_loss, 0, std::numeric_limits<double>::max());
  if (options.softcap != 0)
    check("softcap", options.softcap, static_cast<double>(std::numeric_limits<float>::min()), 500'000);
  const auto size = static_cast<index_t>(options.weights.size());
  LossTerms terms{options.label_smoothing, options.softcap, options.z_loss, nullptr,
                  static_cast<double>(classes)};
  if (size == 0) return terms;
  if (size != classes) fail_extent(function, "weights", 0, size, "logits", classes);
  terms.weights = options.weights.data();
  terms.weight_sum = 0;
  for (const float weight : options.weights) {
    check("a weight", static_cast<double>(weight), 0, static_cast<double>(std::numeric_limits<float>::max()));
    terms.weight_sum += static_cast<double>(weight);
  }
  return terms;
}

/// Throws unless `losses` has one number per row and overlaps no other argument.
template <class T>
void check_losses(const View<double, 1>& losses, const View<const T, 2>& logits, Integers targets,
                  const View<T, 2>& dlogits, std::span<const float> weights) {
  const char* function = "cross_entropy";
  check_output(function, "losses", losses);
  check_extent(function, "losses", losses, 0, "logits", logits, 0);
  check_no_overlap(function, "losses", losses, "logits", logits);
  check_no_overlap(function, "losses", losses, "dlogits", dlogits);
  check_no_overlap(function, "losses", losses, "targets", View<const std::byte, 1>(targets.bytes()));
  check_no_overlap(function, "losses", losses, "weights", View<const float, 1>(weights));
}

/// Throws unless `dlosses` has one number per row and overlaps no result.
template <class T>
void check_dlosses(const CrossEntropyOptions& options, const View<const T, 2>& logits,
                   const View<T, 2>& dlogits) {
  const char* function = "cross_entropy";
  check_view(function, "dlosses", options.dlosses);
  check_extent(function, "dlosses", options.dlosses, 0, "logits", logits, 0);
  check_no_overlap(function, "losses", options.losses, "dlosses", options.dlosses);
  check_no_overlap(function, "dlogits", dlogits, "dlosses", options.dlosses);
}

}  // namespace detail

/// Returns the loss of logits [row, class] against targets [row]. Writes the gradient to dlogits unless dlogits is
/// `View{}`. The top of cross_entropy.hpp has formulas and bounds. You write the element type, because the compiler
/// cannot deduce the type from the arguments:
///
///     cross_entropy<float>(logits, targets)                         the loss
///     cross_entropy<float>(logits, targets, logits, {}, pool)       and its gradient, over the logits
template <class T, Executor E = Serial>
CrossEntropy cross_entropy(const std::type_identity_t<View<const T, 2>>& logits, Integers targets,
                           const std::type_identity_t<View<T, 2>>& dlogits = {},
                           const CrossEntropyOptions& options = {}, E&& executor = E{}) {
  static_assert(
      detail::RowStorage<T>,
      "ssmax::cross_entropy: T is float, double, half or bfloat16; a storage type of your own needs a "
      "unit without SSMAX_COMPILED");
  using C = ComputeType<T>;
  const char* function = "cross_entropy";
  const index_t rows = logits.extent(0), classes = logits.extent(1);
  const bool wants_gradient = detail::is_given(dlogits);
  detail::check_view(function, "logits", logits);
  const auto targets_size = static_cast<index_t>(targets.size());
  if (targets_size != rows) detail::fail_extent(function, "targets", 0, targets_size, "logits", rows);
  const detail::LossTerms terms = detail::loss_terms(options, classes);
  if (wants_gradient) {
    detail::check_output(function, "dlogits", dlogits);
    detail::check_same_extents(function, "dlogits", dlogits, "logits", logits);
    detail::check_in_place_or_no_overlap(function, "dlogits", dlogits, "logits", logits);
    detail::check_no_overlap(function, "dlogits", dlogits, "targets",
                             View<const std::byte, 1>(targets.bytes()));
    detail::check_no_overlap(function, "dlogits", dlogits, "weights", View<const float, 1>(options.weights));
  }
  const bool wants_losses = detail::is_given(options.losses);
  if (wants_losses) detail::check_losses(options.losses, logits, targets, dlogits, options.weights);
  const bool has_dlosses = detail::is_given(options.dlosses);
  if (has_dlosses) detail::check_dlosses(options, logits, dlogits);
  const detail::CountedTargets counted = detail::count_targets(targets, options, classes);
  CrossEntropy result{0, counted.count};
  if (wants_losses)
    for (index_t row = 0; row < rows; ++row) options.losses(row) = 0;
  if (logits.empty() || (result.count == 0 && !wants_gradient)) return result;

  const bool is_plain =
      terms.label_smoothing == 0 && terms.weights == nullptr && terms.softcap == 0 && terms.z_loss == 0;
  const double factor = counted.weight_sum == 0 ? 0.0 : options.dloss / counted.weight_sum;
  const auto up = [](index_t a, index_t b) { return (a + b - 1) / b; };
  const index_t rows_of_call =
      std::max(up(rows, detail::max_loss_calls), up(detail::min_call_logits, classes));
  const index_t calls = up(rows, rows_of_call);
  const auto& kernels = detail::kernels<detail::RowKernels<C>>();
  double losses[detail::max_loss_calls];
  executor.run(calls, [&](index_t call) {
    double sum = 0;
    for (index_t row = call * rows_of_call; row < std::min(rows, (call + 1) * rows_of_call); ++row) {
      const index_t target = targets[static_cast<std::size_t>(row)];
      T* to = wants_gradient ? &dlogits(row, 0) : nullptr;
      if (target != options.ignored) {
        const T* from = &logits(row, 0);
        const double of_row = has_dlosses ? factor + options.dlosses(row) : factor;
        const double loss = is_plain ? compiled::cross_entropy_row(kernels, from, classes, target, of_row, to)
                                     : compiled::weighted_cross_entropy_row(kernels, from, classes, target,
                                                                            terms, of_row, to);
        if (wants_losses) options.losses(row) = loss;
        sum += loss;
      } else if (wants_gradient) {
        detail::fill_row(to, classes, 0.0f);
      }
    }
    losses[call] = sum;
  });
  double total = 0;
  for (index_t call = 0; call < calls; ++call) total += losses[call];
  if (counted.weight_sum != 0) result.loss = total / counted.weight_sum;
  return result;
}

SSMAX_END
/// @}
