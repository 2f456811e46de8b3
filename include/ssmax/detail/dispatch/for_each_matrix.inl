// Includes SSMAX_MATRIX_KERNELS, the text of kernels for matrix units, once for each extension that has
// matrix units. Include for_each_extension.inl first: the matrix kernels use its pair dots.

SSMAX_BEGIN_DETAIL

#if defined(SSMAX_COMPILES_AMX)
SSMAX_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512bf16,amx-tile,amx-bf16")
namespace amx {
using namespace avx512_bf16;
#include "../simd/amx.inl"
//
#include SSMAX_MATRIX_KERNELS
}  // namespace amx
SSMAX_END_TARGET
#endif

SSMAX_END
