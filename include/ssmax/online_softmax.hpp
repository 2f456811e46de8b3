/// @defgroup online_softmax Softmax in blocks (online_softmax.hpp)
/// The state of a softmax whose logits arrive in blocks: what attention keeps per query instead of a row of N
/// logits.
///
/// After any number of blocks, Σ exp(c·z) = 2^shift · sum over the keys seen so far, and the caller's
/// accumulator holds Σ exp(c·z) · v / 2^shift. A block with larger logits raises the shift; the caller
/// then multiplies its accumulator by the returned power of two. Shifts are integers wherever logits allow
/// (|c·z| < 7·10^5), so that rescaling is exact and the result does not depend on how the keys were cut,
/// but for the order of additions.
///
/// attention_state.hpp has the same for whole tensors.
#pragma once

#include <cmath>
#include <limits>
#include <numbers>

#include "detail/rows/row.hpp"

/// @addtogroup online_softmax
/// @{
SSMAX_BEGIN_CODE

/// The state of one query, T = float or double.
template <class T>
class OnlineSoftmax {
 public:
  /// c multiplies every logit of this query. May be 0 or negative.
  explicit OnlineSoftmax(double c = 1) : c_(c), multiplier_(c) {}

  /// Takes n logits in and puts their weights out (out may be in); returns the factor by which what was
  /// accumulated under earlier weights must be multiplied first. NaN, c·z = +inf, or a c that is not finite
  /// poisons the state for good; c·z·log2 e is +inf or -inf where a double cannot hold it.
  double update(const T* in, index_t n, T* out) {
    const auto& kernels = detail::kernels<detail::RowKernels<T>>();
    constexpr T inf = std::numeric_limits<T>::infinity();
    const T* z = in;
    if (c_ < 0) {
      kernels.affine(in, n, T{0}, T{-1}, T{0}, out);
      z = out;
    }
    const detail::Extremum<T> top = kernels.max(z, n);
    const double largest = std::abs(c_) * static_cast<double>(top.value) * std::numbers::log2e;
    poisoned_ = poisoned_ || top.has_nan || !std::isfinite(c_) || top.value == inf ||
                (top.value != -inf && !(largest < std::numeric_limits<double>::infinity()));
    if (poisoned_ || !std::isfinite(largest)) {  // the rest: nothing but weights of 0
      std::fill_n(out, n, T{0});
      return 1;
    }
    const bool exact = std::abs(largest) < detail::largest_shift<double>;
    const double block_shift = exact ? detail::round_shift(largest) : largest;
    const bool first = sum_ == 0;
    const double raised = first ? block_shift : std::max(shift_, block_shift);
    const double factor = first ? 1 : std::exp2(shift_ - raised);
    shift_ = raised;
    const T unit = std::abs(multiplier_.direction);
    const bool direct = exact && std::abs(raised) < detail::largest_shift<double>;
    if (!direct || unit != 1) {
      kernels.affine(z, n, direct ? T{0} : top.value, unit, T{0}, out);
      z = out;
    }
    detail::OverlappedWork<T> nothing{};
    T sum = kernels.exp_store(z, n, multiplier_.scale, direct ? static_cast<T>(raised) : T{0}, out, nothing);
    if (!direct && largest != raised) {
      const auto lowered = static_cast<T>(std::exp2(largest - raised));
      kernels.multiply(out, n, lowered, out);
      sum *= lowered;
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

  /// The state as numbers: Σ exp(c·z) = 2^shift · sum. -inf where nothing was visible.
  [[nodiscard]] double shift() const { return sum_ == 0 ? -std::numeric_limits<double>::infinity() : shift_; }
  /// The other one: 0 where nothing was visible, NaN where poisoned.
  [[nodiscard]] double sum() const { return poisoned_ ? std::numeric_limits<double>::quiet_NaN() : sum_; }

  /// Forgets all blocks.
  void reset() { *this = OnlineSoftmax(c_); }

 private:
  double c_;
  detail::Multiplier<T> multiplier_;
  double shift_ = 0;
  double sum_ = 0;
  bool poisoned_ = false;
};

SSMAX_END
/// @}
