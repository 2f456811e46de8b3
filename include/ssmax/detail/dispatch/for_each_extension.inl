// Includes SSMAX_PAIR_KERNELS, the text of kernels that use pair dots of bfloat16, once for each extension
// that has pair dots. The file works like for_each_target.inl. An extension also sees the vectors and kernels
// of the instruction set that it extends.

SSMAX_BEGIN_DETAIL

#if defined(SSMAX_COMPILES_NEON_BF16)
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+bf16")
namespace neon_bf16 {
using namespace neon;
#include "../simd/neon_bf16.inl"
//
#include SSMAX_PAIR_KERNELS
}  // namespace neon_bf16
#pragma GCC pop_options
#endif

#if defined(SSMAX_COMPILES_AVX512_BF16)
SSMAX_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512bf16")
namespace avx512_bf16 {
using namespace avx512;
#include "../simd/avx512_bf16.inl"
//
#include SSMAX_PAIR_KERNELS
}  // namespace avx512_bf16
SSMAX_END_TARGET
#endif

SSMAX_END
