// Lists the bf16 functions that each target offers. attention/work/route.hpp chooses by this list.
#pragma once

#include "target_in_use.hpp"

SSMAX_BEGIN_DETAIL

struct Bf16Capabilities {
  bool has_products = false;    // PrefillKernels<float, bfloat16>, RoundedBackwardKernels have functions
  bool has_pair_dots = false;   // PairDecodeKernels have functions
  index_t decode_rows_max = 0;  // most rows for which decode is faster than prefill
};

/// Returns what a target offers. The default, for all other targets, is no products of bfloat16.
SSMAX_INLINE constexpr Bf16Capabilities bf16_capabilities(Target target) {
  if (target == Target::amx) return {.has_products = true, .has_pair_dots = false, .decode_rows_max = 4};
  if (target == Target::avx512_bf16)
    return {.has_products = true, .has_pair_dots = true, .decode_rows_max = 16};
  // A tile of NEON has 12 queries.
  if (target == Target::neon_bf16)
    return {.has_products = true, .has_pair_dots = true, .decode_rows_max = 12};
  return {};
}

SSMAX_END
