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
/// | special value | result |
/// |---|---|
/// | a logit of -inf | probability 0, gradient 0 |
/// | a target's logit of -inf | loss +inf; gradient by the formula: -dloss/count for the target |
/// | a row with only -inf | loss +inf, gradient 0 |
/// | NaN or +inf in a row | loss NaN, dlogits of this row NaN, dlogits of other rows unaffected |
/// | one class | loss and gradient are exactly 0 |
/// | a probability that softmax.hpp may flush to 0 | the loss of this target is finite, within double's range |
///
/// Finite logits may have any size. A loss is never negative.
///
/// | result | bound of the error in float | in double |
/// |---|---|---|
/// | loss of a row | 1e-6·max(1, loss) | 2e-15·max(1, loss) |
/// | dlogits | 1e-6·abs(dlogits) | 2e-15·abs(dlogits) |
/// | dlogits of the target | 1e-6·abs(dloss)/count | 2e-15·abs(dloss)/count |
///
/// The worst case is a row with thousands of small terms and one large term. Normally distributed logits have a third
/// of this error.
///
/// The executor distributes rows. The number of rows per task and the order of the sums depend on the extents only.
/// So loss and gradient are bit-identical for every executor. The loss is also bit-identical with and without
/// dlogits. The view dlogits may be the memory of the logits. Otherwise dlogits must not overlap the logits. To omit
/// dlogits, pass `View{}`. Throws std::invalid_argument for every error, before anything is written. The function
/// does not allocate.
#pragma once

#include <algorithm>
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

/// The optional arguments of cross_entropy.
struct CrossEntropyOptions {
  index_t ignored = -100;  ///< Target of rows that are ignored; may be a class.
  double dloss = 1;        ///< The gradient of the loss.
};

/// The result of cross_entropy.
struct CrossEntropy {
  double loss;    ///< The mean over `count` rows.
  index_t count;  ///< Number of rows that are not ignored.
};

SSMAX_END

SSMAX_BEGIN_CODE
namespace detail {

/// Limits of the tasks, the same for every executor. At most most_loss_calls tasks, because their losses are on the
/// stack. If rows are short, a task has at least least_call_logits logits, which take some microseconds.
inline constexpr index_t max_loss_calls = 256;
inline constexpr index_t min_call_logits = 16'384;

/// Returns the number of targets that are not ignored. Throws at the first target that is not a class.
inline index_t count_targets(Integers targets, index_t ignored, index_t classes) {
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
  using C = detail::ComputeType<T>;
  const char* function = "cross_entropy";
  const index_t rows = logits.extent(0), classes = logits.extent(1);
  const bool wants_gradient = detail::is_given(dlogits);
  detail::check_view(function, "logits", logits);
  const auto targets_size = static_cast<index_t>(targets.size());
  if (targets_size != rows) detail::fail_extent(function, "targets", 0, targets_size, "logits", rows);
  if (wants_gradient) {
    detail::check_output(function, "dlogits", dlogits);
    detail::check_same_extents(function, "dlogits", dlogits, "logits", logits);
    detail::check_in_place_or_no_overlap(function, "dlogits", dlogits, "logits", logits);
    detail::check_no_overlap(function, "dlogits", dlogits, "targets",
                             View<const std::byte, 1>(targets.bytes()));
  }
  const index_t count = detail::count_targets(targets, options.ignored, classes);
  if (logits.empty() || (count == 0 && !wants_gradient)) return {0.0, count};

  const double factor = count == 0 ? 0.0 : options.dloss / static_cast<double>(count);
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
