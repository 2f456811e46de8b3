// Declares the kernels that convert rows of 8 bits to operands of the bf16 path.
#pragma once

#include "exp.hpp"  // for simd/neon_bf16.inl, whose region includes no headers
#include "lanes.hpp"

SSMAX_BEGIN_SHARED

/// Kernels of rows of 8 bits with a factor per row, or of Q8_0 rows, which contain factors. In the tables of targets without products of bfloat16, the function
/// is null (dispatch/bf16.hpp lists the targets).
template <class X>
struct DequantizeKernels {
  /// Writes out[row][i] = in[row][i] · factors[row] for n channels of each row, rounded once to nearest even. For Q8_0,
  /// in[row][i] has a factor, and `factors` is null. Subnormal
  /// results may become 0: products count them as 0. Prefetches the rows that lie `ahead` bytes after those of `in`,
  /// unless `ahead` is 0. They may lie past the end.
  void (*dequantize)(const X* in, index_t stride, const float* factors, index_t rows, index_t n,
                     index_t ahead, bfloat16* out, index_t out_stride) = nullptr;
};

template <class X>
inline constexpr bool has_extensions<DequantizeKernels<X>> = true;

SSMAX_END

#define SSMAX_KERNELS "../kernels/dequantize.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS

#define SSMAX_PAIR_KERNELS "../kernels/dequantize_pairs.inl"
#include "../dispatch/for_each_extension.inl"
#undef SSMAX_PAIR_KERNELS

#if defined(SSMAX_COMPILES_AMX)
SSMAX_BEGIN_DETAIL
namespace amx {

/// AMX converts by the kernels of AVX512_BF16.
template <class X>
struct KernelTable<DequantizeKernels<X>> : avx512_bf16::KernelTable<DequantizeKernels<X>> {};

}  // namespace amx

SSMAX_END
#endif
