// Declares the kernels of attention's backward with many queries.
#pragma once

#include "prefill.hpp"

SSMAX_BEGIN_SHARED

/// Kernels of attention's tiles in backward (prefill_backward.inl). Tiles are [key][group].
template <class T>
struct PrefillBackwardKernels {
  /// Replaces, for one vector of queries, s by w = 2^(s - shift) and dp by u = w·(dp - delta). u is 0 if w is
  /// 0. Requires s - shift <= 1 and |shift| < 2^20.
  void (*gradients)(T* s, T* dp, index_t keys, const T* shift, const T* delta);
  /// Computes, for one vector of queries, dc[·] = Σ u·z and then u = c·u·slope. Exception: a u of 0 stays 0
  /// and is not part of dc, whatever the other factors are.
  void (*score_gradients)(T* u, index_t keys, const T* z, const T* slope, const T* c, T* dc);
  /// Computes out[keys][pitch] += a[keys][·] · b[lanes][pitch]. pitch must be whole vectors, keys a multiple
  /// of PrefillKernels::pass.
  void (*add_product)(const T* a, index_t lanes, index_t keys, const T* b, index_t pitch, T* out);
  /// Writes out[r][c] = in[r][c] · factor[r], padded with 0 to out's pitch.
  void (*scale_rows)(const T* const* in, index_t rows, index_t columns, const T* factor, T* out,
                     index_t pitch);
  /// Writes out[rows][columns] = in.
  void (*copy_rows)(const T* in, index_t in_stride, index_t rows, index_t columns, T* out,
                    index_t out_stride);
  /// Computes out[rows][columns] += in.
  void (*add_rows)(const T* in, index_t in_stride, index_t rows, index_t columns, T* out, index_t out_stride);
};

/// The outputs of one vector of queries that the products of the bf16 backward read.
template <class T, class E>
struct RoundedGradients {
  E *weights, *gradients;  // [key][stride]
  index_t stride;
  E* pairs;         // [key / 2][group][2]: the same gradients in pairs of keys
  const T* factor;  // multiplier of the gradients, one per lane
  T* dc;            // out, or null: Σ u·z of numbers before rounding
};

/// The factors of one vector of plain logits, one per lane: s = z · multiplier - offset, w = 2^(s - shift)
/// and u = w · (dp - delta). Plain logits have no score function and no masked key.
template <class T>
struct PlainLogits {
  const T *multiplier, *offset, *shift, *delta;
};

/// Kernels of attention's tiles in backward with operands E, in addition to PrefillKernels<T, E>. The same
/// targets have both tables.
template <class T, class E>
struct RoundedBackwardKernels {
  /// Computes the same as PrefillBackwardKernels::gradients. keys must be a multiple of 4.
  void (*gradients)(T* s, T* dp, index_t keys, const T* shift, const T* delta);
  /// Rounds, for one vector of queries, the weights w and the gradients u · factor. Exception: a u of 0 stays
  /// 0 and is not part of dc.
  void (*round)(const T* w, const T* u, const T* z, index_t keys, const RoundedGradients<T, E>& to);
  /// Computes place, gradients and round in one pass, for plain logits z[key][·] and dp[key][·] = dout·v. The
  /// result is bit-identical to the three calls. keys must be a multiple of 4.
  void (*form)(const T* z, const T* dp, index_t keys, const PlainLogits<T>& logits,
               const RoundedGradients<T, E>& to);
  /// Computes out[keys][pitch] += a[keys][·] · b[lanes / 2][pitch][2]. keys must be a multiple of
  /// PrefillKernels::pass, lanes of PrefillKernels::depth.
  void (*add_product)(const E* a, index_t a_stride, index_t lanes, index_t keys, const E* b, index_t pitch,
                      T* out);
  /// Writes out[c][2] = low[c], high[c], padded with 0 to out's pitch.
  void (*pair_rows)(const E* low, const E* high, index_t columns, E* out, index_t pitch);
};

template <class T>
inline constexpr bool has_extensions<RoundedBackwardKernels<T, bfloat16>> = true;

SSMAX_END

#define SSMAX_KERNELS "../kernels/prefill_backward.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS

#define SSMAX_PAIR_KERNELS "../kernels/prefill_backward_pairs.inl"
#include "../dispatch/for_each_extension.inl"
#undef SSMAX_PAIR_KERNELS

#define SSMAX_MATRIX_KERNELS "../kernels/prefill_backward_matrix.inl"
#include "../dispatch/for_each_matrix.inl"
#undef SSMAX_MATRIX_KERNELS
