// Declares the kernels that convert from and to 16-bit storage types, and from 8-bit storage types and Q8_0 to float
// and to operands of the bf16 path.
#pragma once

#include "exp.hpp"  // for simd/neon_bf16.inl, whose region includes no headers
#include "lanes.hpp"

SSMAX_BEGIN_SHARED

/// Kernels that widen 16-bit storage and Q8_0 to float and round float to 16-bit storage.
struct ConversionKernels {
  void (*widen_half)(const half* in, index_t n, float* out);
  void (*widen_bfloat16)(const bfloat16* in, index_t n, float* out);
  /// Widens n / 32 groups.
  void (*widen_q8_0)(const Q8_0* in, index_t n, float* out);
  void (*narrow_half)(const float* in, index_t n, half* out);
  void (*narrow_bfloat16)(const float* in, index_t n, bfloat16* out);
};

/// Kernels of storage of 8 bits with a factor per row.
template <class X>
struct EightBitKernels {
  /// Widens n elements to float. The result lacks the factor.
  void (*widen)(const X* in, index_t n, float* out);
  /// Computes out[i] = in[i] · factors[i] for n logits or weights of a query, or n channels of a row.
  void (*multiply)(const float* in, const float* factors, index_t n, float* out);
  /// Adds in[i] · factors[i] to out[i] for n channels of a sum.
  void (*add_products)(const float* in, const float* factors, index_t n, float* out);
};

/// Kernels of rows of 8 bits with a factor per row, and of rows of Q8_0. In the tables of targets without products of
/// bfloat16, the function is null (dispatch/bf16.hpp lists the targets).
template <class X>
struct DequantizeKernels {
  /// Writes out[row][i] = in[row][i] · factors[row] for the channels of each row, rounded once to nearest even. With
  /// `channel_factors`, multiplies the product, rounded to float, by channel_factors[i] first. Subnormal results may
  /// become 0: products count them as 0. Rows of Q8_0 contain their factors: neither pointer is read.
  void (*dequantize)(const KeyRows<X>& in, const float* factors, const float* channel_factors,
                     StridedRows<bfloat16> out) = nullptr;
};

template <class X>
inline constexpr bool has_extensions<DequantizeKernels<X>> = true;

SSMAX_END

#define SSMAX_KERNELS "../kernels/convert.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS

#define SSMAX_PAIR_KERNELS "../kernels/convert_pairs.inl"
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
