/// @defgroup online_softmax Softmax in blocks (online_softmax.hpp)
/// The state of a softmax whose logits arrive in blocks. Attention keeps such a state per query in place of a row of
/// N logits.
///
/// After any number of blocks, Σ exp(c·z) = 2^shift · sum over all keys so far. You keep an accumulator of Σ exp(c·z)
/// · v / 2^shift. A block with larger logits raises the shift. update then returns a power of two, by which you
/// multiply the accumulator. Shifts are integers if |c·z| < 7·10^5. Rescaling is then exact, and only the order of
/// additions depends on how you split the keys into blocks.
///
/// attention_state.hpp has states for whole tensors.
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
  /// Makes a state without keys. c multiplies every logit of this query and may be 0 or negative.
  explicit OnlineSoftmax(double c = 1) : c_(c), multiplier_(c) {}

  /// Reads n logits and writes their weights to `out`, which may be `in`. Returns the factor for the accumulator:
  /// multiply the accumulator by the factor before you add the new terms. After NaN, c·z = +inf, or a c that is not
  /// finite, the state stays NaN. A c·z·log2 e beyond the range of double counts as +inf or -inf.
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
    if (poisoned_ || !std::isfinite(largest)) {  // all weights are 0
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

  /// Returns the factor for the final accumulator: 1 / sum. Returns 0 if no key was visible, NaN after NaN.
  [[nodiscard]] double finish() const {
    if (poisoned_) return std::numeric_limits<double>::quiet_NaN();
    return sum_ > 0 ? 1 / sum_ : 0;
  }

  /// Returns ln Σ exp(c·z). Returns -inf if no key was visible, NaN after NaN.
  [[nodiscard]] double lse() const {
    if (poisoned_) return std::numeric_limits<double>::quiet_NaN();
    return shift_ * std::numbers::ln2 + std::log(sum_);
  }

  /// Returns the shift, with Σ exp(c·z) = 2^shift · sum. Returns -inf if no key was visible.
  [[nodiscard]] double shift() const { return sum_ == 0 ? -std::numeric_limits<double>::infinity() : shift_; }
  /// Returns the sum. Returns 0 if no key was visible, NaN after NaN.
  [[nodiscard]] double sum() const { return poisoned_ ? std::numeric_limits<double>::quiet_NaN() : sum_; }

  /// Returns to the state without keys.
  void reset() {
    shift_ = 0;
    sum_ = 0;
    poisoned_ = false;
  }

 private:
  double c_;
  detail::Multiplier<T> multiplier_;
  double shift_ = 0;
  double sum_ = 0;
  bool poisoned_ = false;
};

SSMAX_END
/// @}
