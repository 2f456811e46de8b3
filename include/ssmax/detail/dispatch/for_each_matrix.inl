// Includes SSMAX_MATRIX_KERNELS, the text of kernels for matrix units, once for each extension that has
// matrix units. Include for_each_extension.inl first: the matrix kernels use its pair dots.

SSMAX_BEGIN_DETAIL

#if defined(SSMAX_COMPILES_AMX)
#if defined(SSMAX_AVX512_EMULATION)
#elif defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512bf16,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512bf16,amx-tile,amx-bf16,tune=generic")
#endif
namespace amx {
using namespace avx512_bf16;
#include "../simd/amx.inl"
//
#include SSMAX_MATRIX_KERNELS
}  // namespace amx
#if defined(SSMAX_AVX512_EMULATION)
#elif defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

SSMAX_END
