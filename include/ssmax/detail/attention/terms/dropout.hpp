// Defines DropoutOption, which brings the kernels of dropout. Other units do not compile them.
#pragma once

#include <concepts>

#include "../../../query.hpp"
#include "../../kernels/dropout.hpp"

SSMAX_BEGIN_SHARED

/// The probability of dropout. The unit that makes it from a number compiles the kernels of dropout.
template <class Compute>
class DropoutProbability {
 public:
  SSMAX_INLINE constexpr DropoutProbability() = default;
  SSMAX_INLINE constexpr DropoutProbability(double p)
      : p_(p), kernels_(compiled::kernels<DropoutKernels<Compute>>) {
    if constexpr (std::same_as<Compute, float>) pair_kernels_ = compiled::kernels<PairDropoutKernels>;
  }

  SSMAX_INLINE constexpr operator double() const { return p_; }
  /// Returns the kernels of the active target. Requires a probability that was made from a number.
  SSMAX_INLINE const DropoutKernels<Compute>& kernels() const { return kernels_(); }
  SSMAX_INLINE const PairDropoutKernels& pair_kernels() const { return pair_kernels_(); }

 private:
  double p_ = 0;
  const DropoutKernels<Compute>& (*kernels_)() = nullptr;
  const PairDropoutKernels& (*pair_kernels_)() = nullptr;
};

/// The dropout of a call: the members of Dropout.
template <class Compute>
struct DropoutOption {
  DropoutProbability<Compute> p{};
  std::uint64_t seed = 0, offset = 0;
  KeptSpan<const std::uint64_t> seeds{};
};

SSMAX_END
