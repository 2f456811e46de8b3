// Attention of few queries.
#pragma once

#include "exp.hpp"  // for simd/neon_bf16.inl, whose region can include nothing
#include "lanes.hpp"

SSMAX_BEGIN_SHARED

/// Attention of few queries against keys and values in storage type X. Rows of q are filled
/// up with 0 to whole vectors.
template <class T, class X>
struct DecodeKernels {
  /// s[rows × keys] = q[rows × d] · k[keys × d]ᵀ
  void (*logits)(const T* q, index_t q_stride, index_t rows, const X* k, index_t k_stride, index_t keys,
                 index_t d, T* s, index_t s_stride);
  /// o[rows × dv] += s[rows × keys] · v[keys × dv]
  void (*accumulate)(const T* s, index_t s_stride, index_t rows, index_t keys, const X* v, index_t v_stride,
                     index_t dv, T* o, index_t o_stride);
};

/// The same by pair dots, for several queries. Targets without pair dots, and AMX, have a table without functions
/// (dispatch/bf16.hpp tells which targets have them).
template <class T, class E>
struct PairDecodeKernels {
  /// As above; a row of q is `parts` rows, each filled up with 0 to q_pitch, whose logits are added.
  void (*logits)(const E* q, index_t q_pitch, index_t parts, index_t rows, const E* k, index_t k_stride,
                 index_t keys, index_t d, T* s, index_t s_stride) = nullptr;
  void (*accumulate)(const E* weights, index_t stride, index_t rows, index_t keys, const E* v,
                     index_t v_stride, index_t dv, T* o, index_t o_stride) = nullptr;
};

template <class T>
inline constexpr bool has_extensions<PairDecodeKernels<T, bfloat16>> = true;

SSMAX_END

#define SSMAX_KERNELS "../kernels/decode.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS

#define SSMAX_PAIR_KERNELS "../kernels/decode_pairs.inl"
#include "../dispatch/for_each_extension.inl"
#undef SSMAX_PAIR_KERNELS

#if defined(SSMAX_COMPILES_AMX)
SSMAX_BEGIN_DETAIL
namespace amx {

/// Several queries go by prefill's tiles: 16 of them are one tile.
template <class T>
struct KernelTable<PairDecodeKernels<T, bfloat16>> {
  static constexpr PairDecodeKernels<T, bfloat16> value{};
};

}  // namespace amx

SSMAX_END
#endif
