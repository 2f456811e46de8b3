/// @defgroup cross_entropy Cross-entropy (cross_entropy.hpp)
/// Cross-entropy of logits against one class a row, and its gradient: the loss that a model is trained with.
///
///     loss      = 1/count · Σ_i (ln Σ_j exp(z_ij) - z_i,t(i))       over the rows i that are not ignored
///     dlogits   = dloss/count · (softmax(z_i)_j - [j = t(i)])       0 in ignored rows
///
/// logits and dlogits are [row, class] with last stride 1, targets holds the class t(i) of every row. A row
/// is ignored if its target is options.ignored, and is then not read; count is how many are not. With count
/// 0, or without rows, the loss is 0. float, half and bfloat16 compute in float, double in double; rows are
/// added up in double.
///
/// Special values: a logit of -inf is a class that cannot be, with probability 0 and gradient 0. As the
/// target it makes the loss +inf, and the gradient is what the formula says: dloss/count · (0 - 1) for the
/// target and the others' as ever. A row of nothing but -inf has loss +inf and gradient 0. NaN or +inf makes
/// the loss NaN and its own row of dlogits, no other. Finite logits may be of any size. With a single class,
/// loss and gradient are 0 exactly. No loss is negative. Probabilities may be flushed to 0 as in softmax.hpp;
/// the loss of such a target is finite all the same, up to what a double holds.
///
/// Accuracy in float: a row's loss within 1e-6, or within 1e-6 of itself where it is above 1; dlogits within
/// 1e-6 of themselves, the target's within 1e-6 of dloss/count. That is where thousands of small terms meet
/// one large one; normally distributed logits give a third of it. In double 2e-15 takes the place of 1e-6.
///
/// The executor's calls take rows; how many each takes, and the order in which losses are added, depends on
/// the extents alone, so that every executor gives the same bits. The loss is the same with and without
/// dlogits, too. dlogits may be the logits' own memory, or must lie apart from it; it may be left out, as
/// `View{}`. Errors are std::invalid_argument, thrown before anything is written. Nothing is allocated.
#pragma once

#include <algorithm>
#include <cmath>
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

/// What may be left out of a call of cross_entropy.
struct CrossEntropyOptions {
  index_t ignored = -100;  ///< Rows with this target count for nothing; it may be a class.
  double dloss = 1;        ///< The gradient that arrives at the loss.
};

/// What cross_entropy returns.
struct CrossEntropy {
  double loss;    ///< The mean over `count` rows.
  index_t count;  ///< Rows that are not ignored.
};

SSMAX_END

SSMAX_BEGIN_CODE
namespace detail {

/// Rows are cut into the same calls for every executor: at most most_loss_calls, as their losses wait on the
/// stack, and, where rows are short, with at least least_call_logits logits each (some microseconds).
inline constexpr index_t most_loss_calls = 256;
inline constexpr index_t least_call_logits = 16'384;

/// How many targets are not to be ignored. Fails at the first that is no class.
inline index_t count_targets(std::span<const index_t> targets, index_t ignored, index_t classes) {
  index_t count = 0;
  for (std::size_t row = 0; row < targets.size(); ++row) {
    const index_t target = targets[row];
    if (target == ignored) continue;
    if (target < 0 || target >= classes) {
      fail_format("ssmax::cross_entropy: targets has class %td in row %td, logits has %td classes", target,
                  static_cast<index_t>(row), classes);
    }
    ++count;
  }
  return count;
}

}  // namespace detail

/// The loss of logits [row, class] against targets [row] and, if wanted, its gradient: formulas and
/// bounds are at the top of cross_entropy.hpp. Write the element type, arguments do not deduce it:
///
///     cross_entropy<float>(logits, targets)                         the loss
///     cross_entropy<float>(logits, targets, logits, {}, pool)       and its gradient, over the logits
template <class T, Executor E = Serial>
CrossEntropy cross_entropy(const std::type_identity_t<View<const T, 2>>& logits,
                           std::span<const index_t> targets,
                           const std::type_identity_t<View<T, 2>>& dlogits = {},
                           const CrossEntropyOptions& options = {}, E&& executor = E{}) {
  static_assert(
      detail::RowStorage<T>,
      "ssmax::cross_entropy: T is float, double, half or bfloat16; a storage type of your own needs a "
      "unit without SSMAX_COMPILED");
  using C = detail::Compute<T>;
  const char* function = "cross_entropy";
  const index_t rows = logits.extent(0), classes = logits.extent(1);
  const bool wants_gradient = detail::is_given(dlogits);
  detail::check_view(function, "logits", logits);
  const auto targets_size = static_cast<index_t>(targets.size());
  if (targets_size != rows) detail::fail_extent(function, "targets", 0, targets_size, "logits", rows);
  if (wants_gradient) {
    detail::check_output(function, "dlogits", dlogits);
    detail::check_same_extents(function, "dlogits", dlogits, "logits", logits);
    detail::check_in_place_or_apart(function, "dlogits", dlogits, "logits", logits);
    detail::check_apart(function, "dlogits", dlogits, "targets", View<const index_t, 1>(targets));
  }
  const index_t count = detail::count_targets(targets, options.ignored, classes);
  if (logits.empty() || (count == 0 && !wants_gradient)) return {0.0, count};

  const double factor = count == 0 ? 0.0 : options.dloss / static_cast<double>(count);
  const auto up = [](index_t a, index_t b) { return (a + b - 1) / b; };
  const index_t rows_of_call =
      std::max(up(rows, detail::most_loss_calls), up(detail::least_call_logits, classes));
  const index_t calls = up(rows, rows_of_call);
  const auto& kernels = detail::kernels<detail::RowKernels<C>>();
  double losses[detail::most_loss_calls];
  executor.run(calls, [&](index_t call) {
    double sum = 0;
    for (index_t row = call * rows_of_call; row < std::min(rows, (call + 1) * rows_of_call); ++row) {
      const index_t target = targets[static_cast<std::size_t>(row)];
      T* to = wants_gradient ? &dlogits(row, 0) : nullptr;
      if (target != options.ignored) {
        sum += compiled::cross_entropy_row(kernels, &logits(row, 0), classes, target, factor, to);
      } else if (wants_gradient) {
        detail::fill_row(to, classes, 0.0f);
      }
    }
    losses[call] = sum;
  });
  double total = 0;
  for (index_t call = 0; call < calls; ++call) total += losses[call];
  return {count == 0 ? 0.0 : total / static_cast<double>(count), count};
}

SSMAX_END
/// @}
