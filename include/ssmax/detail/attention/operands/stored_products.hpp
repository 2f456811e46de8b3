// Fills StoredProducts with the kernels of a storage type, for products of few queries with stored keys. Only
// functions that build a forward call use stored_products: the backward pass alone does not instantiate these
// kernels.
#pragma once

#include <algorithm>
#include <cmath>

#include "../../kernels/convert.hpp"
#include "../../kernels/decode.hpp"
#include "../terms/factors.hpp"
#include "../terms/keys.hpp"

SSMAX_BEGIN_DETAIL

/// Multiplies copies of the queries by the factors of channels, and the logits by the factors of rows.
template <class Compute, class X>
void stored_logits(const Compute* q, index_t q_stride, index_t rows, const void* k, index_t k_stride,
                   [[maybe_unused]] const StoredFactors& factors, index_t keys, index_t d, index_t ahead,
                   [[maybe_unused]] Compute* scratch, Compute* s, index_t s_stride) {
  if constexpr (EightBitStorage<X>) {
    SSMAX_ASSERT(factors.rows != nullptr || factors.channels != nullptr);
    if (factors.channels != nullptr) {
      const auto& multiply = kernels<EightBitKernels<X>>().multiply;
      for (index_t r = 0; r < rows; ++r) {
        multiply(q + r * q_stride, factors.channels, d, scratch + r * q_stride);
        std::fill(scratch + r * q_stride + d, scratch + (r + 1) * q_stride, Compute{0});
      }
      q = scratch;
    }
  }
  kernels<DecodeKernels<Compute, X>>().logits(q, q_stride, rows, static_cast<const X*>(k), k_stride, keys, d,
                                              ahead, s, s_stride);
  if constexpr (EightBitStorage<X>) {
    if (factors.rows == nullptr) return;
    const auto& multiply = kernels<EightBitKernels<X>>().multiply;
    for_contiguous_factors(factors, keys, [&](index_t key, const float* some, index_t count) {
      for (index_t r = 0; r < rows; ++r)
        multiply(s + r * s_stride + key, some, count, s + r * s_stride + key);
    });
  }
}

/// Multiplies copies of the weights by the factors of rows, because the caller needs the weights again. Returns the
/// sums over the values in o, without the factors of channels.
template <class Compute, class X>
void accumulate_rows(const Compute* s, index_t s_stride, index_t rows, index_t keys, const X* v,
                     index_t v_stride, const StoredFactors& factors, index_t dv, index_t ahead, Compute* o,
                     index_t o_stride) {
  const auto& products = kernels<DecodeKernels<Compute, X>>();
  if (factors.rows == nullptr)
    return products.accumulate(s, s_stride, rows, keys, v, v_stride, dv, ahead, o, o_stride);
  constexpr index_t most_weights = 1024;
  Compute weights[most_weights];
  const index_t most_keys = most_weights / rows;
  const auto& multiply = kernels<EightBitKernels<X>>().multiply;
  for (index_t key = 0; key < keys; key += most_keys) {
    const index_t count = std::min(most_keys, keys - key);
    const StoredFactors of_rows{factors.rows + key * factors.rows_stride, factors.rows_stride};
    for_contiguous_factors(of_rows, count, [&](index_t first, const float* some, index_t n) {
      for (index_t r = 0; r < rows; ++r)
        multiply(s + r * s_stride + key + first, some, n, weights + r * most_keys + first);
    });
    products.accumulate(weights, most_keys, rows, count, v + key * v_stride, v_stride, dv, ahead, o,
                        o_stride);
  }
}

/// With factors of channels: multiplies the sums over the values by the factors, and adds the products to o.
template <class Compute, class X>
void accumulate_stored(const Compute* s, index_t s_stride, index_t rows, index_t keys, const void* v,
                       index_t v_stride, [[maybe_unused]] const StoredFactors& factors, index_t dv,
                       index_t ahead, [[maybe_unused]] Compute* scratch, Compute* o, index_t o_stride) {
  const X* values = static_cast<const X*>(v);
  if constexpr (EightBitStorage<X>) {
    SSMAX_ASSERT(factors.rows != nullptr || factors.channels != nullptr);
    if (factors.channels == nullptr)
      return accumulate_rows(s, s_stride, rows, keys, values, v_stride, factors, dv, ahead, o, o_stride);
    std::fill_n(scratch, rows * dv, Compute{0});
    accumulate_rows(s, s_stride, rows, keys, values, v_stride, factors, dv, ahead, scratch, dv);
    const auto& add_products = kernels<EightBitKernels<X>>().add_products;
    for (index_t r = 0; r < rows; ++r) add_products(scratch + r * dv, factors.channels, dv, o + r * o_stride);
  } else {
    kernels<DecodeKernels<Compute, X>>().accumulate(s, s_stride, rows, keys, values, v_stride, dv, ahead, o,
                                                    o_stride);
  }
}

