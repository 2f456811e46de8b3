// Products of bfloat16 that each target offers. attention/call/route.hpp decides by them.
#pragma once

#include "../../target.hpp"

SSMAX_BEGIN_DETAIL

struct Bf16Capabilities {
  bool has_products = false;   // PrefillKernels<float, bfloat16> and RoundedBackwardKernels have functions
  bool has_pair_dots = false;  // PairDecodeKernels have functions
  index_t decode_rows_max =
      0;  // Upper bound of the rows for which decode is faster than prefill in bfloat16.
};

/// Returns what a target offers. A target that is not named here has no products of bfloat16.
SSMAX_INLINE constexpr Bf16Capabilities bf16_capabilities(Target target) {
  if (target == Target::amx) return {.has_products = true, .has_pair_dots = false, .decode_rows_max = 4};
  if (target == Target::avx512_bf16 || target == Target::neon_bf16) {
    return {.has_products = true, .has_pair_dots = true, .decode_rows_max = 16};
  }
  return {};
}

SSMAX_END
