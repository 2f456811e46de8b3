// Declares the kernels of attention with many queries.
#pragma once

#include "../../half.hpp"
#include "../rows/state.hpp"
#include "exp.hpp"

SSMAX_BEGIN_SHARED

/// Distance in units of log2. A query's shift is raised, and its sums are rescaled, only if a logit exceeds
/// the shift by more than this distance. So weights stay below 2^9. After the first block, shifts are raised
/// rarely (1 % of the time at width 64).
inline constexpr int raise_distance = 8;

/// The largest number of queries that take the kernels row_logits and row_accumulate.
inline constexpr index_t most_rows_read = 2;

enum class TileChange {
  none,
  raised,    // a shift was raised: the caller rescales what it accumulated
  irregular  // unchanged: NaN, +inf, or a shift that T cannot hold exactly
};

/// The softmax state of one vector of queries, or of several neighbouring vectors: Σ 2^x = 2^shift · sum.
/// shift is -inf until a key is visible.
template <class T>
struct TileState {
  T *shift, *sum;
  T* factor;                       // out: the multiplier of earlier weights
  const T* multiplier = nullptr;   // bf16 path only, or null: multiplier of logits, above 0
  TileStatistics<T> statistics{};  // read and written by StatisticsKernels alone
};

/// Values in panels of PrefillKernels::pass channels, which pack_values has packed. Exception: if E is T, also plain
/// rows. Value c of a key is then at c / pass · panel_stride + key · stride + c % pass.
template <class E>
struct ValuePanels {
  const E* first = nullptr;
  index_t stride = 0, panel_stride = 0, panels = 0;

  /// Returns the values from `key` on.
  SSMAX_INLINE ValuePanels from(index_t key) const {
    return {first + key * stride, stride, panel_stride, panels};
  }
};

/// Kernels for the first 1, 2 or 3 vectors of a group, which need the same keys and have plain logits. If one vector is
/// irregular, they have no effect. `keys` must be a multiple of 4. Only the bf16 path has them.
template <class T, class E>
struct GroupKernels {
  /// Computes PrefillKernels::weights.
  TileChange (*weights[tile_vectors])(T* s, index_t keys, const TileState<T>& state, E* weights) = {};
  /// Computes weights, rescale and accumulate for one vector after the other. Null: the three kernels are as fast.
  TileChange (*attend[tile_vectors])(T* s, index_t keys, const TileState<T>& state, E* weights,
                                     const ValuePanels<E>& v, T* o) = {};
};

/// Number of E in the size of one A. The dimension that a product sums over is packed in tuples of this
/// number: channels in Q, keys in the weights. The layout is [row / tuple][group][tuple].
template <class A, class E>
inline constexpr index_t tuple_size = static_cast<index_t>(sizeof(A) / sizeof(E));

/// Returns the index of a row and a lane in such an array.
template <class A, class E>
SSMAX_INLINE constexpr index_t tuple_at(index_t row, index_t lane, index_t group) {
  constexpr index_t tuple = tuple_size<A, E>;
  return row / tuple * tuple * group + lane * tuple + row % tuple;
}

/// Kernels of attention's tiles. s and o are [row][group]. A group is tile_vectors · width queries, one per
/// lane. `logits` and `accumulate` compute the first 1, 2 or 3 vectors of the group (table index + 1).
///
/// E is the type of the products' operands: q, k, v and weights. Logits, sums and states are T. bfloat16
/// operands need the pair dots or matrix units of a processor. In the tables of targets without them, all
/// functions are null (dispatch/bf16.hpp lists the targets).
template <class T, class E = T>
struct PrefillKernels {
  index_t pass = 0;             // keys, or channels of V, per pass: counts are multiples of it
  index_t width = 0;            // queries per vector
  index_t depth = 1;            // channels of q and k are padded with 0 to a multiple of it
  index_t alignment = 1;        // bytes: products read rows of K fastest if they start at multiples of it
  void (*acquire)() = nullptr;  // if given: call before a thread's first product, release after the last
  void (*release)() = nullptr;

  /// Writes out[c][r] = in[r][c] for at most `width` rows and any number of columns. If `factor` is given,
  /// multiplies row r by factor[r].
  void (*transpose)(const T* const* in, index_t rows, index_t columns, const T* factor, T* out,
                    index_t out_stride);
  /// Writes s[keys][·] = k[keys × d] · q[d][·].
  void (*logits[tile_vectors])(const E* k, index_t k_stride, index_t d, index_t keys, const E* q, T* s);
  /// Computes s[key][·] *= factor for one vector. Only the bf16 path uses it: the float path has the factor
  /// in q.
  void (*multiply)(T* s, index_t keys, const T* factor) = nullptr;
  /// Writes s[key][·] = z[key][·] · factor - offset for one vector. Only the bf16 path uses it.
  void (*place)(const T* z, index_t keys, const T* factor, const T* offset, T* s) = nullptr;
  /// Masks keys for one vector: the logits of keys outside each lane's [first, last), counted from s, become
  /// -inf.
  void (*mask_logits)(T* s, index_t keys, const T* first, const T* last);
  /// Replaces logits of one vector, in units of log2, by weights 2^(x - shift) and updates the state. -inf
  /// becomes 0. `weights` may be the memory of s.
  TileChange (*weights)(T* s, index_t keys, const TileState<T>& state, E* weights);
  GroupKernels<T, E> group{};
  /// Computes o[rows][group] *= factor[group].
  void (*rescale)(T* o, index_t rows, const T* factor);
  /// Computes o[panels · pass][·] += Vᵀ · weights[keys][·].
  void (*accumulate[tile_vectors])(const ValuePanels<E>& v, const E* weights, index_t keys, T* o);
  /// Compute logits and accumulate for the first lanes, at most most_rows_read, from the addresses of rows of K and of
  /// V. Table index of row_accumulate: lanes - 1. Results are bit-identical. Other lanes of the vector: s has those of
  /// lane 0, o any numbers. Null if E is not T.
  void (*row_logits[most_rows_read])(const std::byte* const* k, index_t d, index_t keys, const E* q,
                                     index_t ahead, T* s) = {};
  void (*row_accumulate[most_rows_read])(const std::byte* const* v, index_t channels, index_t keys,
                                         const E* weights, T* o) = {};
  /// Computes out[rows][group] = out · factor[group] + in · in_factor[group].
  void (*merge)(T* out, const T* in, index_t rows, const T* factor, const T* in_factor);
  /// Returns true if all numbers of in[rows × columns] are finite.
  bool (*all_finite)(const E* in, index_t stride, index_t rows, index_t columns);
  /// Packs rows of V into panels of `pass` channels, as keys [first, first + keys) of a block. Missing
  /// channels are 0. The keys of a pass are contiguous. The pass that begins with `key`, a multiple of
  /// `pass`, starts at key · pass.
  void (*pack_values)(const E* v, index_t v_stride, index_t first, index_t keys, index_t channels, E* panels,
                      index_t panel_stride);
};

template <class T>
inline constexpr bool has_extensions<PrefillKernels<T, bfloat16>> = true;

SSMAX_END

#define SSMAX_KERNELS "../kernels/prefill.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS

#define SSMAX_PAIR_KERNELS "../kernels/prefill_pairs.inl"
#include "../dispatch/for_each_extension.inl"
#undef SSMAX_PAIR_KERNELS

#define SSMAX_MATRIX_KERNELS "../kernels/prefill_matrix.inl"
#include "../dispatch/for_each_matrix.inl"
#undef SSMAX_MATRIX_KERNELS
