// The leaf tables: every kernel that is compiled once per instruction set, as plain function pointers. One table for
// each use, so that a program compiles the kernels that it calls and no others.
//
// Conventions of all leaves: lengths count elements and may be 0; pointers need only element alignment; `in`
// and `out` may be the same array, any other overlap is the caller's error; nothing is allocated, nothing
// throws.
//
// exp in the leaves is 2^(x·(scale.high + scale.low) - shift) with an integer shift, so that the shift is
// exact, every rescaling between blocks is an exact power of two, and the only rounding of the argument is at
// magnitude 1/2.
#pragma once

#include "../config.hpp"
#include "../half.hpp"

namespace ssmax {
inline namespace SSMAX_CODE_NAMESPACE {
namespace detail {

/// c·log2(e) in two parts: together they hold the double product to the last bit that matters.
template <class T>
struct Scale {
  T high, low;
};

/// |in·scale| of a row's maximum must stay below this for its shift to be exact with room to spare.
template <class T>
inline constexpr T largest_shift = T{1 << 20};

/// Attention's tiles raise a shift only for a logit this far above it: weights stay below 2^9, and after the first block
/// hardly any of them makes what was accumulated be rescaled (1 % of the time at width 64).
inline constexpr int raise_distance = 8;

template <class T>
struct Extremum {
  T value;
  bool has_nan;
};

/// Work on two other rows of the same length that goes into the gaps of a row's exponentials. Those are bound by the FMA
/// ports, the passes for maxima and products by loads and stores.
template <class T>
struct Meanwhile {
  const T* next = nullptr;  // a row whose maximum is wanted, if any
  Extremum<T> next_top{};   // and that maximum
  T* waiting = nullptr;     // a row to be multiplied by `factor` in place, if any
  T factor{};
};

template <class T>
struct RowLeaves {
  int width;  // lanes of a vector

  /// Rows up to this length go to short_rows and packed_rows: a vector's worth of them, in and out, fills a first-level
  /// cache. Vectors of one lane hold no more than one row: up to 4 elements, short_rows saves them a call for each row.
  index_t longest_short_row;

  /// Largest element (-inf if none), and whether any is NaN.
  Extremum<T> (*max)(const T* in, index_t n);
  /// out = 2^(in·scale - shift); returns the sum. Needs in·scale - shift <= 1 everywhere; flushes below
  /// 2^-125.5 to 0.
  T (*exp_store)(const T* in, index_t n, Scale<T> scale, T shift, T* out, Meanwhile<T>& meanwhile);
  /// out = factor · in.
  void (*multiply)(const T* in, index_t n, T factor, T* out);
  /// out = c·(in - origin) + offset; -inf stays -inf for every c. Rounds the difference, the product with the
  /// offset, and nothing else.
  void (*affine)(const T* in, index_t n, T origin, T c, T offset, T* out);
  /// Softmax of several short rows of n elements, a vector's worth of rows at a time. Returns how many rows
  /// are done: it stops before rows that need the general path (NaN, no finite maximum, |in·scale| >= 2^20)
  /// and before the remainder.
  index_t (*short_rows)(const T* in, index_t in_stride, T* out, index_t out_stride, index_t rows, index_t n,
                        Scale<T> scale);
  /// The same for contiguous rows of n = 1, 2, 4, … < width elements, several to a vector, remainder
  /// included.
  index_t (*packed_rows)(const T* in, T* out, index_t rows, index_t n, Scale<T> scale);
};

/// The rows' backward.
template <class T>
struct GradientLeaves {
  T (*dot)(const T* a, const T* b, index_t n);
  /// The sum of the elements of `in` whose log-probability is not -inf.
  T (*sum_unmasked)(const T* in, const T* log_p, index_t n);
  /// u = y·(dy - mean); dz = c·u; returns the sum of u·z, or 0 where z is null.
  T (*backward)(const T* y, const T* dy, const T* z, index_t n, T mean, T c, T* dz);
  /// u = dy - total·p, 0 where log_p is -inf; dz = c·u; returns the sum of u·z, or 0 where z is null.
  T (*log_backward)(const T* log_p, const T* p, const T* dy, const T* z, index_t n, T total, T c, T* dz);
};

template <class T>
struct RotaryLeaves {
  /// `rows` rows of 2·half elements: (a, b) = (in[i], in[i + half]) -> (a·cos - b·sin, b·cos + a·sin). Tables
  /// advance by table_stride a row. inverse: the rotation by the opposite angle.
  void (*rotate_half_split)(const T* in, index_t in_stride, T* out, index_t out_stride, index_t rows,
                            index_t half, const T* cosine, const T* sine, index_t table_stride, bool inverse);
  /// The same for neighbours (in[2i], in[2i + 1]); tables hold every cosine twice and the sines as -sin,
  /// +sin.
  void (*rotate_interleaved)(const T* in, index_t in_stride, T* out, index_t out_stride, index_t rows,
                             index_t half, const T* cosine, const T* sine, index_t table_stride,
                             bool inverse);
};

/// Attention of few queries against keys and values in storage X. Rows of q are filled up with 0 to whole vectors.
template <class T, class X>
struct FewLeaves {
  /// s[rows × keys] = q[rows × d] · k[keys × d]ᵀ
  void (*logits)(const T* q, index_t q_stride, index_t rows, const X* k, index_t k_stride, index_t keys,
                 index_t d, T* s, index_t s_stride);
  /// o[rows × dv] += s[rows × keys] · v[keys × dv]
  void (*accumulate)(const T* s, index_t s_stride, index_t rows, index_t keys, const X* v, index_t v_stride,
                     index_t dv, T* o, index_t o_stride);
};

/// Vectors of queries in a group (kernels/tile.inl).
inline constexpr int tile_vectors = 3;

enum class TileChange {
  none,
  raised,    // some shift was: what was accumulated must be rescaled
  irregular  // nothing was done: NaN, +inf, or a shift that an integer in T cannot hold exactly
};

/// What one vector of queries keeps of its softmax: Σ 2^x = 2^shift · sum, shift -inf while nothing was seen.
template <class T>
struct TileState {
  T *shift, *sum;
  T* factor;  // out: by what earlier weights must be multiplied
};

/// Attention's tiles. s and o are [row][group]; a group is tile_vectors · width queries, one per lane. logits and
/// accumulate work on the first 1, 2 or 3 vectors of the group (table index + 1).
template <class T>
struct TileLeaves {
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
  /// o[panels · rows][·] += Vᵀ · s[keys][·]; value c of a key lies at c / rows · panel_stride + key · v_stride + c % rows.
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

/// Attention's tiles, backward (kernels/tile_backward.inl); tiles are [key][group].
template <class T>
struct TileGradientLeaves {
  /// One vector of queries: w = 2^(s - shift) in place of s, u = w·(dp - delta) in place of dp, and 0 where w is 0.
  /// |shift| < 2^20, s - shift <= 1.
  void (*gradients)(T* s, T* dp, index_t keys, const T* shift, const T* delta);
  /// One vector of queries: dc[·] = Σ u·z, u = c·u·slope; where u is 0, whatever the others are, it adds and stays 0.
  void (*score_gradients)(T* u, index_t keys, const T* z, const T* slope, const T* c, T* dc);
  /// out[keys][pitch] += a[keys][·] · b[lanes][pitch]; pitch is whole vectors, keys a multiple of TileLeaves::rows.
  void (*add_product)(const T* a, index_t lanes, index_t keys, const T* b, index_t pitch, T* out);
  /// out[rows][columns] += in
  void (*add_rows)(const T* in, index_t in_stride, index_t rows, index_t columns, T* out, index_t out_stride);
};

/// Scores (kernels/scores.inl); all but softcap's on one vector of queries of a tile.
template <class T>
struct ScoreLeaves {
  /// out = cap·tanh(in / cap); -inf and NaN stay. For small in and large, relative error below 4 ulp.
  void (*softcap)(const T* in, index_t n, T cap, T* out);
  /// slope *= the softcap's derivative where it made `capped`
  void (*softcap_slope)(const T* capped, index_t n, T cap, T* slope);
  /// s[key][·] += slope[·] · (first[·] + key)
  void (*ramp)(T* s, index_t keys, const T* slope, const T* first);
  /// s[key][·] += bias[key · width + ·]
  void (*add)(T* s, index_t keys, const T* bias);
  /// s[key][·] *= factor[·], but -inf stays -inf
  void (*multiply)(T* s, index_t keys, const T* factor);
};

/// To and from storage in half precision; T is float.
template <class T>
struct ConversionLeaves {
  void (*widen_half)(const half* in, index_t n, T* out);
  void (*widen_bfloat16)(const bfloat16* in, index_t n, T* out);
  void (*narrow_half)(const T* in, index_t n, half* out);
  void (*narrow_bfloat16)(const T* in, index_t n, bfloat16* out);
};

}  // namespace detail
}  // namespace SSMAX_CODE_NAMESPACE
}  // namespace ssmax
