// Computes the cross entropy of one row. The drivers are compiled once per element type.
#pragma once

#include "../../storage.hpp"
#include "../kernels/cross_entropy.hpp"
#include "../kernels/rows.hpp"
#include "../kernels/scores.hpp"

SSMAX_BEGIN_SHARED

/// The options of a loss that change its terms: the top of cross_entropy.hpp has the formula.
struct LossTerms {
  double label_smoothing, softcap, z_loss;
  const float* weights;  // null if every weight is 1
  double weight_sum;     // of all classes
};

SSMAX_END

SSMAX_BEGIN_COMPILED

/// Writes dz = factor · (softmax(z) - onehot(target)) of one row, unless dz is null. Returns the row's loss.
/// dz may be z.
template <class X>
double cross_entropy_row(const shared::RowKernels<ComputeType<X>>& kernels, const X* z, index_t n,
                         index_t target, double factor, X* dz);

/// Does the work of cross_entropy_row for a loss with other terms.
template <class X>
double weighted_cross_entropy_row(const shared::RowKernels<ComputeType<X>>& kernels, const X* z, index_t n,
                                  index_t target, const shared::LossTerms& terms, double factor, X* dz);

SSMAX_END

#if SSMAX_COMPILES_DRIVERS
#include "row.hpp"

SSMAX_BEGIN_DETAIL

/// Returns the loss of a row that is not regular. Fills its gradient, unless dz is null.
template <class X>
double irregular_loss(RowKind kind, X* dz, index_t n) {
  const bool masked = kind == RowKind::masked;
  if (dz != nullptr) fill_row(dz, n, masked ? 0.0f : std::numeric_limits<float>::quiet_NaN());
  return masked ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
}

/// A row of logits softcap·tanh(z / softcap). The bound of the softcap keeps the row in the range of exact shifts, so
/// the row is never rebased.
template <class T, class X>
class CappedSource : public RowSource<T, X> {
 public:
  CappedSource(const RowKernels<T>& kernels, const X* in, index_t n, double softcap)
      : RowSource<T, X>(kernels, in, n, 1.0), in_(in), softcap_(static_cast<T>(softcap)) {}

  bool in_place() const { return false; }
  const T* block(index_t begin, index_t count, T* scratch) const {
    kernels_.softcap(widened<T>(in_ + begin, count, scratch), count, softcap_, scratch);
    return scratch;
  }

 private:
  const ScoreKernels<T>& kernels_ = detail::kernels<ScoreKernels<T>>();
  const X* in_;
  T softcap_;
};

