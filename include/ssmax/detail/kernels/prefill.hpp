// Attention of many queries.
#pragma once

#include "../../half.hpp"
#include "exp.hpp"

SSMAX_BEGIN_SHARED

/// In units of log2. A query's shift is raised, and its sums rescaled, only when a logit exceeds the shift
/// by more than this; weights stay below 2^9. After the first block that hardly ever happens (1 % of the
/// time at width 64).
inline constexpr int raise_distance = 8;

enum class TileChange {
  none,
  raised,    // some shift was: what was accumulated must be rescaled
  irregular  // nothing was done: NaN, +inf, or a shift that an integer in T cannot hold exactly
};

/// What one vector of queries, or several neighbours, keep of its softmax: Σ 2^x = 2^shift · sum, with shift
/// -inf while nothing was seen.
template <class T>
struct TileState {
  T *shift, *sum;
  T* factor;                      // out: by what earlier weights must be multiplied
  const T* multiplier = nullptr;  // products in 16 bits, if given: of logits, above 0
};

/// Numbers E in the place of one A. What a product sums over, channels in Q and keys in the weights, lies in
/// tuples of so many: [row / tuple][group][tuple].
template <class A, class E>
inline constexpr index_t tuple_size = static_cast<index_t>(sizeof(A) / sizeof(E));

/// Where such an array has the number of a row and a lane.
template <class A, class E>
SSMAX_INLINE constexpr index_t tuple_at(index_t row, index_t lane, index_t group) {
  constexpr index_t tuple = tuple_size<A, E>;
  return row / tuple * tuple * group + lane * tuple + row % tuple;
}

/// Attention's tiles. s and o are [row][group]; a group is tile_vectors · width queries, one per lane.
/// logits and accumulate work on the first 1, 2 or 3 vectors of the group (table index + 1).
///
/// E is what the products' operands q, k, v and weights are; logits, sums and states are T. bfloat16 goes by
/// the pair dots or matrix units of a processor. Targets without them have a table without functions
/// (dispatch/bf16.hpp tells which targets have them).
template <class T, class E = T>
struct PrefillKernels {
  index_t rows = 0;   // keys, or channels of V, that a pass covers: their counts are multiples of it
  index_t width = 0;  // queries of a vector
  index_t depth = 1;  // the channels of q and k are filled up with 0 to a multiple of it
  void (*acquire)() = nullptr;  // if given: before a thread's first product, and release after its last
  void (*release)() = nullptr;

  /// out[c][r] = in[r][c] (· factor[r] if given) for up to `width` rows and any number of columns.
  void (*transpose)(const T* const* in, index_t rows, index_t columns, const T* factor, T* out,
                    index_t out_stride);
  /// s[keys][·] = k[keys × d] · q[d][·]
  void (*logits[tile_vectors])(const E* k, index_t k_stride, index_t d, index_t keys, const E* q, T* s);
  /// One vector: s[key][·] *= factor. Products in 16 bits only; others have it in q.
  void (*multiply)(T* s, index_t keys, const T* factor) = nullptr;
  /// One vector: s[key][·] = z[key][·] · factor - offset. The bf16 path only.
  void (*place)(const T* z, index_t keys, const T* factor, const T* offset, T* s) = nullptr;
  /// One vector: logits of keys outside [first, last) of each lane, counted from s, become -inf.
  void (*hide)(T* s, index_t keys, const T* first, const T* last);
  /// One vector: logits in units of log2 become weights 2^(x - shift), in the memory of s. -inf becomes 0.
  TileChange (*weights)(T* s, index_t keys, const TileState<T>& state, E* weights);
  /// The same for the first 1, 2 or 3 vectors of a group. If one is irregular, nothing is done to any. Products in 16
  /// bits only; keys is a multiple of 4.
  TileChange (*group_weights[tile_vectors])(T* s, index_t keys, const TileState<T>& state, E* weights) = {};
  /// o[rows][group] *= factor[group]
  void (*rescale)(T* o, index_t rows, const T* factor);
  /// o[panels · rows][·] += Vᵀ · weights[keys][·]. V is what pack_values makes of it; where E is T also rows
  /// as they are: value c of a key lies at c / rows · panel_stride + key · v_stride + c % rows.
  void (*accumulate[tile_vectors])(const E* v, index_t v_stride, index_t panel_stride, index_t panels,
                                   const E* weights, index_t keys, T* o);
  /// out[rows][group] = out · factor[group] + in · in_factor[group]
  void (*merge)(T* out, const T* in, index_t rows, const T* factor, const T* in_factor);
  /// Whether no number of in[rows × columns] is NaN or infinite.
  bool (*all_finite)(const E* in, index_t stride, index_t rows, index_t columns);
  /// Rows of V into panels of `rows` channels, as keys [first, first + keys) of a block. Missing channels are
  /// 0. The keys of a pass lie together: key · rows, where key is a multiple of rows, is where one begins.
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
