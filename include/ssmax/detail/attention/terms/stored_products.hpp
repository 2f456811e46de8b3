// Fills StoredType with the functions and kernels of a storage type.
#pragma once

#include <algorithm>
#include <cmath>

#include "stored_type.hpp"

SSMAX_BEGIN_DETAIL

/// Multiplies copies of the queries by the factors of channels, and the logits by the factors of rows.
template <class Compute, class X>
void stored_logits(StridedRows<const Compute> q, index_t rows, const KeyRows<void>& k,
                   [[maybe_unused]] const StoredFactors& factors, [[maybe_unused]] Compute* scratch,
                   StridedRows<Compute> s) {
  if constexpr (EightBitStorage<X>) {
    SSMAX_ASSERT(factors.rows != nullptr || factors.channels != nullptr);
    if (factors.channels != nullptr) {
      const auto& multiply = kernels<EightBitKernels<X>>().multiply;
      for (index_t r = 0; r < rows; ++r) {
        multiply(q[r], factors.channels, k.width, scratch + r * q.stride);
        std::fill(scratch + r * q.stride + k.width, scratch + (r + 1) * q.stride, Compute{0});
      }
      q.first = scratch;
    }
  }
  kernels<DecodeKernels<Compute, X>>().logits(q, rows, k.as<X>(), s);
  if constexpr (EightBitStorage<X>) {
    if (factors.rows == nullptr) return;
    const auto& multiply = kernels<EightBitKernels<X>>().multiply;
    for_contiguous_factors(factors, k.count, [&](index_t key, const float* some, index_t count) {
      for (index_t r = 0; r < rows; ++r) multiply(s[r] + key, some, count, s[r] + key);
    });
  }
}

/// Multiplies copies of the weights by the factors of rows, because the caller needs the weights again. Returns the
/// sums over the values in o, without the factors of channels.
template <class Compute, class X>
void accumulate_rows(StridedRows<const Compute> s, index_t rows, const KeyRows<X>& v,
                     const StoredFactors& factors, StridedRows<Compute> o) {
  const auto& products = kernels<DecodeKernels<Compute, X>>();
  if (factors.rows == nullptr) return products.accumulate(s, rows, v, o);
  constexpr index_t most_weights = 1024;
  Compute weights[most_weights];
  const index_t most_keys = most_weights / rows;
  const auto& multiply = kernels<EightBitKernels<X>>().multiply;
  for (index_t key = 0; key < v.count; key += most_keys) {
    const index_t count = std::min(most_keys, v.count - key);
    const StoredFactors of_rows{factors.rows + key * factors.rows_stride, factors.rows_stride};
    for_contiguous_factors(of_rows, count, [&](index_t first, const float* some, index_t n) {
      for (index_t r = 0; r < rows; ++r)
        multiply(s[r] + key + first, some, n, weights + r * most_keys + first);
    });
    products.accumulate({weights, most_keys}, rows, v.part(key, count), o);
  }
}

/// With factors of channels: multiplies the sums over the values by the factors, and adds the products to o.
template <class Compute, class X>
void accumulate_stored(StridedRows<const Compute> s, index_t rows, const KeyRows<void>& v,
                       [[maybe_unused]] const StoredFactors& factors, [[maybe_unused]] Compute* scratch,
                       StridedRows<Compute> o) {
  if constexpr (EightBitStorage<X>) {
    SSMAX_ASSERT(factors.rows != nullptr || factors.channels != nullptr);
    if (factors.channels == nullptr) return accumulate_rows(s, rows, v.as<X>(), factors, o);
    std::fill_n(scratch, rows * v.width, Compute{0});
    accumulate_rows(s, rows, v.as<X>(), factors, {scratch, v.width});
    const auto& add_products = kernels<EightBitKernels<X>>().add_products;
    for (index_t r = 0; r < rows; ++r) add_products(scratch + r * v.width, factors.channels, v.width, o[r]);
  } else {
    kernels<DecodeKernels<Compute, X>>().accumulate(s, rows, v.as<X>(), o);
  }
}

/// Returns a factor, or 0 in place of NaN and infinities.
inline float finite_or_0(float factor) { return std::isfinite(factor) ? factor : 0; }