/// Computes weighted_cross_entropy_row for a source of logits. With m the largest logit and lse = ln Σ exp(x):
///
///     loss     = own·(lse - x_target) + share·(Σ w·(lse - m) + Σ w·(m - x)) + z_loss·lse²
///     dx       = factor·(mass·p - share·w - own·[target]),  mass = own + share·Σ w + 2·z_loss·lse
///
/// All terms of the sums have one sign, so their error is relative.
template <class T, class X, class Source>
double loss_of_source(const RowKernels<T>& kernels, Source source, index_t target, const LossTerms& terms,
                      double factor, X* dz) {
  constexpr index_t block = row_block / 4;  // x, e, weights and dz of a block fit the first-level cache
  const index_t n = source.size();
  T x[row_block], e[block], weights[block], staged[block];
  const T target_logit = *source.block(target, 1, x);
  const RowSum<T> total = sum_row_rebasing<T>(kernels, source, x, nullptr, nullptr);
  if (total.kind != RowKind::regular) return irregular_loss(total.kind, dz, n);

  // 1. Compute the factors of the terms.
  const T origin = source.logit(total.origin);
  const double above_origin = n == 1 ? 0.0 : log_sum_above(source, total, origin);
  const double lse = static_cast<double>(origin) + above_origin;
  const double weight = terms.weights == nullptr ? 1.0 : static_cast<double>(terms.weights[target]);
  const double own = (1 - terms.label_smoothing) * weight;
  const double share = terms.label_smoothing / static_cast<double>(n);
  const double slope_of_lse = 2 * terms.z_loss * lse;
  const double mass = own + share * terms.weight_sum + slope_of_lse;
  const T inverse_cap = terms.softcap == 0 ? T{0} : 1 / static_cast<T>(terms.softcap);

  // 2. Sum the distances of all logits, and write the gradient.
  double distance = 0;
  const index_t read = dz != nullptr || share > 0 ? n : 0;
  for (index_t begin = 0; begin < read; begin += block) {
    const index_t count = std::min(block, n - begin);
    LossBlock<T> part{.x = source.block(begin, count, x),
                      .e = e,
                      .weights = nullptr,
                      .out = nullptr,
                      .n = count,
                      .origin = total.origin,
                      .factor = static_cast<T>(factor * mass / total.sum),
                      .share = static_cast<T>(factor * share),
                      .inverse_cap = inverse_cap};
    if (terms.weights != nullptr) part.weights = converted<T>(terms.weights + begin, count, weights);
    if (dz != nullptr) {
      OverlappedWork<T> nothing{};
      kernels.exp_store(part.x, count, source.scale(), static_cast<T>(total.shift), e, nothing);
      part.out = staging<T>(dz + begin, staged);
    }
    distance += detail::kernels<CrossEntropyKernels<T>>().loss_block(part);
    if (dz == nullptr) continue;
    if (target >= begin && target < begin + count) {
      // In double and by p - 1, as in cross_entropy_row.
      const double p = static_cast<double>(e[target - begin]) / total.sum;
      const double t = static_cast<double>(target_logit) * static_cast<double>(inverse_cap);
      const double slope = terms.softcap == 0 ? 1.0 : std::max(1 - t * t, 0.0);
      const double dx = own * (p - 1) + share * (terms.weight_sum * p - weight) + slope_of_lse * p;
      part.out[target - begin] = static_cast<T>(factor * slope * dx);
    }
    narrow_to<T>(dz + begin, count, part.out);
  }

  // 3. Add the terms. A term with factor 0 is left out: its logarithm may be infinite.
  double loss = terms.z_loss * lse * lse;
  if (own > 0) loss += own * (n == 1 ? 0.0 : log_sum_above(source, total, target_logit));
  if (share > 0) loss += share * (terms.weight_sum * above_origin + distance);
  return loss;
}

SSMAX_END

SSMAX_BEGIN_COMPILED

template <class X>
double cross_entropy_row(const shared::RowKernels<ComputeType<X>>& kernels, const X* z, index_t n,
                         index_t target, double factor, X* dz) {
  using namespace detail;
  using T = ComputeType<X>;
  const auto target_logit = static_cast<T>(z[target]);
  ExponentialRow<T, X, X> row(kernels, z, n, 1.0, dz);
  const RowSum<T>& total = row.total();
  if (total.kind != RowKind::regular) return irregular_loss(total.kind, dz, n);
  if (n == 1) {
    if (dz != nullptr) fill_row(dz, n, 0.0f);
    return 0.0;
  }
  const double loss = log_sum_above(row.source(), total, target_logit);
  if (dz == nullptr) return loss;

  row.for_each_block([&](index_t begin, index_t count, const T* e, int shift, T* to) {
    // Computes the target's gradient separately, in double: p - 1 with a rounded p would leave a remainder
    // where p is 1.
    const bool holds_target = target >= begin && target < begin + count;
    const double weight = holds_target ? static_cast<double>(e[target - begin]) : 0.0;
    kernels.multiply(e, count, static_cast<T>(std::ldexp(factor / total.sum, shift)), to);
    if (holds_target)
      to[target - begin] = static_cast<T>(factor * (std::ldexp(weight, shift) / total.sum - 1));
  });
  return loss;
}

template <class X>
double weighted_cross_entropy_row(const shared::RowKernels<ComputeType<X>>& kernels, const X* z, index_t n,
                                  index_t target, const shared::LossTerms& terms, double factor, X* dz) {
  using namespace detail;
  using T = ComputeType<X>;
  if (terms.softcap == 0)
    return loss_of_source<T>(kernels, RowSource<T, X>(kernels, z, n, 1.0), target, terms, factor, dz);
  return loss_of_source<T>(kernels, CappedSource<T, X>(kernels, z, n, terms.softcap), target, terms, factor,
                           dz);
}

SSMAX_END
#endif
