// Declares the kernels of attention with few queries.
#pragma once

#include "exp.hpp"  // for simd/neon_bf16.inl, whose region includes no headers
#include "lanes.hpp"

SSMAX_BEGIN_SHARED

/// Kernels of attention with few queries, for keys and values of storage type X. Rows of q are padded with 0
/// to whole vectors.
template <class T, class X>
struct DecodeKernels {
  /// Writes s[rows × keys] = q[rows × d] · k[keys × d]ᵀ.
  void (*logits)(const T* q, index_t q_stride, index_t rows, const X* k, index_t k_stride, index_t keys,
                 index_t d, T* s, index_t s_stride);
  /// Computes o[rows × dv] += s[rows × keys] · v[keys × dv].
  void (*accumulate)(const T* s, index_t s_stride, index_t rows, index_t keys, const X* v, index_t v_stride,
                     index_t dv, T* o, index_t o_stride);
};

/// Kernels of attention with few queries by pair dots. In the tables of AMX and of targets without pair dots,
/// both functions are null (dispatch/bf16.hpp lists the targets).
template <class T, class E>
struct PairDecodeKernels {
  /// Writes s as DecodeKernels::logits does. A row of q consists of `parts` rows, each padded with 0 to
  /// q_pitch. The logits of the parts are added.
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

/// The empty table of AMX. AMX computes several queries by prefill's tiles: 16 queries are one tile.
template <class T>
struct KernelTable<PairDecodeKernels<T, bfloat16>> {
  static constexpr PairDecodeKernels<T, bfloat16> value{};
};

}  // namespace amx

SSMAX_END
#endif