/// Copies up to 256 rows, with 0 for the elements and factors of numbers that are not finite. The sums are then those
/// of accumulate_stored, in the same order.
template <class Compute, EightBitStorage X>
void accumulate_finite(StridedRows<const Compute> s, index_t rows, const KeyRows<void>& v,
                       const StoredFactors& factors, Compute* copies, Compute* scratch,
                       StridedRows<Compute> o) {
  constexpr index_t most_keys = 256, most_channels = 64;
  const index_t dv = v.width;
  const KeyRows<X> stored = v.as<X>();
  const bool has_channels = factors.channels != nullptr;
  if (has_channels) std::fill_n(scratch, rows * dv, Compute{0});
  const StridedRows<Compute> sums = has_channels ? StridedRows<Compute>{scratch, dv} : o;
  Compute* const numbers = copies;
  X* const finite = reinterpret_cast<X*>(copies + dv);
  float of_rows[most_keys];
  for (index_t first = 0; first < v.count; first += most_keys) {
    const index_t count = std::min(most_keys, v.count - first);
    for (index_t i = 0; i < count; ++i) {
      const X* row = stored[first + i];
      load_stored<Compute, X>(v.first, v.stride, factors, {first + i, first + i + 1}, dv, numbers, 0);
      for (index_t c = 0; c < dv; ++c) finite[i * dv + c] = std::isfinite(numbers[c]) ? row[c] : X{};
      if (factors.rows != nullptr) of_rows[i] = finite_or_0(factors.rows[(first + i) * factors.rows_stride]);
    }
    const StoredFactors finite_factors{factors.rows != nullptr ? of_rows : nullptr, 1};
    accumulate_rows({s.first + first, s.stride}, rows, KeyRows<X>{finite, dv, count, dv}, finite_factors,
                    sums);
  }
  for (index_t c = 0; has_channels && c < dv; c += most_channels) {
    float of_channels[most_channels];
    const index_t count = std::min(most_channels, dv - c);
    std::transform(factors.channels + c, factors.channels + c + count, of_channels, finite_or_0);
    for (index_t r = 0; r < rows; ++r)
      kernels<EightBitKernels<X>>().add_products(sums[r] + c, of_channels, count, o[r] + c);
  }
}

template <class Compute, class X>
void listed_logits(StridedRows<const Compute> q, index_t rows, const ListedRows<void>& k,
                   StridedRows<Compute> s) {
  kernels<ListedDecodeKernels<Compute, X>>().logits(q, rows, k.as<X>(), s);
}

template <class Compute, class X>
void accumulate_listed(StridedRows<const Compute> s, index_t rows, const ListedRows<void>& v,
                       StridedRows<Compute> o) {
  kernels<ListedDecodeKernels<Compute, X>>().accumulate(s, rows, v.as<X>(), o);
}

template <class Compute, class X>
bool listed_weights(const Compute* q, const ListedRows<void>& k, const QueryScale<Compute>& scale, Compute* s,
                    Compute& shift, Compute& sum) {
  return kernels<ListedDecodeKernels<Compute, X>>().weights(q, k.as<X>(), scale, s, shift, sum);
}

template <class Compute, class X>
void listed_output(const Compute* s, const ListedRows<void>& v, Compute factor, Compute* out) {
  kernels<ListedDecodeKernels<Compute, X>>().output(s, v.as<X>(), factor, out);
}

/// A type with kernels for its stored rows. The caller converts rows of your own storage type.
template <class X>
concept MultipliedStorage = BuiltInStorage<X> || QuantizedStorage<X>;

/// Returns the functions of a storage type. `has_lists` adds the products of listed rows, which a source may have.
template <class Compute, class X, bool has_lists>
constexpr StoredType<Compute> make_stored_type() {
  StoredType<Compute> type{element_kind<Compute, X>, sizeof(X), group_of<X>, load_stored<Compute, X>};
  if constexpr (QuantizedStorage<X>) type.dequantize = dequantize_stored<X>;
  if constexpr (MultipliedStorage<X>) {
    type.logits = stored_logits<Compute, X>;
    type.accumulate = accumulate_stored<Compute, X>;
    if constexpr (EightBitStorage<X>) {
      type.accumulate_finite = accumulate_finite<Compute, X>;
    } else if constexpr (has_lists) {
      type.listed_logits = listed_logits<Compute, X>;
      type.accumulate_listed = accumulate_listed<Compute, X>;
      type.listed_weights = listed_weights<Compute, X>;
      type.listed_output = listed_output<Compute, X>;
    }
  }
  return type;
}
template <class Compute, class X, bool has_lists>
inline constexpr StoredType<Compute> stored_type = make_stored_type<Compute, X, has_lists>();

SSMAX_END
