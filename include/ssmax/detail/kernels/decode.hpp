// Declares the kernels of attention with few queries.
#pragma once

#include <numbers>

#include "exp.hpp"  // for simd/neon_bf16.inl, whose region includes no headers
#include "lanes.hpp"
#include "prefill.hpp"
#include "rows.hpp"

SSMAX_BEGIN_SHARED

/// `count` keys or values of `width` channels, at any addresses: row i lies at rows[i] + bytes. If `ahead` is given,
/// row i prefetches the row at ahead[i] + ahead_bytes.
template <class X>
struct ListedRows {
  using Element = X;
  const std::byte* const* rows;
  index_t bytes, count, width;
  const std::byte* const* ahead = nullptr;
  index_t ahead_bytes = 0;

  SSMAX_INLINE const X* operator[](index_t i) const { return reinterpret_cast<const X*>(rows[i] + bytes); }
  SSMAX_INLINE std::uintptr_t later(index_t i) const {
    return reinterpret_cast<std::uintptr_t>(ahead[i]) + static_cast<std::uintptr_t>(ahead_bytes);
  }
  SSMAX_INLINE ListedRows part(index_t begin, index_t size) const {
    return {rows + begin, bytes, size, width, prefetches() ? ahead + begin : nullptr, ahead_bytes};
  }
  SSMAX_INLINE ListedRows without_prefetch() const { return {rows, bytes, count, width}; }
  SSMAX_INLINE bool prefetches() const { return ahead != nullptr; }
  /// Returns the same rows with their type of elements, if X is void.
  template <class E>
  SSMAX_INLINE ListedRows<E> as() const {
    return {rows, bytes, count, width, ahead, ahead_bytes};
  }
};

/// Kernels of attention with few queries, for keys and values of storage type X. Rows of q are padded with 0
/// to whole vectors.
template <class T, class X>
struct DecodeKernels {
  /// Writes s[rows × keys] = q[rows × d] · k[keys × d]ᵀ.
  void (*logits)(StridedRows<const T> q, index_t rows, const KeyRows<X>& k, StridedRows<T> s);
  /// Computes o[rows × dv] += s[rows × keys] · v[keys × dv].
  void (*accumulate)(StridedRows<const T> s, index_t rows, const KeyRows<X>& v, StridedRows<T> o);
};

/// The multiplier c of a query, and c·log2(e) as exponentials take it.
template <class T>
struct QueryScale {
  double c;
  Scale<T> scale;
};

/// The same for keys and values at any addresses.
template <class T, class X>
struct ListedDecodeKernels {
  void (*logits)(StridedRows<const T> q, index_t rows, const ListedRows<X>& k, StridedRows<T> s);
  void (*accumulate)(StridedRows<const T> s, index_t rows, const ListedRows<X>& v, StridedRows<T> o);
  /// Writes s[keys] = 2^(c·log2(e)·q·k - shift), and shift and sum, for one query. They are bit-identical to those of
  /// OnlineSoftmax. s is padded to a whole vector. Returns false if the shift is not exact: after NaN and +inf, and if
  /// all logits are -inf. s is then undefined.
  bool (*weights)(const T* q, const ListedRows<X>& k, const QueryScale<T>& scale, T* s, T& shift, T& sum);
  /// Writes out[dv] = factor · s[keys] · v[keys × dv].
  void (*output)(const T* s, const ListedRows<X>& v, T factor, T* out);
};

/// The number of keys that are packed together.
inline constexpr index_t packed_keys = 16;

/// Numbers from one row of logits to the next: the largest number of keys of a block.
inline constexpr index_t logit_pitch = 128;

/// Pairs of weights: the weight of a key and a row is at
/// key / 2 · pair_step + row / 8 · group_step + row % 8 · 2 + key % 2.
template <class E>
struct PairWeights {
  const E* weights;
  index_t pair_step, group_step;

  SSMAX_INLINE const E* at(index_t key, index_t row) const {
    return weights + key / 2 * pair_step + row / 8 * group_step + row % 8 * 2 + key % 2;
  }
};

/// Rows that a kernel prefetches while it computes key i: rows[i] of `size` numbers, `bytes` bytes later. They may lie
/// past the end. If rows is null, the kernel does not prefetch.
template <class E>
struct RowsAhead {
  const E* const* rows = nullptr;
  index_t size = 0, bytes = 0;
};

/// `count` values of `width` channels, at any addresses. `ahead` are the rows that they prefetch.
template <class E>
struct FoundRows {
  const E* const* rows;
  index_t count, width;
  RowsAhead<E> ahead;
};

/// `count` keys of `width` channels that pack_keys has packed.
template <class E>
struct PackedKeys {
  const E* keys;
  index_t count, width;
};

/// Kernels of attention with few queries by pair dots. States are those of PrefillKernels<T, E>. In the tables of AMX
/// and of targets without pair dots, all functions are null (dispatch/bf16.hpp lists the targets).
template <class T, class E>
struct PairDecodeKernels {
  /// Packs the rows k[keys] of d channels: [key / packed_keys][pair of channels][packed_keys][2]. A missing
  /// channel is 0. `keys` is a multiple of packed_keys.
  void (*pack_keys)(const E* const* k, index_t keys, index_t d, E* packed) = nullptr;
  /// Writes s[rows][keys] = q · packed kᵀ, with logit_pitch numbers from row to row. q is
  /// [parts][pair of channels][group][2]. The products of the parts are added. Rows of s are padded to a whole vector.
  void (*logits)(const E* q, index_t parts, index_t rows, const PackedKeys<E>& k, const RowsAhead<E>& ahead,
                 T* s) = nullptr;
  /// Does what PrefillKernels::weights does, for at most 16 rows s[rows][keys]. Writes weights
  /// [rows / 8][logit_pitch / 2][8][2]. `keys` is a multiple of 32. The rows of s and of the state are padded to a
  /// multiple of 8 with finite numbers. Null on targets whose vectors do not hold 16 numbers.
  TileChange (*weights)(const T* s, index_t keys, index_t rows, const TileState<T>& state,
                        E* weights) = nullptr;
  /// Computes o[rows] += weightsᵀ · v. The number of values is even. o.stride is a multiple of two vectors. The rows
  /// of o are padded to a multiple of 8.
  void (*accumulate)(const PairWeights<E>& weights, index_t rows, const FoundRows<E>& v,
                     StridedRows<T> o) = nullptr;
  /// Computes out[n] = out · factor + in · in_factor. n is a multiple of two vectors.
  void (*merge)(T* out, const T* in, index_t n, T factor, T in_factor) = nullptr;
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