/// Returns a factor, or 0 in place of NaN and infinities.
inline float finite_or_0(float factor) { return std::isfinite(factor) ? factor : 0; }

/// Copies up to 256 rows, with 0 for the elements and factors of numbers that are not finite. The sums are then those
/// of accumulate_stored, in the same order.
template <class Compute, EightBitStorage X>
void accumulate_finite(const Compute* s, index_t s_stride, index_t rows, index_t keys, const void* v,
                       index_t v_stride, const StoredFactors& factors, index_t dv, Compute* copies,
                       Compute* scratch, Compute* o, index_t o_stride) {
  constexpr index_t most_keys = 256, most_channels = 64;
  const bool has_channels = factors.channels != nullptr;
  if (has_channels) std::fill_n(scratch, rows * dv, Compute{0});
  Compute* const sums = has_channels ? scratch : o;
  const index_t sums_stride = has_channels ? dv : o_stride;
  Compute* const numbers = copies;
  X* const finite = reinterpret_cast<X*>(copies + dv);
  float of_rows[most_keys];
  for (index_t first = 0; first < keys; first += most_keys) {
    const index_t count = std::min(most_keys, keys - first);
    for (index_t i = 0; i < count; ++i) {
      const X* row = static_cast<const X*>(v) + (first + i) * v_stride;
      load_stored<Compute, X>(v, v_stride, factors, {first + i, first + i + 1}, dv, numbers, 0);
      for (index_t c = 0; c < dv; ++c) finite[i * dv + c] = std::isfinite(numbers[c]) ? row[c] : X{};
      if (factors.rows != nullptr) of_rows[i] = finite_or_0(factors.rows[(first + i) * factors.rows_stride]);
    }
    const StoredFactors finite_factors{factors.rows != nullptr ? of_rows : nullptr, 1};
    accumulate_rows(s + first, s_stride, rows, count, static_cast<const X*>(finite), dv, finite_factors, dv,
                    index_t{0}, sums, sums_stride);
  }
  for (index_t c = 0; has_channels && c < dv; c += most_channels) {
    float of_channels[most_channels];
    const index_t count = std::min(most_channels, dv - c);
    std::transform(factors.channels + c, factors.channels + c + count, of_channels, finite_or_0);
    for (index_t r = 0; r < rows; ++r)
      kernels<EightBitKernels<X>>().add_products(sums + r * dv + c, of_channels, count, o + r * o_stride + c);
  }
}

template <class Compute, class X>
void listed_logits(const Compute* q, index_t q_stride, index_t rows, const std::byte* const* k, index_t keys,
                   index_t d, Compute* s, index_t s_stride) {
  kernels<DecodeKernels<Compute, X>>().listed_logits(q, q_stride, rows, k, keys, d, s, s_stride);
}

template <class Compute, class X>
void accumulate_listed(const Compute* s, index_t s_stride, index_t rows, index_t keys,
                       const std::byte* const* v, index_t dv, Compute* o, index_t o_stride) {
  kernels<DecodeKernels<Compute, X>>().accumulate_listed(s, s_stride, rows, keys, v, dv, o, o_stride);
}

/// Returns the products with keys of type K and values of type V. Exceptions: the pointers are null for your own
/// storage type, and the caller converts the rows. The products with listed rows are null for types with factors.
template <class Compute, class K, class V>
StoredProducts<Compute> stored_products() {
  StoredProducts<Compute> products{};
  if constexpr (BuiltInStorage<K> || QuantizedStorage<K>) {
    products.logits = stored_logits<Compute, K>;
    if constexpr (!EightBitStorage<K>) products.listed_logits = listed_logits<Compute, K>;
  }
  if constexpr (BuiltInStorage<V> || QuantizedStorage<V>) {
    products.accumulate = accumulate_stored<Compute, V>;
    if constexpr (EightBitStorage<V>) products.accumulate_finite = accumulate_finite<Compute, V>;
    if constexpr (!EightBitStorage<V>) products.accumulate_listed = accumulate_listed<Compute, V>;
  }
  return products;
}

SSMAX_END
