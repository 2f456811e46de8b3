// The state of a softmax whose logits arrive in blocks: what attention keeps per query instead of a row of N
// logits.
//
// After any number of blocks, Σ exp(c·z) = 2^shift · sum over the keys seen so far, and the caller's
// accumulator holds Σ exp(c·z) · v / 2^shift. A block with larger logits raises the shift; the caller then
// multiplies its accumulator by the returned power of two. Shifts are integers wherever logits allow (|c·z| <
// 7·10^5), so that rescaling is exact and the result does not depend on how the keys were cut, but for the
// order of additions.
#pragma once

#include <cmath>
#include <limits>
#include <numbers>

#include "detail/row_forward.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {

template <class T>
class OnlineSoftmax {
 public:
  /// c multiplies every logit of this query. May be 0 or negative.
  explicit OnlineSoftmax(double c = 1) : c_(c), scale_(detail::split_scale<T>(c)) {}

  /// Takes n logits in and puts their weights out (out may be in); returns the factor by which what was
  /// accumulated under earlier weights must be multiplied first. NaN, or c·z = +inf, poisons the state for
  /// good.
  double update(const T* in, index_t n, T* out) {
    const auto& leaves = detail::leaves<detail::RowLeaves<T>>();
    constexpr T inf = std::numeric_limits<T>::infinity();
    const detail::Extremum<T> top = leaves.max(in, n);
    const T extreme = c_ < 0 ? leaves.min_unmasked(in, n) : top.value;
    const double largest = c_ * static_cast<double>(extreme) * std::numbers::log2e;
    poisoned_ = poisoned_ || top.has_nan || std::isnan(c_) || (top.value == inf && c_ >= 0) ||
                (std::isfinite(extreme) && !(largest < std::numeric_limits<double>::infinity()));
    if (poisoned_ || !std::isfinite(extreme) ||
        !std::isfinite(largest)) {  // the rest: nothing but weights of 0
      std::fill_n(out, n, T{0});
      return 1;
    }
    const bool exact = c_ > 0 && scale_.high > 0 && std::abs(largest) < detail::largest_shift<double>;
    const double block_shift = exact ? detail::round_shift(largest) : largest;
    const bool first = sum_ == 0;
    const double raised = first ? block_shift : std::max(shift_, block_shift);
    const double factor = first ? 1 : std::exp2(shift_ - raised);
    shift_ = raised;
    T sum;
    detail::Meanwhile<T> nothing;
    if (exact && std::abs(raised) < detail::largest_shift<double>) {
      sum = leaves.exp_store(in, n, scale_, static_cast<T>(raised), out, nothing);
    } else {
      const double offset = (largest - raised) * std::numbers::ln2;
      leaves.affine(in, n, extreme, static_cast<T>(c_), static_cast<T>(offset), out);
      sum = leaves.exp_store(out, n, detail::split_scale<T>(1.0), T{0}, out, nothing);
    }
    sum_ = sum_ * factor + static_cast<double>(sum);
    return factor;
  }

  /// What the accumulator must be multiplied by in the end: 1 / sum; 0 where nothing was visible, NaN where
  /// poisoned.
  [[nodiscard]] double finish() const {
    if (poisoned_) return std::numeric_limits<double>::quiet_NaN();
    return sum_ > 0 ? 1 / sum_ : 0;
  }

  /// ln Σ exp(c·z): -inf where nothing was visible, NaN where poisoned.
  [[nodiscard]] double lse() const {
    if (poisoned_) return std::numeric_limits<double>::quiet_NaN();
    return shift_ * std::numbers::ln2 + std::log(sum_);
  }

 private:
  double c_;
  detail::Scale<T> scale_;
  double shift_ = 0;
  double sum_ = 0;
  bool poisoned_ = false;
};

}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
