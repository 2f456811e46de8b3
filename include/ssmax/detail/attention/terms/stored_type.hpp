// Defines StoredType, the functions of a storage type of keys or values, and converts rows of the type.
#pragma once

#include <algorithm>
#include <cstddef>

#include "../../../query.hpp"
#include "../../kernels/convert.hpp"
#include "../../kernels/decode.hpp"
#include "../../kernels/rows.hpp"
#include "tensors.hpp"

SSMAX_BEGIN_SHARED

/// The factors of the keys, or of the values, of a run. A number is element · factor of the row · factor of the
/// channel.
struct StoredFactors {
  const float* rows = nullptr;      // null: each is 1
  index_t rows_stride = 1;          // floats from one factor to the next, or 0
  const float* channels = nullptr;  // the same for all rows of the run. null: each is 1
};

/// A run of keys that lie contiguous in memory (KeyRun of any storage type). Strides count elements.
struct AnyKeyRun {
  const void* k = nullptr;
  index_t k_stride = 0;
  const void* v = nullptr;
  index_t v_stride = 0, count = 0;
  StoredFactors k_factors{}, v_factors{};
};

/// The functions of the storage type of keys or values. Functions of products are for few queries (kernels/decode.hpp),
/// and null for your own types. `factors` are those of the keys or values, if the type has a factor per row.
template <class Compute>
struct StoredType {
  ElementKind kind = ElementKind::other;
  index_t size = 0, group = 1;  // bytes and channels of an element
  /// Writes rows [range), converted and multiplied by their factors, to `out`.
  void (*load)(const void* rows, index_t stride, const StoredFactors& factors, KeyRange range, index_t n,
               Compute* out, index_t out_stride) = nullptr;
  /// Writes rows to `out`, dequantized and rounded to bfloat16. Null unless the elements have 8 bits.
  void (*dequantize)(const KeyRows<void>& rows, const StoredFactors& factors,
                     StridedRows<bfloat16> out) = nullptr;
  /// With factors of channels, requires scratch[rows][q.stride].
  void (*logits)(StridedRows<const Compute> q, index_t rows, const KeyRows<void>& k,
                 const StoredFactors& factors, Compute* scratch, StridedRows<Compute> s) = nullptr;
  /// With factors of channels, requires scratch[rows][v.width].
  void (*accumulate)(StridedRows<const Compute> s, index_t rows, const KeyRows<void>& v,
                     const StoredFactors& factors, Compute* scratch, StridedRows<Compute> o) = nullptr;
  /// Does what `accumulate` does, with 0 for numbers that are not finite, factors included. copies[257][v.width] is
  /// scratch. Null for types without factors.
  void (*accumulate_finite)(StridedRows<const Compute> s, index_t rows, const KeyRows<void>& v,
                            const StoredFactors& factors, Compute* copies, Compute* scratch,
                            StridedRows<Compute> o) = nullptr;
  /// Rows at any addresses, without factors. Null for keys in views, and for types with factors.
  void (*listed_logits)(StridedRows<const Compute> q, index_t rows, const ListedRows<void>& k,
                        StridedRows<Compute> s) = nullptr;
  void (*accumulate_listed)(StridedRows<const Compute> s, index_t rows, const ListedRows<void>& v,
                            StridedRows<Compute> o) = nullptr;
  bool (*listed_weights)(const Compute* q, const ListedRows<void>& k, const QueryScale<Compute>& scale,
                         Compute* s, Compute& shift, Compute& sum) = nullptr;
  void (*listed_output)(const Compute* s, const ListedRows<void>& v, Compute factor, Compute* out) = nullptr;
};

SSMAX_END

SSMAX_BEGIN_DETAIL

/// Calls f(first key, factors, count) with contiguous factors of rows: in place if the stride is 1, else with copies of
/// up to 256 factors.
template <class F>
void for_contiguous_factors(const StoredFactors& factors, index_t keys, const F& f) {
  const float* rows = factors.rows;
  const index_t stride = rows == nullptr ? 0 : factors.rows_stride;
  if (stride == 1) return f(index_t{0}, rows, keys);
  constexpr index_t most = 256;
  float copies[most];
  if (stride == 0) std::fill_n(copies, std::min(most, keys), rows == nullptr ? 1 : *rows);
  for (index_t key = 0; key < keys; key += most) {
    const index_t count = std::min(most, keys - key);
    for (index_t i = 0; stride != 0 && i < count; ++i) copies[i] = rows[(key + i) * stride];
    f(key, static_cast<const float*>(copies), count);
  }
}

/// Multiplies a row by the factors of its channels.
template <class X, class Compute>
void multiply_channels(Compute* row, const float* factors, index_t n) {
  if constexpr (EightBitStorage<X>) {
    kernels<EightBitKernels<X>>().multiply(row, factors, n, row);
  } else {
    for (index_t i = 0; i < n; ++i) row[i] *= static_cast<Compute>(factors[i]);
  }
}

/// Writes rows [range) of keys or values, converted and multiplied by their factors, to `out`.
template <class Compute, class X>
void load_stored(const void* rows, index_t stride, [[maybe_unused]] const StoredFactors& factors,
                 KeyRange range, index_t n, Compute* out, index_t out_stride) {
  for (index_t i = range.begin; i < range.end; ++i, out += out_stride) {
    const Compute* numbers = widened(static_cast<const X*>(rows) + i * stride, n, out);
    if (numbers != out) std::copy_n(numbers, n, out);
    if constexpr (ScaledStorage<X>) {
      SSMAX_ASSERT(factors.rows != nullptr || factors.channels != nullptr);
      if (factors.rows != nullptr) {
        const auto factor = static_cast<Compute>(factors.rows[i * factors.rows_stride]);
        kernels<RowKernels<Compute>>().multiply(out, n, factor, out);
      }
      if (factors.channels != nullptr) multiply_channels<X>(out, factors.channels, n);
    }
  }
}

/// Writes keys or values to `out`, dequantized and rounded to bfloat16.
template <class X>
void dequantize_stored(const KeyRows<void>& rows, [[maybe_unused]] const StoredFactors& factors,
                       StridedRows<bfloat16> out) {
  const auto dequantize = kernels<DequantizeKernels<X>>().dequantize;
  const KeyRows<X> in = rows.as<X>();
  if constexpr (ScaledStorage<X>) {
    for_contiguous_factors(factors, in.count, [&](index_t first, const float* some, index_t count) {
      dequantize(in.part(first, count), some, factors.channels, {out[first], out.stride});
    });
  } else {
    dequantize(in, nullptr, nullptr, out);
  }
}

SSMAX_END
