// Attention of many queries.
#pragma once

#include "exp.hpp"
#include "transpose.hpp"

namespace ssmax {
inline namespace SSMAX_DATA_NAMESPACE {
namespace SSMAX_VISIBLE shared {

/// In units of log2. A query's shift is raised, and its sums rescaled, only when a logit exceeds the shift
/// by more than this; weights stay below 2^9. After the first block that hardly ever happens (1 % of the
/// time at width 64).
inline constexpr int raise_distance = 8;

enum class TileChange {
  none,
  raised,    // some shift was: what was accumulated must be rescaled
  irregular  // nothing was done: NaN, +inf, or a shift that an integer in T cannot hold exactly
};

/// What one vector of queries keeps of its softmax: Σ 2^x = 2^shift · sum, with shift
/// -inf while nothing was seen.
template <class T>
struct TileState {
  T *shift, *sum;
  T* factor;  // out: by what earlier weights must be multiplied
};

/// Attention's tiles. s and o are [row][group]; a group is tile_vectors · width queries, one per lane.
/// logits and accumulate work on the first 1, 2 or 3 vectors of the group (table index + 1).
template <class T>
struct PrefillKernels {
  index_t rows;   // keys, or channels of V, that a pass covers: their counts are multiples of it
  index_t width;  // queries of a vector

  /// out[c][r] = in[r][c] (· factor[r] if given) for up to `width` rows and any number of columns.
  void (*transpose)(const T* const* in, index_t rows, index_t columns, const T* factor, T* out,
                    index_t out_stride);
  /// s[keys][·] = k[keys × d] · q[d][·]
  void (*logits[tile_vectors])(const T* k, index_t k_stride, index_t d, index_t keys, const T* q, T* s);
  /// One vector: logits of keys outside [first, last) of each lane, counted from s, become -inf.
  void (*hide)(T* s, index_t keys, const T* first, const T* last);
  /// One vector: logits in units of log2 become weights 2^(x - shift), in place. -inf becomes 0.
  TileChange (*weights)(T* s, index_t keys, const TileState<T>& state);
  /// o[rows][group] *= factor[group]
  void (*rescale)(T* o, index_t rows, const T* factor);
  /// o[panels · rows][·] += Vᵀ · s[keys][·]. Value c of a key
  /// lies at c / rows · panel_stride + key · v_stride + c % rows.
  void (*accumulate[tile_vectors])(const T* v, index_t v_stride, index_t panel_stride, index_t panels,
                                   const T* s, index_t keys, T* o);
  /// out[rows][group] = out · factor[group] + in · in_factor[group]
  void (*merge)(T* out, const T* in, index_t rows, const T* factor, const T* in_factor);
  /// Whether no number of in[rows × columns] is NaN or infinite.
  bool (*all_finite)(const T* in, index_t stride, index_t rows, index_t columns);
  /// Rows of V into panels [channel / rows][key][rows], missing channels 0.
  void (*pack_values)(const T* v, index_t v_stride, index_t keys, index_t channels, T* panels,
                      index_t panel_stride);
};

}  // namespace shared
}  // namespace SSMAX_DATA_NAMESPACE
}  // namespace ssmax

#define SSMAX_KERNELS "../kernels/prefill.inl"
#include "../dispatch/for_each_target.inl"
#undef SSMAX_KERNELS
